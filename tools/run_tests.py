"""Run lint, types, layers, the CUDA check and the tests, and print one summary. Arguments go to pytest.

``make test`` runs it without the slow tests, ``make test-slow`` runs only them (``--slow``), CI runs both.
``make lint`` runs only the checks (``--checks``). The checks run beside the tests, because each keeps one core busy;
their output comes at the end.

Triton chooses its interpreter when it is imported, so the Triton kernels get a separate pytest process with
TRITON_INTERPRET=1. The tests inside vLLM run in the environment of ``make test-vllm``, if it exists.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRITON_TESTS = "tests/rlkernels/triton"
VLLM_TESTS = "tests/with_vllm"


@dataclass
class Step:
    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    missing: str = ""  # what this machine lacks, so that the step cannot run
    result: str = ""
    closing: str = ""  # pytest's last line
    failed: bool = False
    lacks: list[str] = field(default_factory=list)  # what pytest's summary says

    def run(self, show: Callable[[str], None]) -> None:
        """Run the command; ``show`` gets its lines."""
        if self.missing:
            self.result = f"not run: this machine lacks {self.missing}"
            return
        show(f"\n=== {self.name}: {' '.join(self.command[1:])}")
        start = time.monotonic()
        process = subprocess.Popen(
            self.command, cwd=ROOT, env={**os.environ, **self.env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            show(lines[-1])
        code = process.wait()
        self.failed = code != 0
        self.lacks = [m[1] for m in (re.match(r"\d+ tests?: (.+)", line) for line in lines) if m]
        self.closing = lines[-1].strip("= ") if lines and "pytest" in self.command else ""
        said = self.closing or f"{time.monotonic() - start:.0f} s"
        self.result = f"FAILED with exit code {code} ({said})" if self.failed else f"passed ({said})"


def checks() -> list[Step]:
    """Return what looks at the code without running it."""
    python = sys.executable
    no_nvcc = "" if shutil.which("nvcc") else "nvcc (the CUDA sources were not compiled)"
    return [
        Step("lint", [python, "-m", "ruff", "check", "."]),
        Step("format", [python, "-m", "ruff", "format", "--check", "."]),
        Step("types", [python, "-m", "mypy"]),
        Step("layers", [python, str(Path(python).with_name("lint-imports"))]),
        Step("CUDA sources", [python, "setup.py", "check_cuda"], missing=no_nvcc),
    ]


def tests(pytest_arguments: list[str], slow: bool) -> list[Step]:
    """Return the steps of pytest; where files or folders are named, those that these belong to."""
    python, workers = sys.executable, str(min(os.cpu_count() or 1, 8))
    # Threads that wait must sleep: the workers' threads together are more than there are cores.
    quiet = {"OMP_WAIT_POLICY": "PASSIVE"}
    marked = ["-m", "slow" if slow else "not slow"]
    named = [argument for argument in pytest_arguments if (ROOT / argument.partition("::")[0]).exists()]
    options = [argument for argument in pytest_arguments if argument not in named]
    pytest = [python, "-m", "pytest", "-n", workers, "--dist", "worksteal", *marked, *options]
    no_triton = "" if importlib.util.find_spec("triton") else "triton"
    vllm = Path(f"{sys.prefix}-vllm/bin/python")
    no_vllm = "" if vllm.exists() else "an environment with vLLM (make test-vllm makes it and runs the tests)"
    inside = {folder: [path for path in named if folder in path] for folder in (TRITON_TESTS, VLLM_TESTS)}
    rest = [path for path in named if not any(folder in path for folder in inside)]
    triton = [*pytest, *(inside[TRITON_TESTS] or [TRITON_TESTS])]
    in_vllm = [str(vllm), "-m", "pytest", *options, *(inside[VLLM_TESTS] or [VLLM_TESTS])]
    others = [*pytest, *rest, f"--ignore={TRITON_TESTS}", f"--ignore={VLLM_TESTS}"]
    steps = [
        (inside[TRITON_TESTS], Step("Triton kernels", triton, {**quiet, "TRITON_INTERPRET": "1"}, missing=no_triton)),
        (inside[VLLM_TESTS], Step("vLLM", in_vllm, missing=no_vllm)),
        (rest, Step("tests", others, quiet)),
    ]
    return [step for paths, step in steps if (paths or not named) and not (slow and step.name == "vLLM")]


def main(pytest_arguments: list[str]) -> int:
    slow = "--slow" in pytest_arguments
    given = [argument for argument in pytest_arguments if argument != "--slow"]
    beside = [] if slow else checks()
    alone = [] if given == ["--checks"] else tests(given, slow)
    held: list[str] = []
    thread = threading.Thread(target=lambda: [step.run(held.append) for step in beside])
    thread.start()
    for step in alone:
        step.run(lambda line: print(line, flush=True))
    thread.join()
    print("\n".join(held))
    done = [*beside, *alone]
    print("\n=== summary")
    for step in done:
        print(f"{step.name:<15} {step.result}")
    lacks = dict.fromkeys([s.missing for s in done if s.missing] + [reason for s in done for reason in s.lacks])
    print("not run here:   " + ("; ".join(lacks) if lacks else "nothing, this machine has all that the tests need"))
    failed = [step.name for step in done if step.failed]
    print(f"FAILED: {', '.join(failed)}" if failed else "all passed")
    if done and done[-1].closing:
        print(done[-1].closing)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
