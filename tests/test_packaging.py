"""What a wheel and a source distribution hold, and that an installed copy works away from the checkout; ``setup.py``:
which torch and CUDA it builds for, and the one line where it cannot."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
import torch
from support import ROOT, lacks, run_python
from torch.utils import cpp_extension

import rlkernels.backend
from tools import make_wheel


def packages(*kinds: str) -> set[str]:
    """Return the files of the two packages in the checkout."""
    folders = ROOT / "rlkernels", ROOT / "python_trainer"
    return {path.relative_to(ROOT).as_posix() for folder in folders for kind in kinds for path in folder.glob(kind)}


def wheel(folder: Path, **env: str) -> Path:
    build = ["build", "--build-lib", str(folder / "lib")]
    bdist_wheel = ["bdist_wheel", "--skip-build", "-d", str(folder), "-b", str(folder / "build")]
    run_python("setup.py", "egg_info", "-e", str(folder), *build, *bdist_wheel, **env)
    return next(folder.glob("*.whl"))


def python_in(site: Path, code: str) -> str:
    """Run code where only the unpacked wheel and the installed dependencies are importable."""
    return run_python("-P", "-c", code, cwd=site.parent, PYTHONPATH=str(site))


CODE = """
import os, sys
others = [p for p in sys.path if p != {site!r} and os.path.exists(os.path.join(p, "rlkernels", "__init__.py"))]
sys.path[:] = [p for p in sys.path if p not in others]  # other installs of the package are none of this test's
import torch, rlkernels
assert rlkernels.__file__.startswith({site!r}), rlkernels.__file__
ids = torch.arange(3)
rlkernels.keyed_uniform(1, ids, ids)
cache = rlkernels.PagedKVCache(1, 1, 8, num_blocks=4, dtype=torch.float32, device="cpu")
seq = cache.open(list(range(20)))
cache.commit(seq)
assert cache.open(list(range(20))).num_cached == 16
history = rlkernels.RolloutHistory()
history.add([1, 2], [3, 4, 5])
assert history.draft([[1, 2]], [[3]], max_tokens=2) == [[4, 5]]
print(rlkernels.info()["extension"])
print(rlkernels.info()["missing"].get("the compiled extension", "nothing"))
"""


@pytest.fixture(scope="module")
def plain_wheel(tmp_path_factory):
    """Build a wheel without the extension."""
    return wheel(tmp_path_factory.mktemp("wheel"), RLKERNELS_NO_EXTENSION="1")


def test_wheel_without_the_extension(plain_wheel, tmp_path):
    assert plain_wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(plain_wheel).namelist())
    assert packages("**/*.py", "**/*.pyi", "**/py.typed", "records.json") <= names
    assert {f"python_trainer/configs/{path.name}" for path in ROOT.glob("configs/*.yaml")} <= names
    assert not any(name.endswith(".so") or name.startswith(("tests/", "bench/", "csrc/")) for name in names)
    zipfile.ZipFile(plain_wheel).extractall(tmp_path / "site")
    printed = python_in(tmp_path / "site", CODE.format(site=str(tmp_path / "site")))
    assert "extension is missing" in printed and printed.endswith("run in its place")


def test_a_wheel_with_compiled_code_asks_for_its_torch(plain_wheel, tmp_path):
    """Check what ``make wheel`` changes about a wheel, and that the commands stay."""
    path = make_wheel.pin(Path(shutil.copy(plain_wheel, tmp_path)), "2.13.0+cpu", "3.12")
    with zipfile.ZipFile(path) as archive:
        files = {name.rpartition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata, commands = (archive.read(files[name]).decode() for name in ("METADATA", "entry_points.txt"))
    requirements = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: torch")]
    assert requirements == ["Requires-Dist: torch<2.14,>=2.13"] and "Requires-Dist: numpy>=1.26" in metadata
    assert metadata.count("Programming Language :: Python :: 3.") == 1 and ":: Python :: 3.12\n" in metadata
    assert "rlkernels-train = python_trainer.__main__:main" in commands


def test_a_script_beside_the_clone_imports_the_package(tmp_path):
    """The clone has the name of the package: in the folder that holds it, Python sees a folder ``rlkernels`` first."""
    clone = tmp_path / "rlkernels"
    shutil.copytree(ROOT / "rlkernels", clone / "rlkernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ROOT / "python_trainer", clone / "python_trainer", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    run_python("setup.py", "editable_wheel", "--dist-dir", str(tmp_path), cwd=clone, RLKERNELS_NO_EXTENSION="1")
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path / "site")
    code = "import os, site, sys\n"  # other installs of the package are none of this test's
    code += "sys.path[:] = [p for p in sys.path if not os.path.exists(os.path.join(p, 'rlkernels', '__init__.py'))]\n"
    code += f"site.addsitedir({str(tmp_path / 'site')!r})\nimport rlkernels; print(rlkernels.__file__)"
    assert run_python("-c", code, cwd=tmp_path, PYTHONPATH="") == str(clone / "rlkernels" / "__init__.py")


@pytest.mark.slow
def test_wheel_with_the_extension(tmp_path):
    """Link the objects of the last build, so it takes seconds only where the extension was built in place."""
    if rlkernels.backend.extension_error() or not list(ROOT.glob("build/temp*")):
        lacks("an extension built in place")
    path = wheel(tmp_path)
    names = zipfile.ZipFile(path).namelist()
    assert sum(name.startswith("rlkernels/_C") for name in names) == 1
    zipfile.ZipFile(path).extractall(tmp_path / "site")
    assert python_in(tmp_path / "site", CODE.format(site=str(tmp_path / "site"))) == "loaded\nnothing"


@pytest.mark.slow
def test_a_setuptools_that_refuses_the_licence_builds_the_extension_all_the_same(tmp_path):
    """Build with a setuptools before 77, which reads another file; a newer one stops at this pyproject.toml."""
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 1")

    for version, refused in (("76.0", False), ("77.0", True)):
        patch = f"setuptools.__version__ = {version!r}"
        process = isolated(["build_ext"], patch, cwd=tmp_path, RLKERNELS_NO_EXTENSION="1")
        assert bool(process.returncode) == refused, process.stderr


def test_source_distribution_can_be_built_and_tested(tmp_path):
    run_python("setup.py", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path), RLKERNELS_NO_EXTENSION="1")
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        lacks("the git repository")
    folders = ("csrc/", "rlkernels/", "python_trainer/", "tests/")
    present = {name for name in tracked.stdout.split("\n") if name.startswith(folders) and (ROOT / name).exists()}
    assert present and present <= names, sorted(present - names)
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "Makefile", "constraints.txt"} <= names


@pytest.fixture
def load(monkeypatch):
    """Return a function that runs setup.py without a build, and gives its names; ``gpus``: capabilities of the GPUs."""

    def run(gpus=(), cuda_home=None, cuda=None):
        calls = []
        monkeypatch.setattr(setuptools, "setup", lambda **arguments: calls.append(arguments))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: gpus[i])
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "sm_120"])
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", cuda_home)
        names = runpy.run_path(str(ROOT / "setup.py"))
        return SimpleNamespace(**names, setup_arguments=calls[0])

    return run


@pytest.mark.parametrize(("arch_list", "gpus", "expected"), [
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
def test_architectures(load, monkeypatch, arch_list, gpus, expected):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if arch_list is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    architectures = re.findall(r",code=(\w+)", " ".join(load(gpus).cuda_arch_flags()))
    assert sorted(architectures) == expected
    if arch_list not in (None, "", "native") or gpus:  # what torch makes of it
        assert architectures == re.findall(r",code=(\w+)", " ".join(cpp_extension._get_cuda_arch_flags()))


def test_architectures_that_torch_does_not_know(load, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hooper")
    with pytest.raises(SystemExit, match=r"^rlkernels: TORCH_CUDA_ARCH_LIST must be a list .* .Hooper.[^\n]*$"):
        load().cuda_arch_flags()


def test_the_cuda_runtime_is_linked_statically(load, tmp_path):
    """The CPU code then loads on machines without the toolkit's libcudart."""
    (extension,) = load(cuda_home=str(tmp_path), cuda="13.0").setup_arguments["ext_modules"]
    assert "-lcudart_static" in extension.extra_link_args and "-lcudart" not in extension.extra_link_args
    (extension,) = load(cuda_home=None, cuda="13.0").setup_arguments["ext_modules"]
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


