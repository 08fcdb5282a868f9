"""``setup.py``: which torch and CUDA it builds for, and the one line where it cannot."""

import os
import re
import runpy
import subprocess
import sys
import sysconfig
from types import SimpleNamespace

import pytest
import setuptools
import torch
from support import ROOT
from torch.utils import cpp_extension


@pytest.fixture
def load(monkeypatch):
    """Runs setup.py without building anything -> its names; ``gpus``: capabilities of the GPUs that torch sees."""

    def run(gpus=(), cuda_home=None, cuda=None):
        calls = []
        monkeypatch.setattr(setuptools, "setup", lambda **given: calls.append(given))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: gpus[i])
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "sm_120"])
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", cuda_home)
        names = runpy.run_path(str(ROOT / "setup.py"))
        return SimpleNamespace(**names, given=calls[0])

    return run


@pytest.mark.parametrize(("wanted", "gpus", "expected"), [
    (None, [], ["compute_90", "sm_80", "sm_90"]),
    ("", [], ["compute_90", "sm_80", "sm_90"]),
    ("native", [], ["compute_90", "sm_80", "sm_90"]),
    (None, [(9, 0)], ["compute_90", "sm_90"]),
    ("", [(8, 0), (12, 0), (8, 0)], ["compute_80", "sm_120", "sm_80"]),
    ("8.0", [(9, 0)], ["sm_80"]),
    ("8.0 9.0a+PTX", [], ["compute_90a", "sm_80", "sm_90a"]),
    ("Hopper", [], ["compute_90", "sm_90"]),
    ("Ampere;Hopper", [], ["compute_86", "compute_90", "sm_80", "sm_86", "sm_90"]),
])  # fmt: skip
def test_architectures(load, monkeypatch, wanted, gpus, expected):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if wanted is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    found = re.findall(r",code=(\w+)", " ".join(load(gpus).cuda_arch_flags()))
    assert sorted(found) == expected
    if wanted not in (None, "", "native") or gpus:  # what torch makes of it
        assert found == re.findall(r",code=(\w+)", " ".join(cpp_extension._get_cuda_arch_flags()))


def test_architectures_that_torch_does_not_know(load, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hooper")
    with pytest.raises(SystemExit, match=r"^rlkernels: TORCH_CUDA_ARCH_LIST must be a list .* .Hooper.[^\n]*$"):
        load().cuda_arch_flags()


def test_the_cuda_runtime_is_linked_statically(load, tmp_path):
    """So that the CPU code loads on machines without the toolkit's libcudart."""
    (extension,) = load(cuda_home=str(tmp_path), cuda="13.0").given["ext_modules"]
    assert "-lcudart_static" in extension.extra_link_args and "-lcudart" not in extension.extra_link_args
    (extension,) = load(cuda_home=None, cuda="13.0").given["ext_modules"]
    assert not [flag for flag in extension.extra_link_args if "cuda" in flag]


@pytest.mark.parametrize(("nvcc", "cuda", "stops"), [
    ("12.8", "13.0", True), ("12.4", "12.8", False), ("13.0", "13.0", None), ("13.1", "12.8", None),
])  # fmt: skip
def test_an_older_nvcc_gives_one_line(load, tmp_path, capsys, nvcc, cuda, stops):
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V{nvcc}.20'\n")
    program.chmod(0o755)
    names = load(cuda_home=str(tmp_path), cuda=cuda)
    line = rf"rlkernels: {program} is of CUDA {nvcc}, older than the {cuda} of torch: set CUDA_HOME [^\n]*"
    if stops:
        with pytest.raises(SystemExit, match=f"^{line}$"):
            names.check_nvcc(str(program))
        return
    names.check_nvcc(str(program))
    assert re.fullmatch("" if stops is None else f"{line}\n", capsys.readouterr().err)


HIDE = """
import runpy, sys, sysconfig
site = sysconfig.get_path("purelib")
import setuptools
sys.path = [path for path in sys.path if path != site]
sys.path_importer_cache.clear()
{more}
sys.argv = ["setup.py", *{command!r}]
names = runpy.run_path("setup.py", run_name="__main__")
print(names["torch"].__version__ if names["torch"] else None)
"""
NO_TORCH = r"this Python has no torch to build with .*pip install --no-build-isolation \. [^\n]*"
ABSENT = "sysconfig.get_path = lambda *_: '/nowhere'"
OLD = """
import importlib.machinery, types
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.__version__, torch.__spec__ = "2.9.1+cu128", importlib.machinery.ModuleSpec("torch", None)
"""


def isolated(command, more="", **env):
    code = HIDE.format(more=more, command=command)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_an_isolated_build_finds_the_torch_of_its_python():
    done = isolated(["--name"])
    assert done.stdout.split()[-1] == torch.__version__, done.stderr
    assert "torch" not in re.search(r"requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text())[1]
    assert sysconfig.get_path("purelib") in sys.path


@pytest.mark.parametrize(("command", "here", "line"), [
    (["bdist_wheel"], ABSENT, NO_TORCH),
    (["dist_info"], ABSENT, NO_TORCH),
    (["build_ext", "--inplace"], ABSENT, NO_TORCH),
    (["bdist_wheel"], OLD, r"torch must be 2.11 or newer, got 2.9.1\+cu128: pip install --upgrade torch"),
])  # fmt: skip
def test_a_build_without_torch_or_with_an_old_one_says_how_in_one_line(command, here, line):
    done = isolated(command, here)
    assert done.returncode == 1 and not done.stdout
    assert re.fullmatch(f"rlkernels: {line}\n", done.stderr)


def test_what_needs_no_torch_works_without_it():
    for command, env in ((["--version"], {}), (["--name"], {"RLKERNELS_NO_EXTENSION": "1"})):
        done = isolated(command, ABSENT, **env)
        assert done.returncode == 0 and done.stdout.split()[-1] == "None", done.stderr
