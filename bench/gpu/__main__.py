"""``python -m bench.gpu``: times our kernels and their rivals on a GPU, most important first, and writes one record.

It needs no network, and builds the extension meanwhile. It proves the kernels by ``python -m rlkernels prove``, times
the large cases, a decode pass and a micro-batch of a model, and runs the tests of the kernels and compute-sanitizer.
Every finding is in the record as soon as it is known, and the next call does what is not there yet. Exit code 1 if the
build, a timed row, the sanitizer or a test failed.
"""

import argparse
import os
import pkgutil
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from bench._case import Row
from bench._runner import table
from bench.gpu.build import Build, run
from bench.gpu.cases import SANITIZED
from bench.gpu.journal import ROOT, Journal, call_facts, record_path
from bench.gpu.worker import INPUTS
from rlkernels.backend import OPS
from rlkernels.proof import PROVABLE
from rlkernels.proof.process import DeviceLost, Message, Worker

LEAST_S = 5.0  # to begin a job
LEAST_TESTS_S = 20.0  # to begin a file of tests
LEAST_SANITIZED_S = 60.0
BUILD_S = 240.0  # of a call, after which nobody waits for the build any more
PROOF_S = 120.0
SANITIZERS = ("memcheck", "racecheck")
MODEL = ("decode", "train")
ROW_FIELDS = Row.__dataclass_fields__
# kind of a job -> seconds from one sign of life to the next, after which it hangs
LIMITS_S = {"device": 120.0, "time": 120.0, "model": 120.0, "sanitize": 240.0, "tests": 300.0}


def plan(cases: Sequence[Any], device: str, seconds: float, sanitizer: bool) -> list[Message]:
    """All jobs, in the order in which they are done; without a GPU the first small case of each op is timed."""
    chosen = [case for case in cases if case.timed]
    if device != "cuda":
        small = [case for case in cases if not case.timed]
        chosen = [next(case for case in small if case.op == op) for op in dict.fromkeys(case.op for case in small)]
    timed = [{"kind": "time", "op": c.op, "case": c.label, "seconds": seconds} for c in chosen]
    jobs = [
        *(job for job in timed if not OPS[job["op"]].cuda),  # while the extension is compiled
        {"kind": "prove", "op": "all", "case": "for a step of Qwen2.5-0.5B"},
        *({"kind": "model", "op": part, "case": who} for part in MODEL for who in ("torch", "triton", "auto")),
        *(job for job in timed if OPS[job["op"]].cuda),
        {"kind": "tests", "op": "all", "case": "the Triton kernels"},
        *({"kind": "sanitize", "op": group, "case": tool} for group in SANITIZED for tool in SANITIZERS if sanitizer),
    ]
    return [{**job, "device": device} for job in jobs]


def name_of(job: Message) -> str:
    """Return what a job is called in records and on the screen: ``"time dtw: 512 x 512, length 512"``."""
    return f"{job['kind']} {job['op']}: {job['case']}"


