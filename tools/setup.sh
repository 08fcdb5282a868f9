#!/bin/sh
# Makes a virtual environment with everything but the compiled extension: tools/setup.sh FOLDER
# Environment: PYTHON (interpreter), TORCH_INDEX (package index for torch), CXX (C++ compiler).
set -eu
cd "$(dirname "$0")/.."
venv=$1
fail() { printf '\nset-up: %s\n' "$1" >&2; exit 1; }

recent_enough() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

python=${PYTHON:-}
if [ -n "$python" ]; then
  command -v "$python" >/dev/null || fail "PYTHON=$python was not found"
  recent_enough "$python" || fail "PYTHON=$python is $("$python" --version 2>&1); Python 3.11, 3.12 or 3.13 is needed"
else
  for candidate in python3 python3.13 python3.12 python3.11; do
    if recent_enough "$candidate"; then python=$candidate; break; fi
  done
  [ -n "$python" ] || fail "no Python 3.11, 3.12 or 3.13 was found (python3 is $(python3 --version 2>&1 || echo absent));
install one and give its path: make setup PYTHON=/path/to/python3.12"
fi

"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "$python has no venv module; on Debian and Ubuntu: apt install python3-venv"
header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
[ -f "$header" ] || fail "$header is missing, which compiling needs; on Debian and Ubuntu: apt install python3-dev"
cxx=${CXX:-g++}
command -v "$cxx" >/dev/null ||
  fail "no C++ compiler: $cxx was not found; on Debian and Ubuntu: apt install g++ (or set CXX)"
echo 'int main() {}' | "$cxx" -std=c++20 -fopenmp -x c++ - -o /dev/null 2>/dev/null ||
  fail "$cxx cannot compile C++20 with OpenMP; GCC 11 or later can"

[ -x "$venv/bin/python" ] && recent_enough "$venv/bin/python" || "$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
terse=-qq
[ ! -t 1 ] || terse=  # a terminal sees the download's progress

# torch first and pinned: an unpinned one pulls several GB of CUDA packages.
echo "installing torch and the build tools into $venv"
pip install $terse ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)" ||
  fail "torch could not be installed"
pip install -qq -c constraints.txt setuptools wheel ninja || fail "the build tools could not be installed"
echo "installing the other packages"
# The extension is compiled in place afterwards, so that later changes recompile only what they touch.
RLKERNELS_NO_EXTENSION=1 pip install $terse --no-build-isolation -c constraints.txt -e '.[train,triton,test]' ||
  fail "the packages of pyproject.toml could not be installed"
