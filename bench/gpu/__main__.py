"""``python -m bench.gpu``: on a GPU machine, builds the extension, checks every op on every GPU backend against the
reference, times them against the device's own limits, runs the GPU tests, and writes one JSON record.

Needs no network. The record is written after every step, so a cut leaves what was done until then. Exit code 1
when the build, a check or a test failed.
"""

import argparse
import json
import os
import re
import selectors
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from bench import _runner
from bench.gpu.cases import CASES
from bench.gpu.problem import GpuCase
from rlkernels.backend import OPS

ROOT = Path(__file__).parents[2]
LIMITS_S = {"facts": 120, "check": 120, "time": 180}  # a job that takes longer hangs


class Record:
    """What has been found so far; every change is on disk at once."""

    def __init__(self, path: Path, **facts: Any):
        self.path, self.start = path, time.monotonic()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.data: dict[str, Any] = {"started": now, **facts, "finished": False}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def save(self) -> None:
        self.data["seconds"] = round(time.monotonic() - self.start, 1)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.path)


def run_facts(commit: str | None) -> dict[str, Any]:
    """What a record says about the run as a whole; ``commit`` for where there is no git repository."""
    return {**_runner.stamp(), **({"commit": commit} if commit else {})}


def record_path(facts: dict[str, Any], ending: str = "") -> Path:
    """Where the record of these ``run_facts`` is looked for, and goes, unless an option says otherwise."""
    return ROOT / f"bench/gpu/records/{(facts['gpu'] or 'cpu').replace(' ', '-')}-{facts['commit']}{ending}.json"


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
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()
        answer = self._read(self.process, time.monotonic() + seconds)
        if answer is None:
            answer = {"ok": False, "message": self._end(self.process, seconds)}
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

    def _end(self, process: subprocess.Popen[bytes], seconds: float) -> str:
        hung = False
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            hung = True
            process.kill()
        code = process.wait()
        said = self.noise.decode(errors="replace").strip()
        self.close()
        return f"hung for {seconds:.0f} s and was killed" if hung else f"the process died with code {code}: {said}"

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()
            self.process = None


def build(device: str, *, with_cuda: bool = True) -> dict[str, Any]:
    """Compiles the extension for this device; without its CUDA part when that fails, so that the rest goes on."""
    env = dict(os.environ)
    if device == "cuda":
        env.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
    out: dict[str, Any] = {}
    attempts: tuple[dict[str, str], ...] = ({}, {"RLKERNELS_NO_CUDA": "1"})
    for attempt in attempts if with_cuda else attempts[1:]:
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, env={**env, **attempt}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        result: dict[str, Any] = {"ok": done.returncode == 0, "seconds": round(time.monotonic() - start, 1)}
        if attempt is attempts[0] or not with_cuda:
            out = result if result["ok"] else {**result, "log": done.stdout[-4000:]}
        else:
            out["without_cuda"] = result
        if result["ok"]:
            break
    return out


def run_tests(env: dict[str, str], deadline: float) -> dict[str, Any]:
    """The tests marked ``gpu``, and those of the Triton kernels, compiled."""
    out: dict[str, Any] = {"ok": True}
    for name, selection in (("triton", ["tests/rlkernels/triton"]), ("gpu", ["tests", "-m", "gpu"])):
        command = [sys.executable, "-m", "pytest", *selection, "--maxfail=20"]
        left = max(deadline - time.monotonic(), 1)
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            out[name] = f"cut after {left:.0f} s"
            continue
        lines = done.stdout.strip().splitlines() or [done.stderr[-500:]]
        failures = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
        out[name] = {"closing": lines[-1], "failures": failures}
        if done.returncode not in (0, 5):  # 5: nothing was selected
            out["ok"], out[name]["log"] = False, done.stdout[-6000:]
    return out


def plan(device: str, ops: list[str], seconds: float) -> list[dict[str, Any]]:
    """All checks, then all timings, in the order of the cases."""
    names = ("cuda", "triton") if device == "cuda" else ("cpu", "triton")
    wanted = [case for case in CASES if not ops or case.op in ops]
    jobs: list[dict[str, Any]] = []
    for case in wanted:
        if not case.timed:
            for backend in [*(b for b in names if getattr(OPS[case.op], b)), "torch"]:
                jobs.append({"kind": "check", "op": case.op, "case": case.label, "backend": backend})
    # large cases are for a GPU; elsewhere the first small one of each op shows that timing works
    first: dict[str, GpuCase] = {}
    for case in wanted:
        if not case.timed:
            first.setdefault(case.op, case)
    for case in [c for c in wanted if c.timed] if device == "cuda" else first.values():
        jobs.append({"kind": "time", "op": case.op, "case": case.label, "seconds": seconds})
    return [{**job, "device": device} for job in jobs]


def run_jobs(record: Record, jobs: list[dict[str, Any]], worker: Worker, deadline: float, console: Console) -> None:
    for i, job in enumerate(track(jobs, "checks and timings", console=console)):
        left = deadline - time.monotonic()
        if left < 5:
            record.data["left_out"] = [f"{j['kind']} {j['op']}: {j['case']}" for j in jobs[i:]]
            break
        answer = worker.ask(job, min(LIMITS_S[job["kind"]], left))
        rows = answer.pop("rows", None)
        if rows is not None:
            record.data["timings"] += rows
            console.print(_runner.table([_runner.Row(**row) for row in rows]))
        else:
            entry = {**{k: v for k, v in job.items() if k not in ("device", "seconds")}, **answer}
            record.data["checks"].append(entry)
            if not answer["ok"]:
                console.print(f"[red]FAILED[/red] {entry}", highlight=False)
        record.save()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--budget-seconds", type=float, default=1200, help="stop after this long (default 1200)")
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


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    args = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    start = time.monotonic()
    deadline = start + args.budget_seconds
    facts = run_facts(args.commit)
    record = Record(args.output or record_path(facts), **facts, checks=[], timings=[])
    console.print(f"record: {record.path}")
    env = {**os.environ, "TRITON_INTERPRET": "1" if args.device == "cpu" else "0"}
    if not args.no_build:
        record.data["build"] = build(args.device)
        record.save()
        console.print(f"build: {record.data['build']}", highlight=False)
    worker = Worker(env)
    record.data["device"] = worker.ask({"kind": "facts", "device": args.device}, LIMITS_S["facts"])
    record.save()
    run_jobs(record, plan(args.device, args.ops, args.seconds), worker, deadline, console)
    worker.close()
    if not args.no_tests and deadline - time.monotonic() > 20:
        record.data["tests"] = run_tests(env, deadline)
    record.data["finished"] = "left_out" not in record.data
    record.save()
    failed = [f"{c['op']} on {c['backend']}: {c['case']}" for c in record.data["checks"] if not c["ok"]]
    parts = [part for part in ("build", "tests", "device") if record.data.get(part, {}).get("ok") is False]
    console.print(
        f"{len(record.data['checks'])} checks, {len(failed)} failed; {len(record.data['timings'])} timed rows"
    )
    for line in [*parts, *failed, *(f"left out: {x}" for x in record.data.get("left_out", []))]:
        console.print(line, highlight=False)
    return 1 if failed or parts else 0


if __name__ == "__main__":
    raise SystemExit(main())