class Session:
    """One call: what has been found, and how to find out more until the time is up."""

    def __init__(self, args: argparse.Namespace, cases: str, console: Console):
        self.args, self.console = args, console
        self.end = time.monotonic() + args.budget_seconds
        self.build_end = time.monotonic() + min(BUILD_S, args.budget_seconds / 2)
        facts = call_facts(args.commit)
        self.journal = Journal(args.output or record_path(facts), facts)
        self.sanitizer = args.device == "cuda" and shutil.which("compute-sanitizer") is not None
        self.journal.add("call", **facts, device=args.device, budget_s=args.budget_seconds, sanitizer=self.sanitizer)
        self.env = {**os.environ, "TRITON_INTERPRET": "1" if args.device == "cpu" else "0"}
        self.worker = Worker([sys.executable, "-m", "bench.gpu.worker", cases], self.env)
        self.build: Build | None = None
        self.doing = {"prove": self.prove, "tests": self.test, "sanitize": self.sanitize}

    def left(self) -> float:
        return self.end - time.monotonic()

    def work(self, jobs: Sequence[Message]) -> None:
        """Raises DeviceLost."""
        if not self.args.no_build:
            self.build = Build(self.args.device)
        try:
            if not self.journal.last("device").get("ok"):
                answer = self.ask({"kind": "device", "device": self.args.device})
                if not answer.get("cut"):
                    self.journal.add("device", **answer)
            for job in jobs:
                if self.left() < LEAST_S:
                    return
                if job["kind"] != "time" or OPS[job["op"]].cuda:
                    self.wait_for_build()
                if self.build is None or job["kind"] in ("time", "model"):
                    self.doing.get(job["kind"], self.rows)(job)
        finally:
            self.worker.close()
            if self.build:
                self.build.stop()

    def wait_for_build(self) -> None:
        """Waits while there is time for it; a worker that began without the extension starts anew."""
        if self.build and self.build.done(max(self.build_end - time.monotonic(), 0.0)):
            self.journal.add("build", **self.build.found)
            self.console.print(escape(f"build: {self.build.found}"), highlight=False)
            self.build.stop()
            self.build = None
            self.worker.close()

    def ask(self, job: Message, hear: Any = lambda message: None) -> Message:
        return self.worker.ask(job, LIMITS_S[job["kind"]], self.end, hear)

    def rows(self, job: Message) -> None:
        """A job that gives rows; who takes the process along, or hangs, gets a row that says so; the others go on."""
        here = []
        while self.left() >= LEAST_S:
            begun = [""]

            def hear(message: Message, begun: list[str] = begun) -> None:
                begun[0] = message.get("begin", begun[0])
                if "row" in message:
                    here.append(self.journal.add("row", of=job["kind"], **message["row"]))

            place = job["kind"], job["op"], job["case"]
            known = [e["provider"] for e in self.journal.of("row") if (e["of"], e["op"], e["shape"]) == place]
            answer = self.ask({**job, "without": known}, hear)
            if answer.get("cut"):
                break
            if answer["ok"]:
                self.finish(job)
                break
            named = bool(begun[0]) and begun[0] not in [e["provider"] for e in here]
            row = {"op": job["op"], "provider": begun[0] if named else INPUTS, "shape": job["case"], "ok": False}
            here.append(self.journal.add("row", of=job["kind"], **row, missing=answer["message"][:300]))
            if row["provider"] == INPUTS:
                self.finish(job)  # no other provider would fare better
                break
        if here:
            self.console.print(table([shown(row) for row in here]))

    def finish(self, job: Message) -> None:
        self.journal.add("done", job=name_of(job))

    def prove(self, job: Message) -> None:
        """In its own process, which stores the verdicts for this machine too and writes a record of its own."""
        self.worker.close()  # its memory would be in the way
        seconds = min(PROOF_S, self.left())
        record = self.journal.path.with_name(f"{self.journal.path.stem}-prove.json")
        command = [sys.executable, "-m", "rlkernels", "prove", "--again", "--device", self.args.device]
        command += ["--seconds", str(int(seconds) - 5), "--record", str(record)]
        command += ["--ops", *ops] if (ops := [op for op in self.args.ops if op in PROVABLE]) else []
        code, said = run(command, self.env, seconds + 30)
        self.console.print(said, highlight=False, markup=False)
        self.journal.add("prove", ok=code in (0, 1), exit_code=code, said=said[-4000:])
        self.finish(job)

    def sanitize(self, job: Message) -> None:
        if self.left() < LEAST_SANITIZED_S:
            return
        self.worker.close()
        command = ["compute-sanitizer", "--tool", job["case"], "--error-exitcode", "9"]
        if job["case"] == "memcheck":  # torch and Triton try calls that may fail, and go on
            command += ["--report-api-errors", "no"]
        command += [sys.executable, "-m", "bench.gpu.sanitized", *SANITIZED[job["op"]]]
        limit = min(LIMITS_S["sanitize"], self.left())
        code, said = run(command, {**self.env, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, limit)
        if code is None and limit < LIMITS_S["sanitize"]:
            return
        how = "clean" if code == 0 else "hung" if code is None else f"exit code {code}"
        log = {} if code == 0 else {"log": said[-4000:]}
        closing = (said.strip().splitlines() or [""])[-1]
        self.journal.add("sanitize", op=job["op"], case=job["case"], ok=code == 0, message=f"{how}: {closing}", **log)
        self.finish(job)

    def test(self, job: Message) -> None:
        """The files of tests that the record lacks, side by side: most of their time goes into compiling kernels."""
        if self.args.no_tests:
            return
        self.worker.close()
        lock = threading.Lock()

        def one(file: str) -> None:
            limit = min(LIMITS_S["tests"], self.left())
            if limit < LEAST_TESTS_S:
                return
            code, said = run([sys.executable, "-m", "pytest", file, "--maxfail=20"], self.env, limit)
            if code is None and limit < LIMITS_S["tests"]:
                return
            lines, ok = said.strip().splitlines() or [""], code in (0, 5)  # 5: nothing was selected
            failures = [x for x in lines if x.startswith(("FAILED ", "ERROR "))]
            log = {} if ok else {"failures": failures, "log": said[-6000:]}
            with lock:
                self.journal.add("tests", file=file, ok=ok, closing=lines[-1], **log)

        done = {e["file"] for e in self.journal.of("tests")}
        with ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1)) as pool:
            list(pool.map(one, [file for file in test_files() if file not in done]))
        if {e["file"] for e in self.journal.of("tests")} >= {*test_files()}:
            self.finish(job)

    def close(self, jobs: Sequence[Message], lost: str) -> int:
        """Notes what is left, and prints what it came to -> exit code."""
        left = [name_of(job) for job in jobs if not self.journal.done(name_of(job))]
        failed = [told(e) for e in self.journal.entries if e.get("ok") is False and e["kind"] != "build"]
        failed += ["build"] if self.journal.last("build").get("ok") is False else []
        failed += [f"device lost: {lost}"] if lost else []
        end = {"left_s": round(self.left(), 1), "left_out": left, "failed": failed, "lost": lost, "finished": not left}
        self.journal.add("end", **end)
        for line in failed:
            self.console.print(f"failed: {escape(line)}", highlight=False)
        rows = sum(1 for e in self.journal.of("row") if e["ok"])
        tested = sum(1 for _ in self.journal.of("tests"))
        counts = f"{rows} rows, {tested} files of tests; {len(failed)} failed; {len(left)} left out"
        self.console.print(counts, highlight=False)
        if left:
            self.console.print("the same command goes on")
        return 1 if failed else 0


