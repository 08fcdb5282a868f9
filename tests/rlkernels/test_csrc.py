"""Includes of csrc go one way, and what belongs to a layer is in no other: import-linter does so for Python. The host
structures in C++, without torch or Python, under the sanitizers of the compiler."""

import re
import shutil
import subprocess

import pytest
from support import ROOT, lacks

CSRC = ROOT / "csrc"
# layer -> the layers whose headers it may include, besides its own
LAYERS = {
    "include": [],
    "cpu": ["include"],
    "cuda": ["include"],
    "runtime": ["include"],
    "ops": ["include", "runtime"],
    "bindings": ["include", "runtime"],
    "module.cpp": ["bindings"],
}
TORCH = ("ATen/", "torch/", "c10/")
PYBIND = ("pybind11/", "Python.h")
# what only some layers may use: who may, and the beginnings of the headers
LIBRARIES = [({"ops", "bindings"}, TORCH), ({"bindings"}, PYBIND), ({"cuda", "ops"}, ("cuda",))]
# macros that mark what a layer is for
MARKS = {"TORCH_LIBRARY": "ops", "PYBIND11_MODULE": "module.cpp", "py::class_": "bindings"}


def sources():
    """Return (layer, file) of all of csrc."""
    for path in sorted(CSRC.rglob("*.*")):
        yield path.relative_to(CSRC).parts[0], path


def includes(path):
    """Return the headers a file includes: (name, whether it is one of ours)."""
    return [(name, quote == '"') for quote, name in re.findall(r'^#include ([<"])(.+)[>"]', path.read_text(), re.M)]


def test_every_folder_is_a_layer():
    assert {layer for layer, _ in sources()} == LAYERS.keys()


@pytest.mark.parametrize("layer", LAYERS)
def test_includes_go_one_way(layer):
    for path in (path for file_layer, path in sources() if file_layer == layer):
        for name, is_local in includes(path):
            if is_local:  # beside the file, or from csrc/include
                file = next(f for f in (path.parent / name, CSRC / "include" / name) if f.exists()).resolve()
                assert file.relative_to(CSRC).parts[0] in (layer, *LAYERS[layer]), f"{path.name} includes {name}"
            for allowed, beginnings in LIBRARIES:
                assert layer in allowed or not name.startswith(beginnings) or is_local, f"{path.name} includes {name}"


def test_ops_register_and_nobody_else_does():
    for layer, path in sources():
        text = path.read_text()
        for mark, home in MARKS.items():
            assert layer == home or mark not in text, f"{path.name} has {mark}"
        assert layer != "ops" or path.suffix == ".h" or "TORCH_LIBRARY" in text, f"{path.name} registers nothing"


def test_csrc_knows_nothing_of_python_packages():
    for _, path in sources():
        code = re.sub(r"//.*", "", path.read_text())
        assert not re.search(r"rlkernels\.(?!_C\b)\w", code) and "python_trainer" not in code, path.name


RUNTIME = CSRC / "runtime"
# sanitizers -> program of tests/cpp -> its arguments
RUNS = {
    "address,undefined": {"rollout_history_check": ["3000", "4"], "allocation_failures": ["6"], "signals_check": []},
    "thread": {"rollout_history_check": [], "signals_check": []},
}


def compile_cpp(sanitizers: str, *arguments: str) -> None:
    """Run the compiler; its programs end at the first finding of a sanitizer."""
    command = ["g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", f"-fsanitize={sanitizers}", "-pthread"]
    command += ["-fno-sanitize-recover=all", f"-I{RUNTIME}", f"-I{CSRC / 'include'}"]
    process = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if "cannot find" in process.stderr and "san" in process.stderr:
        lacks("the sanitizer libraries")
    assert process.returncode == 0 and not process.stderr, process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", RUNS)
def test_nothing_is_found(sanitizers, tmp_path):
    """Random use, threads, broken files, and allocations that fail: what throws has changed nothing. Signals."""
    if not shutil.which("g++"):
        lacks("g++")
    objects = []
    for source in sorted(RUNTIME.glob("block_*.cpp")) + sorted(RUNTIME.glob("rollout_*.cpp")):
        objects.append(str(tmp_path / f"{source.stem}.o"))
        compile_cpp(sanitizers, "-c", str(source), "-o", objects[-1])
    for name, arguments in RUNS[sanitizers].items():
        program = str(tmp_path / name)
        compile_cpp(sanitizers, str(ROOT / f"tests/cpp/{name}.cpp"), *objects, "-o", program)
        process = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert process.returncode == 0, (name, arguments, process.stdout + process.stderr)
