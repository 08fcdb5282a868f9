"""The block pool and the rollout history in C++ alone, under sanitizers: random operations, their books checked."""

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "csrc" / "runtime"
POOL = [ROOT / "tests/cpp/block_pool_fuzz.cpp", *sorted(RUNTIME.glob("block_*.cpp"))]
HISTORY = [ROOT / "tests/cpp/rollout_history_check.cpp", *sorted(RUNTIME.glob("rollout_*.cpp"))]
ALLOCATION = [ROOT / "tests/cpp/allocation_failures.cpp", *POOL[1:], *HISTORY[1:]]
PROGRAMS: dict[tuple[str, str], Sequence[Path]] = {
    ("block pool", "address,undefined"): POOL,
    ("rollout history", "address,undefined"): HISTORY,
    ("rollout history", "thread"): HISTORY,
}
POOL_ROUND = 1_000_000  # operations on one pool
HISTORY_ROUND = 24_000  # of four threads on two histories, one after the other


def build(sources: Sequence[Path], sanitizers: str, program: Path) -> None:
    """Compiles a program that ends at the first finding.

    Raises:
        RuntimeError: what the compiler said, warnings included.
    """
    command = ["g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", f"-fsanitize={sanitizers}", "-pthread"]
    command += ["-fno-sanitize-recover=all", f"-I{RUNTIME}", *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode or built.stderr:
        raise RuntimeError(built.stderr)


def run(args: argparse.Namespace) -> dict[str, Any]:
    if not shutil.which("g++"):
        raise SystemExit("g++ is not installed")
    folder = args.work_dir.resolve() / "sanitized"
    folder.mkdir(parents=True, exist_ok=True)
    found, problems = list[str](), list[str]()
    for (what, sanitizers), sources in PROGRAMS.items():
        program = folder / "program"
        build(sources, sanitizers, program)
        done = 0
        while done < args.operations and not problems:
            count, arguments = one_round(what, args.operations - done, f"{args.seed + done // 1000}", folder)
            ended = subprocess.run([program, *arguments], capture_output=True, text=True)
            done += count
            if ended.returncode:
                problems.append(f"{what}, {sanitizers}, {' '.join(arguments)}: {(ended.stdout + ended.stderr)[:300]}")
        found.append(f"{what}, {sanitizers.replace(',', ' and ')}: {done:,}")
    return {"what": "operations under sanitizers", "found": "; ".join(found), "problems": problems,
            "operations": args.operations}  # fmt: skip


def one_round(what: str, left: int, seed: str, folder: Path) -> tuple[int, list[str]]:
    """Operations, and arguments of the program that does them."""
    if what == "block pool":
        count = min(POOL_ROUND, left)
        return count, [str(count), seed]
    return HISTORY_ROUND, [str(folder / "history"), str(HISTORY_ROUND // 8), seed]