def shown(row: Message) -> Row:
    """A line of the table; a package that is not installed has a row without ``ok``."""
    found = {name: value for name, value in row.items() if name in ROW_FIELDS}
    return Row(**found | ({"missing": f"{row['missing']} is not installed"} if row["ok"] is None else {}))


def told(entry: Message) -> str:
    """A failure in one line."""
    who = entry.get("provider") or entry.get("file") or ""
    why = entry.get("missing") or entry.get("message") or entry.get("closing") or entry.get("said")
    if not why:
        why = f"error {entry.get('error')}, allowed {entry.get('allowed')}"
    where = " ".join(str(entry[name]) for name in ("op", "case", "shape") if name in entry)
    return f"{entry.get('of', entry['kind'])} {where} {who}: {why}".replace("  ", " ")


def test_files() -> list[str]:
    """The tests that run on a GPU where there is one: those of the Triton kernels."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/rlkernels/triton").glob("test_*.py"))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--budget-seconds", type=float, default=540, help="stop after this long (default 540)")
    parser.add_argument("--output", type=Path, help="the record (default bench/gpu/records/DEVICE-COMMIT.jsonl)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, Triton interpreted")
    parser.add_argument("--ops", nargs="+", default=[], metavar="OP", help="these ops only, with the proof of them")
    parser.add_argument("--seconds", type=float, default=0.5, help="time budget per timed row")
    parser.add_argument("--commit", help="what the record names where there is no git repository")
    parser.add_argument("--no-build", action="store_true", help="use the extension as it is")
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest")
    args = parser.parse_args(argv)
    known = (*PROVABLE, *MODEL)
    if unknown := [op for op in args.ops if op not in known]:
        parser.error(f"no op named {', '.join(unknown)}; there are {', '.join(known)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --device cpu is a dry run")
    return args


def main(argv: list[str] | None = None, cases: str = "bench.gpu.cases:CASES") -> int:
    """Runs the command line with the cases of a module and returns its exit code."""
    args = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    session = Session(args, cases, console)
    console.print(f"record: {session.journal.path}{', which goes on' if session.journal.goes_on else ''}")
    jobs = plan(pkgutil.resolve_name(cases), args.device, args.seconds, session.sanitizer)
    if args.ops:
        proves = any(op in PROVABLE for op in args.ops)
        jobs = [job for job in jobs if job["op"] in args.ops or (proves and job["kind"] == "prove")]
    lost = ""
    try:
        session.work([job for job in jobs if not session.journal.done(name_of(job))])
    except DeviceLost as error:
        lost = str(error)
    return session.close(jobs, lost)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends worker and build, too
    raise SystemExit(main())
