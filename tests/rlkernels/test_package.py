"""The package as a whole: what importing it loads, backend choice, info(), the compiled objects."""

import ast
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
import warnings

import pytest
import torch
from support import ROOT, lacks, run_python

import rlkernels
from rlkernels import _waiting, backend, registry
from rlkernels.__main__ import main
from rlkernels._info import print_info


def test_import_needs_only_torch_and_numpy():
    """Nor the extension: then plain torch runs."""
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "vllm", "transformers", "pydantic", "rich", "trl", "peft", "sqlalchemy"}:
            raise ImportError(name)
before = set(sys.modules)
import rlkernels
print(sorted(name for name in set(sys.modules) - before if name.startswith(("rlkernels.", "torch", "numpy"))))
import torch  # which may look for triton
sys.meta_path.insert(0, Block())
sys.modules["rlkernels._C"] = None
for name in rlkernels.__all__:
    getattr(rlkernels, name)
ids = torch.arange(3)
print(rlkernels.keyed_uniform(1, ids, ids).tolist() != [], rlkernels.backend.choose("keyed_uniform", ids.device))
"""
    assert run_python("-c", code) == "[]\nTrue torch", "every name is loaded on first use"


OPENMP = "import sys; sys.path.insert(0, '.'); import {package}, torch; print(torch.__version__)"


@pytest.mark.parametrize(("package", "chosen", "policy", "spins"), [
    ("python_trainer", {}, "PASSIVE", "1000"), ("bench", {}, "PASSIVE", "1000"),
    ("bench", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", None),
])  # fmt: skip
def test_threads_that_wait_sleep_unless_the_user_chose_otherwise(package, chosen, policy, spins):
    """Read the policy that libgomp reports after torch has loaded it."""
    env = {name: value for name, value in os.environ.items() if name not in _waiting.CHOICES}
    process = subprocess.run(
        [sys.executable, "-c", OPENMP.format(package=package)], cwd=ROOT, capture_output=True, text=True, check=True,
        env=env | {"OMP_DISPLAY_ENV": "VERBOSE"} | chosen,
    )  # fmt: skip
    if "GOMP_SPINCOUNT" not in process.stderr:
        lacks("a torch with libgomp")
    assert f"OMP_WAIT_POLICY = '{policy}'" in process.stderr, process.stderr
    assert spins is None or f"GOMP_SPINCOUNT = '{spins}'" in process.stderr, process.stderr


def test_every_exported_name_is_documented():
    missing = {name for name in rlkernels.__all__ if f"``{name}``" not in rlkernels.__doc__}
    assert missing <= {"__version__"}, "the docstring of rlkernels/__init__.py names all"


def test_type_checkers_see_the_public_names():
    stub = ast.parse((ROOT / "rlkernels/__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname: node.module for node in imports for alias in node.names}
    assert names == rlkernels._EXPORTS | {"weights": "rlkernels"}  # a module


def test_no_module_hides_a_function():
    """Importing ``rlkernels.dtw`` would put the module where the function is."""
    modules = {module.name for module in pkgutil.iter_modules(rlkernels.__path__)}
    assert not modules & set(rlkernels.__all__)


def test_info_names_what_is_missing_and_for_what(monkeypatch, capsys):
    find = importlib.util.find_spec
    absent = {"peft", "trl"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    missing = rlkernels.info()["missing"]
    assert missing["peft"] == "model.lora of the trainer" and "trl" in missing and "safetensors" not in missing
    print_info()
    assert "missing: peft, for model.lora of the trainer\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["info"], ["prove", "--device", "cpu", "--seconds", "0"]])
def test_output_may_be_read_in_part(command):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rlkernels", *command]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300, env=env)
    os.close(writing)
    assert process.returncode == 0 and process.stderr == ""


def test_info_is_json_and_covers_every_op():
    facts = json.loads(json.dumps(rlkernels.info()))
    assert set(facts["ops"]) == set(registry.OPS)
    assert all("torch" in row["written"] for row in facts["ops"].values())


def test_compiled_code_is_what_runs_on_a_cpu():
    other_choices = {name: row["cpu"] for name, row in rlkernels.info()["ops"].items() if row["cpu"] != "cpu"}
    assert other_choices == dict.fromkeys(["soft_dtw", "state_similarity", "rhyme_similarity", "rhyme_topk"], "torch")


def test_extension_runs_on_all_threads():
    assert rlkernels.info()["extension"] == "loaded"
    assert torch.ops.rlkernels.parallel_threads() == torch.get_num_threads()


def test_environment_sets_the_default_backend(monkeypatch, capsys):
    monkeypatch.setenv("RLKERNELS_BACKEND", "torch")
    assert backend.choose("keyed_uniform", torch.device("cpu")) == "torch"
    monkeypatch.setenv("RLKERNELS_BACKEND", "fast")
    with pytest.raises(ValueError, match="RLKERNELS_BACKEND must be one of"):
        backend.choose("keyed_uniform", torch.device("cpu"))
    assert main(["info"]) == 2
    assert "rlkernels info: RLKERNELS_BACKEND must be one of" in capsys.readouterr().err
    monkeypatch.setenv("RLKERNELS_BACKEND", "cpu")
    assert backend.choose("soft_dtw", torch.device("cpu")) == "torch"  # there is no other


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_an_environment_that_asks_for_a_gpu_that_is_not_there(monkeypatch, name):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("RLKERNELS_BACKEND", name)
    backend._check_environment.cache_clear()
    with pytest.raises(ValueError, match=f"RLKERNELS_BACKEND={name} cannot work here: the tensors are on cpu"):
        rlkernels.dtw(torch.rand(2, 3), torch.rand(2, 3))


def test_instruction_set_is_forced_by_the_environment():
    code = "import torch, rlkernels; print(rlkernels.info()['cpu_isa'])"
    assert run_python("-c", code, RLKERNELS_CPU_ISA="portable") == "portable"
    code = "import rlkernels\ntry: rlkernels.info()\nexcept Exception as e: print(e)"
    assert "allowed: auto, portable, avx2, avx512, amx" in run_python("-c", code, RLKERNELS_CPU_ISA="sse9")


def test_an_extension_that_does_not_load_is_warned_of(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rlkernels._C", None)
    monkeypatch.setattr(backend, "__file__", str(tmp_path / "backend.py"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed")])
    load = backend.extension_error.__wrapped__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "the compiled extension is missing" in load()
    extension = (
        tmp_path / "installed/rlkernels/_C.cpython-311-x86_64-linux-gnu.so"
    )  # as after `pip install .` in a clone
    extension.parent.mkdir(parents=True)
    extension.touch()
    with pytest.warns(RuntimeWarning, match=f"takes {tmp_path}, which is not compiled, before .*installed: .* -e"):
        assert "start Python in another folder" in load()
    (tmp_path / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    with pytest.warns(RuntimeWarning, match=r"compiled code.* _C\.cpython-39\S* does not load .*build it again"):
        assert "does not load" in load()


def test_kernels_leave_no_weak_symbols():
    """A weak symbol compiled for AVX-512 may be picked by the linker for every caller, and crash older processors."""
    objects = sorted((ROOT / "build").glob("temp*/kernels/*.o"))
    if not objects:
        lacks("the build folder of the extension")
    for path in objects:
        listing = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
        stray = [line for line in listing.splitlines() if re.search(r"^[0-9a-f]+ [WVu] ", line)]
        assert not stray, f"{path.name}: {stray[:5]}"
