"""The kernels as another Triton compiles them, executed: GPU machines have torch 2.11 with Triton 3.6."""

import os
import subprocess
import sys

import pytest
from aot_kernels import OTHER
from support import lacks
from triton_aot import ROOT


@pytest.mark.slow
def test_the_kernels_of_another_triton():
    if not OTHER:
        lacks("a second triton: pip install --no-deps --target FOLDER triton==3.6.0, RLKERNELS_OTHER_TRITON=FOLDER")
    paths = os.pathsep.join([OTHER, os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "RLKERNELS_OTHER_TRITON": ""}
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "tests/ptx/test_kernels.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