def test_a_script_in_place_of_nvcc_leads_to_the_headers_of_the_toolkit(load, tmp_path):
    """torch then takes the folder of the script for the toolkit, where no header is."""
    program = tmp_path / "nvcc"
    program.write_text(
        "#!/bin/sh\ncat >&2 <<'PLAN'\n"
        '#$ TOP=/opt/cuda 13/bin/..\n#$ INCLUDES="-I/opt/cuda 13/include"  "-I/opt/extra" \n'
        '#$ SYSTEM_INCLUDES="-isystem" "/opt/cuda 13/include/cccl"  \n'
        '#$ LIBRARIES=  "-L/opt/cuda 13/lib64/stubs" "-L/opt/cuda 13/lib64"\n'
        '#$ gcc -E -x c++ "-I/opt/cuda 13/include" "/dev/null"\nPLAN\n'
    )
    program.chmod(0o755)
    headers, libraries = load().toolkit_folders(str(program))
    assert headers == ["/opt/cuda 13/include", "/opt/extra"]
    assert libraries == ["/opt/cuda 13/lib64/stubs", "/opt/cuda 13/lib64"]


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


def isolated(command, more="", cwd=ROOT, **env):
    python = [sys.executable, "-c", HIDE.format(more=more, command=command)]
    return subprocess.run(python, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False)


def test_an_isolated_build_finds_the_torch_of_its_python():
    process = isolated(["--name"])
    assert process.stdout.split()[-1] == torch.__version__, process.stderr
    assert "torch" not in re.search(r"requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text())[1]
    assert sysconfig.get_path("purelib") in sys.path


@pytest.mark.parametrize(("command", "patch", "line"), [
    (["bdist_wheel"], ABSENT, NO_TORCH),
    (["dist_info"], ABSENT, NO_TORCH),
    (["build_ext", "--inplace"], ABSENT, NO_TORCH),
    (["bdist_wheel"], OLD, r"torch must be 2.11 or newer, got 2.9.1\+cu128: pip install --upgrade torch"),
])  # fmt: skip
def test_a_build_without_torch_or_with_an_old_one_says_how_in_one_line(command, patch, line):
    process = isolated(command, patch)
    assert process.returncode == 1 and not process.stdout
    assert re.fullmatch(f"rlkernels: {line}\n", process.stderr)


def test_what_needs_no_torch_works_without_it():
    for command, env in ((["--version"], {}), (["--name"], {"RLKERNELS_NO_EXTENSION": "1"})):
        process = isolated(command, ABSENT, **env)
        assert process.returncode == 0 and process.stdout.split()[-1] == "None", process.stderr
