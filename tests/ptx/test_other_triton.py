"""The kernels as other Tritons compile them, executed: that of GPU machines with torch 2.11, and the newest."""

import os
import subprocess
import sys

import pytest
from aot_kernels import OTHERS
from support import lacks
from triton_aot import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("folder", OTHERS)
def test_the_kernels_of_another_triton(folder):
    if not folder:
        lacks("a second triton: pip install --no-deps --target FOLDER triton==3.6.0, RLKERNELS_OTHER_TRITON=FOLDER")
    paths = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "RLKERNELS_OTHER_TRITON": ""}
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "tests/ptx/test_kernels.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
