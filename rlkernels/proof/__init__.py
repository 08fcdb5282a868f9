"""Proof of kernels on the user's own GPU: which backend of an op is right, repeats, and is faster than the default.

A candidate must pass the small cases (odd shapes, poisoned memory, an error of at most twice plain torch's, the same
bits in two runs). It must be right on the timed inputs too. It wins if the interval of its time over plain torch's lies
below ``WIN`` in every timed case. All of it runs in a process of its own, because a bad address destroys a context.
"""

import dataclasses
import json
import math
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rlkernels import _check, verdicts
from rlkernels import backend as backends
from rlkernels.proof import compiled
from rlkernels.proof.problem import Case
from rlkernels.proof.process import DeviceLost, Message, Worker
from rlkernels.proof.workload import Workload

__all__ = ["PROVABLE", "WIN", "Workload", "prove"]

WIN = 0.97
HANG_S = 25.0  # from one message of the worker to the next; a kernel compiles meanwhile
CASE_S = 0.5  # of timing in a case
COMPILE_S = 600.0  # for the PTX of all candidates
CASES = "rlkernels.proof.cases:cases_of"
NO_GPU = "torch finds no CUDA device; --device cpu (device='cpu') makes a dry run on the CPU"
# the worker imports what this process would
START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from rlkernels.proof.worker import main; main()"
# the ops that have a GPU kernel, those that a step spends most time in first
PROVABLE = ("paged_attention", "paged_attention/prefill", "shared_prefix_attention", "grouped_attention", "write_kv",
            "write_kv/many", "sample_tokens", "token_logprobs", "linear_token_logprobs", "verify_drafts",
            "merge_attention", "dtw", "dtw/wide", "dtw_topk", "top1_deltas", "top1_delta", "add_rank1_",
            "add_rank1_/large", "delta_matvec")  # fmt: skip


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of ratios, and bounds of its 95 % confidence interval by order statistics."""
    ordered, n = sorted(ratios), len(ratios)
    rank = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return middle, ordered[rank], ordered[n - 1 - rank]


class Prover:
    """One call of :func:`prove`: its worker, its budget, and who it reports to."""

    def __init__(self, device: torch.device, workload: Workload, seconds: float, cases: str, say: Callable[[str], Any]):
        self.device, self.workload, self.say = device, workload, say
        self.end = time.monotonic() + seconds
        fields = json.dumps(dataclasses.asdict(workload))
        arguments = [json.dumps(sys.path), str(device), cases, fields]
        self.worker = Worker([sys.executable, "-c", START, *arguments], os.environ)
        self.cases: list[Case] = pkgutil.resolve_name(cases)(workload)

    def ask(self, job: Message, hear: Callable[[Message], None] = lambda message: None) -> Message:
        """Return the worker's answer.

        Raises:
            TimeoutError: the budget ended first.
            ConnectionError: there is no context on the device, or too little memory: nothing is known of kernels.
        """
        answer = self.worker.ask(job, HANG_S, self.end, hear)
        if answer.get("cut"):
            raise TimeoutError
        if answer.get("no_device") or answer.get("no_memory"):
            raise ConnectionError(answer["message"])
        return answer

    def op(self, op: str) -> verdicts.Verdict:
        """Return the verdict on an op. Raises as :meth:`ask`."""
        here = [b for b in ("cuda", "cpu", "triton") if backends.unavailable(op, b, self.device) is None]
        found = {name: self.checked(op, name) for name in here}
        for case in self.cases:
            if case.op == op and case.timed:
                self.timed(case, found)
        for entry in found.values():
            slow = {label: found for label, found in entry["cases"].items() if found["interval"][1] >= WIN}
            for label, times in slow.items():
                entry["reason"] = entry["reason"] or f"{times['ratio']:.2f} times as long as plain torch in {label}"
            entry["wins"] = not entry["reason"] and bool(entry["cases"])
        products = {n: math.prod(c["ratio"] for c in e["cases"].values()) for n, e in found.items() if e["wins"]}
        best = min(products, default="torch", key=products.__getitem__)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"op": op, "backend": best, "workload": self.workload.digest(), "date": now, "candidates": found}

    def checked(self, op: str, name: str) -> Message:
        """Check a candidate by the small cases; ``reason`` says why it cannot win."""
        entry: Message = {"reason": "", "cases": {}}
        for case in self.cases:
            if case.op == backends.base(op) and not case.timed and not entry["reason"]:
                answer = self.ask({"kind": "check", "op": case.op, "case": case.label, "backend": name})
                entry["reason"] = f"{case.label}: {why}" if (why := objection(answer)) else ""
                self.say(f"{op} {name}, {case.label}: {why or 'right, twice the same bits'}")
        return entry

    def timed(self, case: Case, found: dict[str, Message]) -> None:
        """Time the candidates that are still in the race; one that kills the worker or hangs is out of it."""
        while names := [name for name, entry in found.items() if not entry["reason"]]:
            begun = [""]
            job = {"kind": "time", "op": case.op, "case": case.label, "backends": names, "seconds": CASE_S}
            answer = self.ask(job, lambda message, begun=begun: begun.append(message.get("begin", begun[-1])))  # type: ignore[misc]
            if not answer["ok"] and begun[-1] == "torch":
                raise ConnectionError(f"plain torch fails: {answer['message']}")
            if not answer["ok"]:
                culprits = [begun[-1]] if begun[-1] in names else names
                for name in culprits:
                    found[name]["reason"] = f"{case.label}: {answer['message']}"
                    self.say(f"{case.op} {name}, {found[name]['reason']}")
                continue
            for name in names:
                self.place(case, name, found[name], answer)
            return

    def kernels(self, op: str, name: str) -> compiled.Kernels:
        """Return the PTX that a candidate launches in the timed cases; of CUDA C++ that of all kernels.

        Raises:
            RuntimeError: it does not run.
            FileNotFoundError: of CUDA C++: nvcc or the sources are missing.
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

    def place(self, case: Case, name: str, entry: Message, answer: Message) -> None:
        """Record the result of a candidate in a timed case."""
        if why := objection({"ok": True, "repeats": True, **answer["judged"][name]}):
            entry["reason"] = f"{case.label}: {why}"
            self.say(f"{case.op} {name}, {entry['reason']}")
            return
        ours, plain = answer["times"][name], answer["times"]["torch"]
        ratio, low, high = interval([a / b for a, b in zip(ours, plain)])
        seconds = {who: interval(times)[0] for who, times in ((name, ours), ("torch", plain))}
        entry["cases"][case.label] = {"ratio": ratio, "interval": [low, high], "seconds": seconds}
        took = f"{seconds[name] * 1e6:,.0f} µs, {ratio:.2f} ({low:.2f} to {high:.2f}) of plain torch's time"
        self.say(f"{case.op} {name}, {case.label}: {took}")


