"""``python -m bench.gpu``: on a GPU machine, builds the extension, checks every op on every GPU backend against the
reference, times them against the device's own limits, runs the tests of the Triton kernels, and writes one JSON record.

Needs no network. The record is written after every step, and the next call does what it lacks. Exit code 1 when the
build, a check, a timing or a test failed.
"""

import argparse
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from bench import _runner
from bench.gpu.cases import CASES
from bench.gpu.problem import GpuCase
from bench.gpu.record import ROOT, Job, Record, earlier, record_path, run_facts
from rlkernels.backend import OPS

LIMITS_S = {"facts": 120, "check": 120, "time": 180}  # a job that takes longer hangs
LEAST_S = 5.0  # to begin a job
TESTS_S = 20.0  # to begin a file of tests


class Worker:
    """A process that does jobs one by one, started again after it died or hung."""

    def __init__(self, env: dict[str, str]):
        self.env, self.noise = env, b""
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self.process is None:
            command = [sys.executable, "-m", "bench.gpu.worker"]
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            answer = self._read(self.process, time.monotonic() + seconds)
        except BrokenPipeError:  # it died after its last answer
            answer = None
        if answer is None:
            answer = {"ok": False, **self._end(self.process, seconds)}
        elif "traceback" in answer:  # the worker leaves after an exception
            self.close()
        return answer

    def _read(self, process: subprocess.Popen[bytes], end: float) -> dict[str, Any] | None:
        """The next answer; None when the process died or the time is up. Reads bytes as they come, lines may wait."""
        assert process.stdout and process.stderr
        pending, self.noise = b"", b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 65536)
                    if key.fileobj is process.stderr:
                        self.noise = (self.noise + data)[-2000:]
                        if not data:
                            selector.unregister(key.fileobj)
                        continue
                    if not data:
                        return None
                    pending += data
                    *lines, pending = pending.split(b"\n")
                    for line in lines:
                        if line.startswith(b"@"):
                            return json.loads(line[1:])
        return None

    def _end(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        hung = False
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            hung = True
            process.kill()
        code = process.wait()
        said = self.noise.decode(errors="replace").strip()
        self.close()
        if hung:
            return {"hung": True, "message": f"hung for {seconds:.0f} s and was killed"}
        return {"message": f"the process died with code {code}: {said}"}

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()
            self.process = None


def build(device: str, seconds: float, *, with_cuda: bool = True) -> dict[str, Any]:
    """Compiles the extension for this device; without its CUDA part when that fails, so that the rest goes on."""
    env = dict(os.environ)
    if device == "cuda":
        env.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
    out: dict[str, Any] = {}
    attempts: tuple[dict[str, str], ...] = ({}, {"RLKERNELS_NO_CUDA": "1"})
    start = time.monotonic()
    for attempt in attempts if with_cuda else attempts[1:]:
        before = time.monotonic()
        code, said = run(
            [sys.executable, "setup.py", "build_ext", "--inplace"], {**env, **attempt}, seconds - (before - start)
        )
        result: dict[str, Any] = {"ok": code == 0, "seconds": round(time.monotonic() - before, 1)}
        if attempt is attempts[0] or not with_cuda:
            out = result if result["ok"] else {**result, "log": said[-4000:]}
        else:
            out["without_cuda"] = result
        if result["ok"] or code is None:
            break
    return out


def run(command: list[str], env: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """Runs a command and all that it starts for at most so long -> (exit code, None where it was cut; what it said)."""
    with subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    ) as process:
        try:
            said, _ = process.communicate(timeout=max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return None, f"cut after {seconds:.0f} s"
        finally:
            if process.returncode is None:  # its compilers go with it
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def test_files() -> list[str]:
    """The tests that run on a GPU where there is one: those of the Triton kernels."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/rlkernels/triton").glob("test_*.py"))


def run_tests(record: Record, env: dict[str, str], deadline: float) -> None:
    """The files of tests that the record lacks, side by side: most of their time goes into compiling kernels."""

    def run_file(file: str) -> None:
        left = deadline - time.monotonic()
        if left < TESTS_S:
            return
        code, said = run([sys.executable, "-m", "pytest", file, "--maxfail=20"], env, left)
        if code is None:
            return
        lines = said.strip().splitlines() or [""]
        ok = code in (0, 5)  # 5: nothing was selected
        found = {"ok": ok, "closing": lines[-1], "failures": [x for x in lines if re.match(r"(FAILED|ERROR) ", x)]}
        with lock:
            record.data["tests"][file] = found if ok else {**found, "log": said[-6000:]}
            record.save()

    lock = threading.Lock()
    with ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1)) as pool:
        list(pool.map(run_file, [file for file in test_files() if file not in record.data["tests"]]))


def plan(device: str, seconds: float) -> list[Job]:
    """All checks, then all timings, in the order of the cases."""
    names = ("cuda", "triton") if device == "cuda" else ("cpu", "triton")
    jobs: list[Job] = []
    for case in CASES:
        if not case.timed:
            for backend in [*(b for b in names if getattr(OPS[case.op], b)), "torch"]:
                jobs.append({"kind": "check", "op": case.op, "case": case.label, "backend": backend})
    # large cases are for a GPU; elsewhere the first small one of each op shows that timing works
    first: dict[str, GpuCase] = {}
    for case in CASES:
        if not case.timed:
            first.setdefault(case.op, case)
    for case in [c for c in CASES if c.timed] if device == "cuda" else first.values():
        jobs.append({"kind": "time", "op": case.op, "case": case.label, "seconds": seconds})
    return [{**job, "device": device} for job in jobs]


def named(job: Job) -> str:
    return f"{job['kind']} {job['op']}{' on ' + job['backend'] if 'backend' in job else ''}: {job['case']}"


def answered(worker: Worker, job: Job, deadline: float) -> dict[str, Any] | None:
    """What the worker found; None where it was the end of the budget that cut it, and not its own limit."""
    left, longest = deadline - time.monotonic(), LIMITS_S[job["kind"]]
    if left < LEAST_S:
        return None
    answer = worker.ask(job, min(longest, left))
    return None if answer.get("hung") and left < longest else answer


def run_jobs(record: Record, jobs: list[Job], worker: Worker, deadline: float, console: Console) -> None:
    for job in track(jobs, "checks and timings", console=console):
        answer = answered(worker, job, deadline)
        if answer is None:
            break
        if "rows" in answer:
            record.data["timings"] += answer["rows"]
            record.save()
            console.print(_runner.table([_runner.Row(**row) for row in answer["rows"]]))
            continue
        entry = {**{k: v for k, v in job.items() if k not in ("device", "seconds")}, **answer}
        record.data["checks" if job["kind"] == "check" else "failed_timings"].append(entry)
        record.save()
        if not answer["ok"]:
            console.print(f"[red]FAILED[/red] {escape(str(entry))}", highlight=False)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--budget-seconds", type=float, default=540, help="stop after this long (default 540)")
    parser.add_argument("--output", type=Path, help="the record (default bench/gpu/records/DEVICE-COMMIT.json)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, Triton interpreted")
    parser.add_argument("--ops", nargs="+", default=[], metavar="OP", help="these ops only")
    parser.add_argument("--seconds", type=float, default=0.5, help="time budget per provider and timed case")
    parser.add_argument("--commit", help="what the record names where there is no git repository")
    parser.add_argument("--no-build", action="store_true", help="use the extension as it is")
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest")
    args = parser.parse_args(argv)
    unknown = [op for op in args.ops if op not in OPS]
    if unknown:
        parser.error(f"no op named {', '.join(unknown)}; there are {', '.join(OPS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --device cpu is a dry run")
    return args


def close(record: Record, jobs: list[Job], console: Console) -> int:
    """Notes what is left, and prints what it came to -> exit code."""
    data = record.data
    left = [named(job) for job in jobs if not record.has(job)]
    files = [f"tests {file}" for file in test_files() if file not in data["tests"]]
    data["left_out"], data["finished"] = left + files, not left + files
    record.save()
    failed = [named(found) for found in [*data["checks"], *data["failed_timings"]] if not found["ok"]]
    failed += [f"tests {file}: {found['closing']}" for file, found in data["tests"].items() if not found["ok"]]
    failed += [part for part in ("build", "device") if data.get(part, {}).get("ok") is False]
    for line in failed:
        console.print(f"failed: {escape(line)}", highlight=False)
    counts = f"{len(data['checks'])} checks, {len(data['timings'])} timed rows, {len(data['tests'])} files of tests"
    console.print(f"{counts}; {len(failed)} failed", highlight=False)
    if left or files:
        console.print(
            f"left out: {len(left)} checks and timings, {len(files)} files of tests; the same command goes on"
        )
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    args = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    deadline = time.monotonic() + args.budget_seconds
    facts = run_facts(args.commit)
    path = args.output or record_path(facts)
    before = earlier(path, facts)
    record = Record(path, **{**facts, "checks": [], "timings": [], "failed_timings": [], "tests": {}, **before})
    console.print(f"record: {path}{', which goes on' if before else ''}")
    env = {**os.environ, "TRITON_INTERPRET": "1" if args.device == "cpu" else "0"}
    if not args.no_build:
        record.data["build"] = build(args.device, args.budget_seconds)
        record.save()
        console.print(escape(f"build: {record.data['build']}"), highlight=False)
    worker = Worker(env)
    found = answered(worker, {"kind": "facts", "device": args.device}, deadline)
    record.data["device"] = found or record.data.get("device", {})
    record.save()
    jobs = plan(args.device, args.seconds)
    wanted = [job for job in jobs if not record.has(job) and job["op"] in (args.ops or OPS)]
    run_jobs(record, wanted, worker, deadline, console)
    worker.close()
    if not args.no_tests:
        run_tests(record, env, deadline)
    return close(record, jobs, console)


if __name__ == "__main__":
    raise SystemExit(main())
