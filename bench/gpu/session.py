"""``python -m bench.gpu.session``: check and time everything on a GPU, in nine minutes, the most valuable first.

It needs no network. Each stage runs in a separate process with a time limit, so that one that fails, dies or hangs
ends alone. Each finding is written to the record at once, and the next call does what the record lacks. ``STAGES`` and
the record say what a stage decides before it runs. ``--rehearse`` runs all stages on a CPU with tiny shapes. The exit
code is 1 if something failed.
"""

import argparse
import os
import pkgutil
import shutil
import signal
import sys
import threading
import time
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from bench.gpu import counters, presets, updates
from bench.gpu.build import Build, run
from bench.gpu.cases import SANITIZED
from bench.gpu.journal import ROOT, Entry, Journal, call_facts, record_path
from bench.gpu.summary import summary, told
from bench.gpu.worker import COMPILED, INPUTS
from rlkernels.backend import built_with_cuda, extension_error
from rlkernels.proof.process import DeviceLost, Message, Worker, kill
from rlkernels.registry import OPS

# modules of later stages, which another process reads and compiles to bytecode while the first stages run
IMPORTS = (
    "import trl, bench.gpu.presets, python_trainer.trainer, rlkernels.integrations.trl; from trl import GRPOTrainer"
)
WITHOUT_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
SILENT: Any = {"stdin": DEVNULL, "stdout": DEVNULL, "stderr": DEVNULL, "process_group": 0}
BUDGET_S = 540.0  # of a call
LEAST_S = 4.0  # to begin a job
LEAST_TESTS_S = 15.0  # to begin a file of tests
LEAST_SANITIZED_S = 60.0
PROOF_S, PTX_S = 120.0, 15.0  # of a proof, and of these to write the code that it timed
PACKED = ("grouped_attention", "tree_attention")  # for training
# in a rehearsal: the ops that are timed, of which the last is proved, for how long, and the tests that run
REHEARSED, REHEARSED_S = ("grouped_attention", "merge_attention"), 15.0
FEW_FILES, FEW_TESTS = 1, "merge_attention"
BUILD_S = 200.0  # of a call, after which nobody waits for the build any more
SANITIZERS = ("memcheck", "racecheck")
ON_GPU = tuple(name for name, op in OPS.items() if op.on_gpu)
MODEL = ("decode", "train")
NEEDS_BUILD = ("prove", "tests", "sanitize")  # kinds of jobs that make no sense without the extension
# kind of a job -> seconds from one sign of life to the next, after which it hangs
LIMITS_S = {"device": 60.0, "time": 60.0, "update": 90.0, "preset": 90.0, "sharded": 90.0, "model": 90.0,
            "counters": 60.0, "sanitize": 240.0, "tests": 300.0}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A part of a call: its seconds, to which those are added that earlier stages left over, and what it decides."""

    name: str
    seconds: float
    decision: str


STAGES = (
    Stage("facts", 30, "Limits are reckoned from these rates: bytes over copy bandwidth, operations over matrix rate."),
    Stage("attention", 70, "grouped_attention: auto takes the fastest of triton and torch in the cases of that head "
          "dimension, if it is below SDPA on repeated prefixes and FlexAttention. Where SDPA or FlexAttention is 3 % "
          "faster than both, rlkernels/prefix_cache/torch_flash.py calls that one, and triton gets no verdict. "
          "tree_attention: the same for both variants of triton; FlexAttention replaces the FlashAttention of "
          "rlkernels/prefix_cache/torch_flash.py also if it only peaks lower."),
    Stage("updates", 135, "TRL: the README names the fastest arm of each shape. If ours is slower than TRL's own in a "
          "shape, docs/integrations.md says below which prompt to leave SharedPrefixGRPOTrainer. If ours with Liger's "
          "or compiled layers is 3 % faster than ours, that page recommends both. A gradient error above twice TRL's "
          "in bfloat16 stops the release."),
    Stage("ops", 105, "Decode ops are judged by replay_s, prefill and training by median_s, each size class by itself: "
          "auto takes triton where it is 3 % below torch; shared_prefix_attention only if it also is no slower than "
          "'triton, not shared', which is paged_attention on the same tokens. A rival faster than both (copy_s "
          "counted) gets an issue."),
    Stage("prove", 90, "The verdicts become rlkernels/records.json, but for ops where `attention` or `ops` above says "
          "that a rival is faster."),
    Stage("decode", 25, "A pass of 256 sequences: the engine captures graphs by default if triton's pass is below "
          "torch's. Above 4 ms a pass, host time comes first."),
    Stage("sharded", 20, "If a step by fsdp2 over NCCL differs from one without by more than rounding, the page says "
          "that it is broken on GPUs, and an issue is opened; otherwise the list of what never ran loses it."),
    Stage("presets", 45, "If a step's peak is above the plan of --dry-run, the constants of "
          "python_trainer/loop/memory.py rise to it; below 0.8 of the plan they fall. A preset that does not fit loses "
          "micro_batch_tokens."),
    Stage("counters", 20, "A kernel that moves 1.2 times its bytes, or reaches less than half of both bandwidth and "
          "matrix rate, is the next to be worked on."),
    Stage("tests", 300, "A test that fails here withdraws the verdicts of its op."),
    Stage("rest", 300, "CUDA's DTW keeps its verdict if it is 3 % below Triton's. A finding of compute-sanitizer "
          "withdraws the verdicts of that group of ops."),
)  # fmt: skip


def plan(cases: Sequence[Any], device: str, seconds: float, sanitizer: bool) -> list[Message]:
    """Return all jobs in order; without a GPU the first small case of each op is timed."""
    chosen = [case for case in cases if case.timed]
    if device != "cuda":
        small = [case for case in cases if not case.timed]
        chosen = [next(case for case in small if case.op == op) for op in dict.fromkeys(case.op for case in small)]

    def stage_of(op: str) -> str:
        return "rest" if OPS[op].cuda else "attention" if op in PACKED else "ops"

    def timed(late: bool, ops: Container[str] = OPS) -> list[Message]:
        """Return a job for each case; compiled rivals come late, by the same jobs again."""
        return [{"stage": stage_of(c.op), "kind": "time", "op": c.op, "case": c.label, "seconds": seconds, "late": late}
                for c in chosen if c.op in ops]  # fmt: skip

    jobs: list[Message] = [
        {"stage": "facts", "kind": "device", "op": "all", "case": "rates"},
        *({"stage": "updates", "kind": "update", "op": size, "case": arm} for size, arm in updates.jobs(device)),
        *timed(late=False),
        *timed(late=True, ops=COMPILED),
        {"stage": "prove", "kind": "prove", "op": "all", "case": "for a step of Qwen2.5-0.5B"},
        *({"stage": "decode", "kind": "model", "op": part, "case": who}
          for part in MODEL for who in (("triton", "auto", "torch") if device == "cuda" else ("auto",))),
        *({"stage": "presets", "kind": "preset", "op": "preset", "case": name} for name in presets.NAMES),
        {"stage": "sharded", "kind": "sharded", "op": "fsdp2", "case": "one process"},
        {"stage": "counters", "kind": "counters", "op": "all", "case": "five ops"},
        {"stage": "tests", "kind": "tests", "op": "all", "case": "the Triton kernels"},
        *({"stage": "rest", "kind": "sanitize", "op": group, "case": tool}
          for group in SANITIZED for tool in SANITIZERS if sanitizer),
    ]  # fmt: skip
    return [{**job, "device": device} for stage in STAGES for job in jobs if job["stage"] == stage.name]


def name_of(job: Message) -> str:
    """Return the name of a job in records and on the screen: ``"time dtw: 512 x 512, length 512"``."""
    return place_of(job) + (", compiled rivals" if job.get("late") else "")


def place_of(job: Message) -> str:
    """Return the name of a job in its rows."""
    return f"{job['kind']} {job['op']}: {job['case']}"


class Session:
    """One call: its record, and the ways to do its jobs until the time is up."""

    def __init__(self, args: argparse.Namespace, cases: str, console: Console):
        self.args, self.console = args, console
        self.device = "cpu" if args.rehearse else "cuda"
        self.slower = 6 if args.rehearse else 1  # a rehearsal may share its processor
        self.last = self.end = time.monotonic() + args.budget_seconds  # of the call, and of the stage under way
        self.build_end = time.monotonic() + min(BUILD_S, args.budget_seconds / 2)
        facts = call_facts(args.commit)
        self.journal = Journal(args.output or record_path(facts, "-session.jsonl"), facts)
        self.sanitizer = not args.rehearse and shutil.which("compute-sanitizer") is not None
        self.journal.add("call", **facts, device=self.device, budget_s=args.budget_seconds, sanitizer=self.sanitizer)
        # runs of the trainer use the verdicts of the stage `prove`
        self.env = {**os.environ, "TRITON_INTERPRET": str(int(args.rehearse)), "RLKERNELS_PROVE": "off"}
        self.worker = Worker([sys.executable, "-m", "bench.gpu.worker", cases], self.env)
        self.build: Build | None = None
        self.doing = {"prove": self.prove, "tests": self.test, "sanitize": self.sanitize, "device": self.facts,
                      "counters": self.count}  # fmt: skip

    def left(self) -> float:
        return self.end - time.monotonic()

    def work(self, jobs: Sequence[Message]) -> None:
        """Do the jobs, stage by stage. Raises DeviceLost."""
        if not self.args.no_build and not (extension_error() is None and (self.args.rehearse or built_with_cuda())):
            self.build = Build(self.device)
        warm = None if self.args.rehearse else Popen([sys.executable, "-c", IMPORTS], env=WITHOUT_GPU, **SILENT)
        try:
            until = time.monotonic()
            for stage in STAGES:
                if todo := [job for job in jobs if job["stage"] == stage.name]:
                    until += stage.seconds * self.slower
                    self.enter(stage, todo, until)
        finally:
            self.end = self.last
            self.worker.close()
            if warm:
                kill(warm)
            if self.build:
                self.build.stop()

    def enter(self, stage: Stage, jobs: Sequence[Message], until: float) -> None:
        """Do the jobs of a stage until this time; an error here ends its job only. Raises DeviceLost."""
        start = time.monotonic()
        self.end = min(self.last, until)
        if self.left() < LEAST_S:
            return
        self.journal.add("stage", stage=stage.name, decision=stage.decision, seconds=round(self.left(), 1))
        self.console.rule(f"{stage.name}, at most {self.left():.0f} s", align="left")
        for job in jobs:
            if job["kind"] in NEEDS_BUILD or (job["kind"] == "time" and OPS[job["op"]].cuda):
                self.wait_for_build()
            if self.left() >= LEAST_S and (self.build is None or job["kind"] not in NEEDS_BUILD):
                try:
                    self.doing.get(job["kind"], self.rows)(job)
                except Exception as error:
                    if isinstance(error, DeviceLost):
                        raise
                    self.journal.add("mistake", job=name_of(job), ok=False, message=f"{type(error).__name__}: {error}")
        self.worker.close()  # with its memory
        self.journal.add("stage", stage=stage.name, took_s=round(time.monotonic() - start, 1))

    def wait_for_build(self) -> None:
        """Wait while there is time; end a worker that began without the extension."""
        until = min(self.build_end, self.end - LEAST_S)
        if self.build and self.build.done(max(until - time.monotonic(), 0.0)):
            self.journal.add("build", **self.build.found)
            self.console.print(escape(f"build: {self.build.found}"), highlight=False)
            self.build.stop()
            self.build = None
            self.worker.close()

    def ask(self, job: Message, hear: Any = lambda message: None) -> Message:
        return self.worker.ask(job, LIMITS_S[job["kind"]] * self.slower, self.end, hear)

    def facts(self, job: Message) -> None:
        answer = self.ask(job)
        if not answer.get("cut"):
            self.journal.add("device", **answer)
            self.console.print(escape(str(answer)), highlight=False)
            self.finish(job)

    def rows(self, job: Message) -> None:
        """Do a job that gives rows; a provider that dies or hangs gets a row that says so, and the others run."""
        here = []
        while self.left() >= LEAST_S:
            begun = [""]

            def hear(message: Message, begun: list[str] = begun) -> None:
                begun[0] = message.get("begin", begun[0])
                if "row" in message:
                    here.append(self.note(job, message["row"]))
                if "replay" in message:
                    self.journal.add("replay", **message["replay"])

            known = [[e["shape"], e["provider"]] for e in self.journal.of("row") if e["job"] == place_of(job)]
            answer = self.ask({**job, "without": known}, hear)
            if answer.get("cut"):
                break
            if answer["ok"]:
                self.finish(job)
                break
            named = bool(begun[0]) and begun[0] not in [e["provider"] for e in here]
            row = {"op": job["op"], "provider": begun[0] if named else INPUTS, "shape": job["case"], "ok": False}
            here.append(self.note(job, {**row, "missing": answer["message"][:300]}))
            if row["provider"] == INPUTS:
                self.finish(job)  # no other provider could run
                break

    def note(self, job: Message, row: Message) -> Entry:
        self.console.print(f"{row['op']}, {row['shape']}: {told(row)}", highlight=False, markup=False)
        return self.journal.add("row", of=job["kind"], job=place_of(job), **row)

    def finish(self, job: Message) -> None:
        self.journal.add("done", job=name_of(job))

    def prove(self, job: Message) -> None:
        """Prove the kernels in a process that stores the verdicts for this machine and writes another record.

        The next call proves what this one had no time for.
        """
        seconds = min(self.left(), REHEARSED_S + PTX_S if self.args.rehearse else PROOF_S)
        record = self.journal.path.with_name(f"{self.journal.path.stem}-prove.json")
        command = [sys.executable, "-m", "rlkernels", "prove", "--device", self.device]
        command += [] if self.journal.last("prove") else ["--again"]
        command += ["--seconds", str(max(int(seconds - PTX_S), 1)), "--record", str(record)]
        ops = [op for op in self.args.ops if op in ON_GPU] or ([REHEARSED[-1]] if self.args.rehearse else [])
        command += ["--ops", *ops] if ops else []
        code, output = run(command, self.env, seconds)
        self.console.print(output[-1500:], highlight=False, markup=False)
        self.journal.add("prove", ok=code in (0, 1), exit_code=code, said=output[-4000:])
        if code != 1 or self.args.rehearse:  # a dry run stores nothing to go on with
            self.finish(job)

    def count(self, job: Message) -> None:
        """Record hardware counters of a few ops, an entry for each kernel."""
        log = self.journal.path.with_suffix(".ncu.csv")
        code, output = run(counters.command(log, self.args.rehearse), self.env, self.left())
        rows = counters.read(log.read_text(errors="replace")) if log.exists() else []
        for row in rows:
            self.journal.add("counters", **row)
            self.console.print(escape(str(row)), highlight=False)
        log.unlink(missing_ok=True)
        self.journal.add("counted", ok=code == 0, kernels=len(rows), message="" if code == 0 else output[-1500:])
        self.finish(job)

    def sanitize(self, job: Message) -> None:
        if self.left() < LEAST_SANITIZED_S:
            return
        self.worker.close()  # its memory would be in the way
        command = ["compute-sanitizer", "--tool", job["case"], "--error-exitcode", "9"]
        if job["case"] == "memcheck":  # torch and Triton try calls that may fail, and go on
            command += ["--report-api-errors", "no"]
        command += [sys.executable, "-m", "bench.gpu.sanitized", *SANITIZED[job["op"]]]
        limit = min(LIMITS_S["sanitize"], self.left())
        code, output = run(command, {**self.env, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, limit)
        if code is None and limit < LIMITS_S["sanitize"]:
            return
        how = "clean" if code == 0 else "hung" if code is None else f"exit code {code}"
        log = {} if code == 0 else {"log": output[-4000:]}
        closing = (output.strip().splitlines() or [""])[-1]
        self.journal.add("sanitize", op=job["op"], case=job["case"], ok=code == 0, message=f"{how}: {closing}", **log)
        self.finish(job)

    def test(self, job: Message) -> None:
        """Run the files of tests that the record lacks, side by side, because most of their time is compilation."""
        if self.args.no_tests:
            return
        lock = threading.Lock()

        def one(file: str) -> None:
            limit = min(LIMITS_S["tests"], self.left())
            if limit < LEAST_TESTS_S:
                return
            few = ["-k", FEW_TESTS] if self.args.rehearse else []
            code, output = run([sys.executable, "-m", "pytest", file, "--maxfail=20", *few], self.env, limit)
            if code is None and limit < LIMITS_S["tests"]:
                return
            lines, ok = output.strip().splitlines() or [""], code in (0, 5)  # 5: nothing was selected
            failures = [x for x in lines if x.startswith(("FAILED ", "ERROR "))]
            log = {} if ok else {"failures": failures, "log": output[-6000:]}
            with lock:
                self.journal.add("tests", file=file, ok=ok, closing=lines[-1], **log)

        files = test_files()[: FEW_FILES if self.args.rehearse else None]
        done = {e["file"] for e in self.journal.of("tests")}
        with ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1)) as pool:
            list(pool.map(one, [file for file in files if file not in done]))
        if {e["file"] for e in self.journal.of("tests")} >= {*files}:
            self.finish(job)

    def close(self, jobs: Sequence[Message], lost: str) -> int:
        """Note what is left, print the outcome, and return the exit code."""
        left = [name_of(job) for job in jobs if not self.journal.done(name_of(job))]
        failed = [failure(e) for e in self.journal.entries if e.get("ok") is False and e["kind"] != "build"]
        failed += ["build"] if self.journal.last("build").get("ok") is False else []
        failed += [f"device lost: {lost}"] if lost else []
        end = {"left_s": round(self.left(), 1), "left_out": left, "failed": failed, "lost": lost, "finished": not left}
        self.journal.add("end", **end)
        for line in failed:
            self.console.print(f"failed: {escape(line)}", highlight=False)
        for line in summary(self.journal.entries):
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        rows = sum(1 for e in self.journal.of("row") if e["ok"])
        tested = sum(1 for _ in self.journal.of("tests"))
        counts = f"{rows} rows, {tested} files of tests; {len(failed)} failed; {len(left)} left out"
        self.console.print(counts, highlight=False)
        if left:
            self.console.print("the same command goes on")
        return 1 if failed else 0


def failure(entry: Message) -> str:
    """Return a failure in one line."""
    who = entry.get("provider") or entry.get("file") or ""
    why = entry.get("missing") or entry.get("message") or entry.get("closing") or entry.get("said")
    if not why:
        why = f"error {entry.get('error')}, allowed {entry.get('allowed')}"
    where = " ".join(str(entry[name]) for name in ("op", "case", "shape") if name in entry)
    return f"{entry.get('of', entry['kind'])} {where} {who}: {why}".replace("  ", " ")


def test_files() -> list[str]:
    """Return the files of tests that run on a GPU: those of the Triton kernels."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/rlkernels/triton").glob("test_*.py"))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.session", description=__doc__)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_S, metavar="S",
                        help=f"stop after this long (default {BUDGET_S:.0f})")  # fmt: skip
    parser.add_argument("--stages", nargs="+", choices=names, default=names, metavar="STAGE",
                        help=f"these only, of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--ops", nargs="+", default=[], metavar="OP", help="these ops only, with the proof of them")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes and Triton interpreted")
    parser.add_argument("--output", type=Path, help="the record (bench/gpu/records/DEVICE-COMMIT-session.jsonl)")
    parser.add_argument("--seconds", type=float, default=0.1, help="time budget per timed row")
    parser.add_argument("--commit", help="what the record names where there is no git repository")
    parser.add_argument("--no-build", action="store_true", help="use the extension as it is")
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest")
    args = parser.parse_args(argv)
    known = (*ON_GPU, *MODEL)
    if unknown := [op for op in args.ops if op not in known]:
        parser.error(f"no op named {', '.join(unknown)}; there are {', '.join(known)}")
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --rehearse runs on a CPU")
    return args


def main(argv: list[str] | None = None, cases: str = "bench.gpu.cases:CASES") -> int:
    """Run the command line with the cases of a module, and return its exit code."""
    args = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    session = Session(args, cases, console)
    console.print(f"record: {session.journal.path}{', which goes on' if session.journal.goes_on else ''}")
    jobs = plan(pkgutil.resolve_name(cases), session.device, args.seconds, session.sanitizer)
    jobs = [job for job in jobs if job["stage"] in args.stages]
    if args.rehearse and not args.ops:
        jobs = [job for job in jobs if job["kind"] != "time" or job["op"] in REHEARSED]
    if args.ops:
        proves = any(op in ON_GPU for op in args.ops)
        also = {"device"} | ({"prove"} if proves else set())
        jobs = [job for job in jobs if job["op"] in args.ops or job["kind"] in also]
    lost = ""
    try:
        session.work([job for job in jobs if not session.journal.done(name_of(job))])
    except DeviceLost as error:
        lost = str(error)
    return session.close(jobs, lost)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends worker and build, too
    raise SystemExit(main())