def objection(answer: Message) -> str:
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
        ops: names of ops; None for all that have a GPU kernel.
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
        TypeError, ValueError: an op is unknown or has no GPU kernel; a time or device that is none.
    """
    wanted = list(PROVABLE if ops is None else ops)
    if unknown := [op for op in wanted if op not in PROVABLE]:
        raise ValueError(f"ops must be out of {', '.join(PROVABLE)}, got {', '.join(unknown)}")
    _check.in_range("seconds", seconds, 0, math.inf)
    workload = workload or Workload()
    try:
        on = torch.device("cuda" if device is None else device)
    except RuntimeError:
        raise ValueError(f"device must be one that torch knows, such as 'cuda:1', got {device!r}") from None
    if on.type == "cuda" and not torch.cuda.is_available():
        return {"device": {}, "verdicts": {}, "left_out": dict.fromkeys(wanted, NO_GPU)}
    index = 0 if on.type != "cuda" else on.index if on.index is not None else torch.cuda.current_device()
    facts = {"gpu": "cpu", "torch": torch.__version__}
    if on.type == "cuda":
        on = torch.device("cuda", _check.integer("the index of device", index, 0, torch.cuda.device_count() - 1))
        facts = verdicts.device_facts(index)
    found: dict[str, verdicts.Verdict] = {}
    left_out: dict[str, str] = {}
    prover, lost = Prover(on, workload, seconds, cases, say), ""
    try:
        for op in wanted:
            known = [] if again or on.type != "cuda" else verdicts.load(op, index, workload.digest())
            if known:
                found[op] = known[0]
                continue
            try:
                if lost:
                    raise ConnectionError(lost)
                found[op] = prover.op(op)
                if on.type == "cuda":
                    verdicts.store(found[op], index)
            except TimeoutError:
                left_out[op] = f"no time left of {seconds:.0f} s"
            except BrokenPipeError:  # of `say`, whose reader is gone; it is a ConnectionError too
                raise
            except (ConnectionError, DeviceLost) as error:
                left_out[op] = f"not proven: {error}"
                lost = lost if isinstance(error, ConnectionError) else str(error)
    finally:
        if not lost:
            prover.worker.close()
    backends.forget()
    return {"device": facts, "verdicts": found, "left_out": left_out}


def compile_candidates(
    result: dict[str, Any], device: torch.device | str | None = None, *, workload: Workload | None = None,
    say: Callable[[str], Any] = print, cases: str = CASES,
) -> compiled.Code:  # fmt: skip
    """Return the PTX of the candidates in a result of :func:`prove` on the same GPU; none of a dry run.

    ``say`` gets a line about each candidate whose PTX is not to be had.
    """
    if result["device"].get("gpu", "cpu") == "cpu":
        return {}
    prover = Prover(torch.device(device or "cuda"), workload or Workload(), COMPILE_S, cases, say)
    code: compiled.Code = {}
    for op, verdict in result["verdicts"].items():
        for name in verdict["candidates"] if not backends.OPS[op].like else ():
            try:
                code.setdefault(op, {})[name] = prover.kernels(op, name)
            except DeviceLost as error:
                say(f"no PTX from {op} {name} on: {error}")
                return code
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                say(f"no PTX of {op} {name}: {error}")
    prover.worker.close()
    return code


def write_record(path: Path, result: dict[str, Any], code: compiled.Code) -> None:
    """Write the result of :func:`prove` as a record for ``bench/gpu/records``, and its PTX beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**result, "nvcc": compiled.nvcc_version()}, indent=1) + "\n")
    if code:
        compiled.write_code(path, code)
