"""``python -m bench.gpu``: on a GPU machine, finds out what of ours is right there and what is quick, most important
first, and writes one record. Needs no network; builds the extension meanwhile.

Every finding is in the record as soon as it is known, and the next call does what is not there yet. Exit code 1 when
the build, a check, a timed row, the sanitizer or a test failed.
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from bench._case import Row
from bench._runner import table
from bench.gpu.build import Build
from bench.gpu.cases import TESTS
from bench.gpu.journal import ROOT, Journal, call_facts, name_of, record_path
from bench.gpu.plan import FIRST, LEAST_SANITIZED_S, LIMITS_S, SANITIZED, Job, decides, plan
from bench.gpu.process import DeviceLost, Message, Worker, run
from bench.gpu.proven import passed, sources, unsanitized
from rlkernels.backend import OPS

LEAST_S = 5.0  # to begin a job
LEAST_TESTS_S = 20.0  # to begin a file of tests
BUILD_S = 240.0  # of a call, after which nobody waits for the build any more
ROW_FIELDS = Row.__dataclass_fields__
SPINNING_TESTS = ("tests/rlkernels/triton/test_rank1.py",)


class Session:
    """One call: what has been found, and how to find out more until the time is up."""

    def __init__(self, args: argparse.Namespace, cases: str, console: Console):
        self.args, self.cases, self.console = args, cases, console
        self.end = time.monotonic() + args.budget_seconds
        self.build_end = time.monotonic() + min(BUILD_S, args.budget_seconds / 2)
        facts = call_facts(args.commit)
        self.journal = Journal(args.output or record_path(facts), facts)
        self.sanitizer = args.device == "cuda" and shutil.which("compute-sanitizer") is not None
        limits = {"budget_s": args.budget_seconds, "sanitizer": self.sanitizer}
        self.journal.add("call", **facts, device=args.device, **limits, sources=sources())
        self.env = {**os.environ, "TRITON_INTERPRET": "1" if args.device == "cpu" else "0"}
        self.worker = Worker(self.env, cases)
        self.build: Build | None = None

    def left(self) -> float:
        return self.end - time.monotonic()

    def work(self, jobs: Sequence[Job]) -> None:
        """Raises DeviceLost."""
        if not self.args.no_build:
            self.build = Build(self.args.device)
        try:
            if not self.journal.last("device").get("ok"):
                self.one({"kind": "device", "device": self.args.device})
            self.run([job for job in jobs if decides(job)])
            proving = {file for op in FIRST for file in TESTS[op]}
            self.test([file for file in test_files() if file in proving])
            self.run([job for job in jobs if not decides(job) and not job.get("spins")])
            self.test([file for file in test_files() if file not in SPINNING_TESTS])
            self.run([job for job in jobs if job.get("spins")])
            self.test(SPINNING_TESTS)
        finally:
            self.worker.close()
            if self.build:
                self.build.stop()

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self.left() < LEAST_S:
                return
            if job["kind"] == "model" or not decides(job):
                self.built()
            if self.build and needs_build(job):
                continue  # not before it is done: the next call waits for it again
            if job["kind"] == "sanitize":
                self.sanitize(job)
            elif job["kind"] in ("check", "device"):
                self.one(job)
            else:
                self.rows(job)

    def built(self) -> None:
        """Waits for the build while there is time for it; a worker that began without the extension starts anew."""
        if self.build and self.build.done(max(self.build_end - time.monotonic(), 0.0)):
            self.journal.add("build", **self.build.found)
            self.console.print(escape(f"build: {self.build.found}"), highlight=False)
            self.build.stop()
            self.build = None
            self.worker.close()

    def one(self, job: Job) -> None:
        """A job with one answer."""
        answer = self.worker.ask(job, LIMITS_S[job["kind"]], self.end, lambda message: None)
        if answer.get("cut"):
            return
        if job["kind"] == "device":
            self.journal.add("device", **answer)
            return
        self.journal.add("check", **{k: job[k] for k in ("op", "case", "backend")}, **answer)
        self.finish(job)
        if not answer["ok"]:
            self.console.print(f"[red]FAILED[/red] {escape(name_of(job) + ': ' + str(answer))}", highlight=False)

    def rows(self, job: Job) -> None:
        """A job that gives rows; whoever takes the process along, or hangs, gets one that says so; the others go on."""
        here = []
        while self.left() >= LEAST_S:
            begun = [""]

            def hear(message: Message, begun: list[str] = begun) -> None:
                begun[0] = message.get("begin", begun[0])
                if "row" in message:
                    here.append(self.journal.add("row", of=job["kind"], **message["row"]))

            known = [e for e in self.journal.of("row") if (e["of"], e["op"], e["shape"]) == places(job)]
            without = [e["provider"] for e in known]
            answer = self.worker.ask({**job, "without": without}, LIMITS_S[job["kind"]], self.end, hear)
            if answer.get("cut"):
                break
            if answer["ok"]:
                self.finish(job)
                break
            named = bool(begun[0]) and begun[0] not in [e["provider"] for e in here]
            provider = begun[0] if named else "the inputs and the reference"
            row = {"op": job["op"], "provider": provider, "shape": job["case"], "ok": False}
            here.append(self.journal.add("row", of=job["kind"], **row, missing=answer["message"][:300]))
            if provider not in ("the inputs and the reference",):
                continue
            self.finish(job)  # nobody else would fare better
            break
        self.show(here)

    def finish(self, job: Job) -> None:
        self.journal.add("done", job=name_of(job))

    def show(self, rows: Sequence[Message]) -> None:
        if rows:
            self.console.print(table([shown(row) for row in rows]))
        for row in rows:
            if row["ok"] is False:
                self.console.print(f"[red]FAILED[/red] {escape(told(row))}", highlight=False)

    def sanitize(self, job: Job) -> None:
        if self.left() < LEAST_SANITIZED_S:
            return
        self.worker.close()  # its memory would be in the way
        command = ["compute-sanitizer", "--tool", job["case"], "--error-exitcode", "9"]
        if job["case"] == "memcheck":  # torch and Triton try calls that may fail, and go on
            command += ["--report-api-errors", "no"]
        command += [sys.executable, "-m", "bench.gpu.sanitized", self.cases, *SANITIZED[job["op"]]]
        limit = min(LIMITS_S["sanitize"], self.left())
        code, said = run(command, {**self.env, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, limit)
        if code is None and limit < LIMITS_S["sanitize"]:
            return
        how = "clean" if code == 0 else "hung" if code is None else f"exit code {code}"
        log = {} if code == 0 else {"log": said[-4000:]}
        closing = (said.strip().splitlines() or [""])[-1]
        self.journal.add("sanitize", op=job["op"], case=job["case"], ok=code == 0, message=f"{how}: {closing}", **log)
        self.finish(job)

    def test(self, files: Sequence[str]) -> None:
        """The files of tests that the record lacks, side by side: most of their time goes into compiling kernels."""
        if self.args.no_tests:
            return
        self.built()
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
            list(pool.map(one, [file for file in files if file not in done]))

    def close(self, jobs: Sequence[Job], lost: str) -> int:
        """Notes what is left, and prints what it came to -> exit code."""
        left = [name_of(job) for job in jobs if not self.journal.done(job)]
        tested = {e["file"] for e in self.journal.of("tests")}
        left += [f"tests {file}" for file in test_files() if file not in tested]
        failed = [told(e) for e in self.journal.entries if e.get("ok") is False and e["kind"] != "build"]
        failed += ["build"] if self.journal.last("build").get("ok") is False else []
        failed += [f"device lost: {lost}"] if lost else []
        end = {"left_s": round(self.left(), 1), "left_out": left, "failed": failed, "lost": lost, "finished": not left}
        proved = {op: list(names) for op, names in passed([*self.journal.entries, {"kind": "end", **end}]).items()}
        self.journal.add("end", **end, proved=proved)
        for line in failed:
            self.console.print(f"failed: {escape(line)}", highlight=False)
        rows = sum(1 for e in self.journal.of("row") if e["ok"])
        counts = f"{sum(1 for _ in self.journal.of('check'))} checks, {rows} rows, {len(tested)} files of tests"
        self.console.print(f"{counts}; {len(failed)} failed; {len(left)} left out", highlight=False)
        self.console.print(f"right, and quicker than all else: {proved or 'nothing'}", highlight=False)
        if unseen := [op for op in proved if unsanitized(self.journal.entries, op)]:
            self.console.print(f"of these not sanitized: {', '.join(unseen)}", highlight=False)
        if left:
            self.console.print("the same command goes on")
        return 1 if failed else 0


def needs_build(job: Job) -> bool:
    """Whether a job is of kernels in CUDA C++, which would count as failed where they are not compiled yet."""
    ops = SANITIZED.get(job["op"], (job["op"],))
    return job.get("backend", "cuda") == "cuda" and any(op in OPS and OPS[op].cuda for op in ops)


def places(job: Job) -> tuple[str, str, str]:
    return job["kind"], job["op"], job["case"]


def shown(row: Message) -> Row:
    """A line of the table; a package that is not installed has a row without ``ok``."""
    found = {name: value for name, value in row.items() if name in ROW_FIELDS}
    return Row(**found | ({"missing": f"{row['missing']} is not installed"} if row["ok"] is None else {}))


def told(entry: Message) -> str:
    """A failure in one line."""
    who = entry.get("provider") or entry.get("backend") or entry.get("file") or ""
    why = entry.get("missing") or entry.get("message") or entry.get("closing")
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
    parser.add_argument("--ops", nargs="+", default=[], metavar="OP", help="these ops only, and decode, train")
    parser.add_argument("--seconds", type=float, default=0.5, help="time budget per timed row")
    parser.add_argument("--commit", help="what the record names where there is no git repository")
    parser.add_argument("--no-build", action="store_true", help="use the extension as it is")
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest")
    args = parser.parse_args(argv)
    known = [*OPS, *SANITIZED, "decode", "train"]
    unknown = [op for op in args.ops if op not in known]
    if unknown:
        parser.error(f"no op named {', '.join(unknown)}; there are {', '.join(known)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --device cpu is a dry run")
    return args


def main(argv: list[str] | None = None, cases: str = "bench.gpu.cases") -> int:
    """Runs the command line with the cases of a module and returns its exit code."""
    args = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    session = Session(args, cases, console)
    console.print(f"record: {session.journal.path}{', which goes on' if session.journal.goes_on else ''}")
    jobs = plan(importlib.import_module(cases).CASES, args.device, args.seconds, session.sanitizer)
    wanted = [job for job in jobs if not session.journal.done(job) and (not args.ops or job["op"] in args.ops)]
    lost = ""
    try:
        session.work(wanted)
    except DeviceLost as error:
        lost = str(error)
    return session.close(jobs, lost)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends worker and build, too
    raise SystemExit(main())
