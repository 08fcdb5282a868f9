"""Builds the C++ programs of tests/cpp with the sanitizers of the compiler."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNTIME = ROOT / "csrc" / "runtime"
POOL = [ROOT / "tests/cpp/block_pool_fuzz.cpp", *sorted(RUNTIME.glob("block_*.cpp"))]
HISTORY = [ROOT / "tests/cpp/rollout_history_check.cpp", *sorted(RUNTIME.glob("rollout_*.cpp"))]
ALLOCATION = [ROOT / "tests/cpp/allocation_failures.cpp", *POOL[1:], *HISTORY[1:]]


def build(sources: Sequence[Path], sanitizers: str, program: Path) -> None:
    """Compile a program that ends at the first finding.

    Raises:
        RuntimeError: errors or warnings of the compiler.
    """
    command = ["g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", f"-fsanitize={sanitizers}", "-pthread"]
    command += ["-fno-sanitize-recover=all", f"-I{RUNTIME}", *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode or built.stderr:
        raise RuntimeError(built.stderr)
