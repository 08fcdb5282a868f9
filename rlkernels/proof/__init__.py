"""Proof of kernels on the user's own GPU: which backend of an op is right, repeats, and is faster than the default.

A candidate must pass the small cases: odd shapes, poisoned memory, an error of at most twice plain torch's, the same
bits in two runs. It must be right on the timed inputs too. It wins if the interval of its time over plain torch's lies
below ``WIN`` in every timed case. All of this runs in a process of its own: a bad address destroys a CUDA context.
"""

import dataclasses
import itertools
import json
import math
import os
import pkgutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch

from rlkernels import _check, verdicts
from rlkernels import backend as backends
from rlkernels.proof import compiled
from rlkernels.proof.problem import Case
from rlkernels.proof.process import Answer, DeviceLost, Message, Worker
from rlkernels.proof.workload import Workload
from rlkernels.registry import OPS

__all__ = ["PROVABLE", "WIN", "Workload", "prove"]

WIN = 0.97  # upper bound of the time over plain torch's with which a candidate wins
HANG_S = 25.0  # from one message of the worker to the next; a kernel compiles meanwhile
CASE_S = 0.5  # timing of one case
COMPILE_S = 600.0  # for the PTX of all candidates
CASES = "rlkernels.proof.cases:cases_of"
NO_GPU = "torch finds no CUDA device; --device cpu (device='cpu') makes a dry run on the CPU"
# the worker takes its modules from where this process does
WORKER_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from rlkernels.proof.worker import main; main()"
)
PROVABLE = tuple(name for name, op in OPS.items() if op.on_gpu and not op.like)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the closest order statistics that hold the true one with 95 % probability, if n >= 6.

    Each ratio lies below the true median with probability 1/2. So ``rank`` or fewer of them lie there with probability
    (C(n, 0) + ... + C(n, rank)) / 2^n, which must be at most 2.5 %.
    """
    ordered = sorted(ratios)
    n = len(ordered)
    outcomes = itertools.accumulate(math.comb(n, k) for k in range(n))
    rank = max(0, sum(40 * count <= 2**n for count in outcomes) - 1)
    return statistics.median(ordered), ordered[rank], ordered[n - 1 - rank]


class Prover:
    """One call of :func:`prove`: its worker, its budget of seconds, and ``say``, which gets a line about each case."""

    def __init__(self, device: torch.device, workload: Workload, seconds: float, cases: str, say: Callable[[str], Any]):
        self.device = device
        self.workload = workload
        self.say = say
        self.end = time.monotonic() + seconds
        fields = json.dumps(dataclasses.asdict(workload))
        arguments = [json.dumps(sys.path), str(device), cases, fields]
        self.worker = Worker([sys.executable, "-c", WORKER_CODE, *arguments], os.environ)
        self.cases: list[Case] = pkgutil.resolve_name(cases)(workload)

    def ask(self, job: Message, on_message: Callable[[Message], None] = lambda message: None) -> Answer:
        """Return the worker's answer to a job.

        Raises:
            TimeoutError: the budget ended first.
            ConnectionError: the worker got no context on the device, or too little memory. This says nothing about
                kernels.
        """
        answer = cast(Answer, self.worker.ask(job, HANG_S, self.end, on_message))
        if answer.get("cut"):
            raise TimeoutError
        if answer.get("no_device") or answer.get("no_memory"):
            raise ConnectionError(answer["message"])
        return answer

    def prove_op(self, op: str) -> verdicts.Verdict:
        """Return the verdict on an op. Raises as :meth:`ask`."""
        names = [b for b in OPS[op].backends if backends.unavailable(op, b, self.device) is None]
        candidates = {name: self.check_candidate(op, name) for name in names}
        for case in self.cases:
            if case.op == op and case.timed:
                self.time_case(case, candidates)
        best = fastest(candidates)
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"op": op, "backend": best, "workload": self.workload.digest(), "date": date, "candidates": candidates}

    def check_candidate(self, op: str, name: str) -> Message:
        """Check a candidate by the small cases; ``reason`` says why it cannot win."""
        entry: Message = {"reason": "", "cases": {}}
        for case in self.cases:
            if OPS[op].name in (case.op, OPS[case.op].like) and not case.timed and not entry["reason"]:
                answer = self.ask({"kind": "check", "op": case.op, "case": case.label, "backend": name})
                reason = error_message(answer)
                entry["reason"] = f"{case.label}: {reason}" if reason else ""
                self.say(f"{case.op} {name}, {case.label}: {reason or 'right, twice the same bits'}")
        return entry

    def time_case(self, case: Case, candidates: dict[str, Message]) -> None:
        """Time the candidates without a ``reason`` against them; one that kills the worker or hangs gets one."""
        while names := [name for name, entry in candidates.items() if not entry["reason"]]:
            started = [""]  # the backends that the worker has started with

            def note_start(message: Message, started: list[str] = started) -> None:
                started.append(message.get("begin", started[-1]))

            job = {"kind": "time", "op": case.op, "case": case.label, "backends": names, "seconds": CASE_S}
            answer = self.ask(job, note_start)
            if answer["ok"]:
                for name in names:
                    self.record_times(case, name, candidates[name], answer)
                return
            if started[-1] == "torch":
                raise ConnectionError(f"plain torch fails: {answer['message']}")
            culprits = [started[-1]] if started[-1] in names else names
            for name in culprits:
                candidates[name]["reason"] = f"{case.label}: {answer['message']}"
                self.say(f"{case.op} {name}, {candidates[name]['reason']}")

    def kernels(self, op: str, name: str) -> compiled.Kernels:
        """Return the PTX that a candidate launches in the timed cases; for CUDA C++ the PTX of all kernels.

        Raises:
            RuntimeError: the candidate does not run.
            FileNotFoundError: nvcc or the sources of CUDA C++ are missing.
            TimeoutError, ConnectionError: as :meth:`ask`.
        """
        if name == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            return compiled.cuda_kernels(10 * major + minor)
        launched = []
        for case in (case for case in self.cases if case.op == op and case.timed):
            answer = self.ask({"kind": "compile", "op": op, "case": case.label, "backend": name})
            if not answer["ok"]:
                raise RuntimeError(f"{op} {name}, {case.label}: {answer['message']}")
            launched += answer["launched"]
        return compiled.collect(launched)

    def record_times(self, case: Case, name: str, entry: Message, answer: Answer) -> None:
        """Record the result of a candidate in a timed case."""
        if reason := error_message({"ok": True, "repeats": True, **answer["judged"][name]}):
            entry["reason"] = f"{case.label}: {reason}"
            self.say(f"{case.op} {name}, {entry['reason']}")
            return
        times = answer["times"]  # backend -> seconds of each round
        ratio, low, high = interval([seconds / plain for seconds, plain in zip(times[name], times["torch"])])
        medians = {backend: statistics.median(times[backend]) for backend in (name, "torch")}
        entry["cases"][case.label] = {"ratio": ratio, "interval": [low, high], "seconds": medians}
        result = f"{medians[name] * 1e6:,.0f} µs, {ratio:.2f} ({low:.2f} to {high:.2f}) of plain torch's time"
        self.say(f"{case.op} {name}, {case.label}: {result}")


def fastest(candidates: dict[str, Message]) -> str:
    """Return the fastest of the candidates that win, "torch" without one; note in each why it does not win."""
    means = {}  # backend that wins -> geometric mean of its ratios
    for name, entry in candidates.items():
        entry["reason"] = entry["reason"] or slowness(entry)
        entry["wins"] = not entry["reason"] and bool(entry["cases"])
        if entry["wins"]:
            means[name] = statistics.geometric_mean(case["ratio"] for case in entry["cases"].values())
    return min(means, default="torch", key=means.__getitem__)


def slowness(entry: Message) -> str:
    """Return the first timed case in which a candidate is not clearly faster than plain torch; empty without one."""
    for label, times in entry["cases"].items():
        if times["interval"][1] >= WIN:
            return f"{times['ratio']:.2f} times as long as plain torch in {label}"
    return ""


def error_message(answer: Answer) -> str:
    """Return what an answer of the worker says against a candidate; empty if nothing."""
    if not answer["ok"]:
        return answer["message"]
    if not answer["right"]:
        error = "other shapes, integers or NaN" if answer["error"] is None else f"an error of {answer['error']:.2g}"
        return f"wrong: {error}, allowed {answer['allowed']:.2g}"
    return "" if answer["repeats"] else "two runs on the same inputs give other bits"


def prove(
    ops: Iterable[str] | None = None,
    *,
    device: torch.device | str | None = None,
    seconds: float = 60,
    workload: Workload | None = None,
    again: bool = False,
    say: Callable[[str], Any] = print,
    cases: str = CASES,
) -> dict[str, Any]:
    """Find the best backends on a GPU, and store the verdicts for this and later processes.

    Args:
        ops: names of ops; None for all that have a GPU kernel. An op without kernels of its own, such as ``dtw_topk``,
            stands for the op whose kernels it runs.
        device: a CUDA device; None for the current one. On a CPU it is a dry run that stores nothing.
        seconds: time for all ops; a second call continues with those that the first left out.
        workload: shapes of the timed cases; None for a step with Qwen2.5-0.5B.
        again: prove ops anew that have a verdict for this workload.
        say: gets a line about each case.
        cases: ``module:function`` that returns the cases of a workload.

    Returns:
        ``verdicts`` by op, each with its ``backend`` ("torch" if none of ours won) and, by candidate, ``wins``, the
        ``reason`` against it, and for each timed case ``ratio``, ``interval`` and ``seconds``; ``left_out``: the
        reason by op without a verdict; ``device``: facts of the GPU.

    Raises:
        TypeError, ValueError: an op is unknown or has no GPU kernel; ``seconds`` or ``device`` is not valid.
    """
    named = PROVABLE if ops is None else ops
    op_names = list(dict.fromkeys((OPS[op].like or op) if op in OPS else op for op in named))
    if unknown := [op for op in op_names if op not in PROVABLE]:
        raise ValueError(f"ops must be out of {', '.join(PROVABLE)}, got {', '.join(unknown)}")
    _check.in_range("seconds", seconds, 0, math.inf)
    workload = workload or Workload()
    try:
        target = torch.device("cuda" if device is None else device)
    except RuntimeError:
        raise ValueError(f"device must be one that torch knows, such as 'cuda:1', got {device!r}") from None
    on_gpu = target.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        return {"device": {}, "verdicts": {}, "left_out": dict.fromkeys(op_names, NO_GPU)}
    index = 0
    facts = {"gpu": "cpu", "torch": torch.__version__}
    if on_gpu:
        index = torch.cuda.current_device() if target.index is None else target.index
        target = torch.device("cuda", _check.integer("the index of device", index, 0, torch.cuda.device_count() - 1))
        facts = verdicts.device_facts(index)
    by_op: dict[str, verdicts.Verdict] = {}
    left_out: dict[str, str] = {}
    device_lost = ""  # why nothing more starts on the device
    prover = Prover(target, workload, seconds, cases, say)
    try:
        for op in op_names:
            stored = verdicts.load(op, index, workload.digest()) if on_gpu and not again else []
            if stored:
                by_op[op] = stored[0]
                continue
            if device_lost:
                left_out[op] = f"not proven: {device_lost}"
                continue
            try:
                by_op[op] = prover.prove_op(op)
                if on_gpu:
                    verdicts.store(by_op[op], index)
            except TimeoutError:
                left_out[op] = f"no time left of {seconds:.0f} s"
            except BrokenPipeError:  # of `say`, whose reader is gone; it is a ConnectionError too
                raise
            except ConnectionError as error:
                left_out[op] = f"not proven: {error}"
            except DeviceLost as error:
                left_out[op] = f"not proven: {error}"
                device_lost = str(error)
    finally:
        if not device_lost:
            prover.worker.close()
    backends.clear_choices()
    return {"device": facts, "verdicts": by_op, "left_out": left_out}


def compile_candidates(result: dict[str, Any], device: torch.device | str | None = None) -> compiled.Code:
    """Return the PTX of the candidates in a result of :func:`prove`; none of a dry run.

    The proof was on the same GPU, of the default workload. A line tells each candidate whose PTX cannot be compiled.
    """
    if result["device"].get("gpu", "cpu") == "cpu":
        return {}
    prover = Prover(torch.device(device or "cuda"), Workload(), COMPILE_S, CASES, print)
    code: compiled.Code = {}
    for op, verdict in result["verdicts"].items():
        for name in verdict["candidates"]:
            try:
                code.setdefault(op, {})[name] = prover.kernels(op, name)
            except DeviceLost as error:
                print(f"no PTX from {op} {name} on: {error}")
                return code
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                print(f"no PTX of {op} {name}: {error}")
    prover.worker.close()
    return code


def write_record(path: Path, result: dict[str, Any], code: compiled.Code) -> None:
    """Write the result of :func:`prove` as a record for ``bench/gpu/records``, and its PTX beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**result, "nvcc": compiled.nvcc_version()}, indent=1) + "\n")
    if code:
        compiled.write_code(path, code)
