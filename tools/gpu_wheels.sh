#!/usr/bin/env bash
# Fetch the wheels that a GPU machine without network lacks for `python -m bench.gpu` (Python 3.12, x86-64):
#   tools/gpu_wheels.sh FOLDER
# The machine has torch, triton, numpy, pyarrow, accelerate and pytest. bench/gpu/README.md says how to install from FOLDER.
set -euo pipefail
folder=${1:?folder for the wheels}
packages=(transformers trl datasets dill multiprocess peft liger-kernel pydantic pydantic-core==2.50.4 annotated-types
  typing-inspection typing-extensions sqlalchemy math-verify latex2sympy2-extended antlr4-python3-runtime)
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --constraint "$(dirname "$0")/../constraints.txt" --dest "$folder" "${packages[@]}"
du -sh "$folder"
