"""What is to be done on a GPU, most important first; last what may hang for ever."""

from collections.abc import Sequence
from typing import Any

from bench.gpu.problem import GpuCase
from bench.gpu.sweeps import settings_of
from rlkernels.backend import OPS

Job = dict[str, Any]
# ops that decide how long a step takes, checked and timed before anything else
FIRST = (
    "paged_attention",
    "shared_prefix_attention",
    "grouped_attention",
    "sample_tokens",
    "write_kv",
    "merge_attention",
)
# parts of a model -> the ops of ours that they go through
MODEL_OPS = {
    "decode": ("paged_attention", "shared_prefix_attention", "write_kv", "sample_tokens"),
    "train": ("grouped_attention", "token_logprobs", "linear_token_logprobs"),
}
# what the sanitizer looks at in one process; not the ops of rank1, where a kernel waits for other programs
SANITIZED = {
    "attention": FIRST[:3] + FIRST[4:],
    "sampling": ("sample_tokens", "verify_drafts", "token_logprobs", "linear_token_logprobs"),
    "dtw": ("dtw", "dtw_topk"),
}
SANITIZERS = ("memcheck", "racecheck")
LEAST_SANITIZED_S = 60.0  # to begin with one of them
# kind of a job -> seconds from one sign of life to the next, after which it hangs
LIMITS_S = {"device": 120.0, "check": 120.0, "time": 120.0, "sweep": 60.0, "model": 120.0, "sanitize": 240.0,
            "tests": 300.0}  # fmt: skip


def decides(job: Job) -> bool:
    """Whether a job is of what decides how long a step takes: done first, with the tests of its kernels."""
    return job["kind"] == "model" or (job["kind"] in ("check", "time") and job["op"] in FIRST)


def small(cases: Sequence[GpuCase], op: str, device: str, spins: bool) -> list[Job]:
    """The checks of an op, of every backend that is written for it and of plain torch."""
    names = ("cuda", "triton") if device == "cuda" else ("cpu", "triton")
    backends = [*(b for b in names if getattr(OPS[op], b)), "torch"]
    found = [case for case in cases if case.op == op and not case.timed and case.spins == spins]
    return [{"kind": "check", "op": op, "case": case.label, "backend": b} for case in found for b in backends]


def timed(cases: Sequence[GpuCase], op: str, device: str, spins: bool, seconds: float) -> list[Job]:
    """Large cases are for a GPU; elsewhere the first small one of an op shows that timing works."""
    found = [case for case in cases if case.op == op and case.timed]
    if device != "cuda":
        found = [case for case in cases if case.op == op and not case.timed][:1]
    return [{"kind": "time", "op": op, "case": case.label, "seconds": seconds} for case in found if case.spins == spins]


def plan(cases: Sequence[GpuCase], device: str, seconds: float, sanitizer: bool) -> list[Job]:
    """All jobs for the worker and the sanitizer, in the order in which they are done."""

    def of(op: str, spins: bool = False) -> list[Job]:
        return [*small(cases, op, device, spins), *timed(cases, op, device, spins, seconds)]

    ops = list(dict.fromkeys(case.op for case in cases))
    first = [op for op in FIRST if op in ops]
    rest = [op for op in ops if op not in first]
    jobs = [job for op in first for job in of(op)]
    jobs += [{"kind": "model", "op": part, "case": who} for part in MODEL_OPS for who in ("default", "triton")]
    large = [job for op in first for job in timed(cases, op, device, False, seconds / 2)]
    jobs += [{**job, "kind": "sweep"} for job in large if settings_of(job["op"], job["case"])]
    if sanitizer:
        jobs += [{"kind": "sanitize", "op": group, "case": tool} for group in SANITIZED for tool in SANITIZERS]
    jobs += [job for op in rest for job in of(op)]
    jobs += [{**job, "spins": True} for op in ops for job in of(op, spins=True)]
    return [{**job, "device": device} for job in jobs]
