"""The host structures in C++, without torch or Python, under the sanitizers of the compiler."""

import shutil
import subprocess

import pytest
from support import ROOT, lacks

RUNTIME = ROOT / "csrc" / "runtime"
FILE = "FILE"
# sanitizers -> program of tests/cpp -> its arguments
RUNS = {
    "address,undefined": {"rollout_history_check": [FILE, "3000", "4"], "allocation_failures": ["6"]},
    "thread": {"rollout_history_check": [FILE]},
}


def compile_cpp(sanitizers: str, *arguments: str) -> None:
    """Runs the compiler; a program that it makes ends at the first finding."""
    command = ["g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", f"-fsanitize={sanitizers}", "-pthread"]
    command += ["-fno-sanitize-recover=all", f"-I{RUNTIME}"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if "cannot find" in done.stderr and "san" in done.stderr:
        lacks("the sanitizer libraries")
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", RUNS)
def test_nothing_is_found(sanitizers, tmp_path):
    """Random use, threads, broken files, and allocations that fail: what throws has changed nothing."""
    if not shutil.which("g++"):
        lacks("g++")
    objects = []
    for source in sorted(RUNTIME.glob("block_*.cpp")) + sorted(RUNTIME.glob("rollout_*.cpp")):
        objects.append(str(tmp_path / f"{source.stem}.o"))
        compile_cpp(sanitizers, "-c", str(source), "-o", objects[-1])
    for name, arguments in RUNS[sanitizers].items():
        program = str(tmp_path / name)
        compile_cpp(sanitizers, str(ROOT / f"tests/cpp/{name}.cpp"), *objects, "-o", program)
        given = [str(tmp_path / "file") if argument is FILE else argument for argument in arguments]
        done = subprocess.run([program, *given], capture_output=True, text=True)
        assert done.returncode == 0, (name, arguments, done.stdout + done.stderr)
