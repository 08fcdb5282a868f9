"""The process that checks and times cases: a bad kernel ends the process that launches it.

Arguments: DEVICE CASES WORKLOAD. CASES is ``module:function`` from a workload to its cases, WORKLOAD the fields of one
in JSON. :class:`rlkernels.proof.process.Worker` sends the jobs.
"""

import ctypes
import json
import math
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rlkernels._graphs import record
from rlkernels.proof.compiled import captured
from rlkernels.proof.problem import Case, ErrorBound, Problem, Tolerance, check
from rlkernels.proof.process import Answer, Comparison, Message
from rlkernels.proof.workload import Workload

Say = Callable[[Message], None]
SAMPLE_S = 5e-4  # length of a timed sample; shorter calls are repeated within it
MAX_ROUNDS = 41  # samples of each backend
MIN_ROUNDS = 6  # also of a slow backend; fewer give no interval of 95 %
MAX_MEMORY_BYTES = 12 << 30  # of the GPU; less where less is free


def finding(bound: ErrorBound) -> Comparison:
    """Turn an error and its bound into a message."""
    error, allowed = bound
    return {"right": error <= allowed, "error": error if math.isfinite(error) else None, "allowed": allowed}


def synchronize(device: torch.device) -> None:
    """Wait for all kernels on the device, and raise if one failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Return the mean seconds of ``times`` calls; on a GPU by its own clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def replay(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture what a call launches in a CUDA graph and return its replay; the call itself, if it waits for the GPU."""
    try:
        return record(call)[0]
    except RuntimeError:
        torch.cuda.synchronize()
        return call


def race(
    problem: Problem, backends: Sequence[str], device: torch.device, seconds: float, in_cuda_graph: bool = False,
    say: Say = lambda message: None,
) -> dict[str, list[float]]:  # fmt: skip
    """Time backends in turns, so that a change of the GPU's clock affects all of them; return seconds by round.

    ``say`` gets a message before each round: a slow backend is not one that hangs.
    """
    calls: dict[str, Callable[[], Any]] = {name: partial(problem.call, name) for name in backends}
    if in_cuda_graph and device.type == "cuda":
        calls = {name: replay(call) for name, call in calls.items()}
    repeats = {}
    for name, call in calls.items():
        seconds_once = seconds_of(call, 1, device)
        repeats[name] = max(1, math.ceil(SAMPLE_S / max(seconds_once, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in backends}
    start = time.monotonic()
    for rounds in range(MAX_ROUNDS):
        if rounds >= MIN_ROUNDS and time.monotonic() - start >= seconds:
            break
        say({"round": rounds})
        for name, call in calls.items():
            samples[name].append(seconds_of(call, repeats[name], device))
    return samples


def run_timing(case: Case, backends: Sequence[str], device: torch.device, seconds: float, say: Say) -> Answer:
    """Judge every backend on the timed inputs, then time those that are right beside plain torch."""
    torch.manual_seed(0)
    say({"begin": "torch"})
    problem = case.make(device)
    tolerance = Tolerance(problem)
    synchronize(device)
    judged: dict[str, Comparison] = {}
    for name in backends:
        say({"begin": name})
        if problem.reset:
            problem.reset()
        judged[name] = finding(tolerance.judge(problem.call(name)))
        synchronize(device)
    say({"begin": ""})
    racing = [name for name in backends if judged[name]["right"]]
    times = race(problem, [*racing, "torch"], device, seconds, case.in_cuda_graph, say) if racing else {}
    return {"ok": True, "judged": judged, "times": times}


def do(job: Message, cases: list[Case], device: torch.device, say: Say) -> Answer:
    """Do a job of kind check, compile or time, and return the answer."""
    case = next(case for case in cases if (case.op, case.label) == (job["op"], job["case"]))
    if job["kind"] == "check":
        torch.manual_seed(0)
        bound, repeats = check(case.make(device), job["backend"], device)
        return {"ok": True, **finding(bound), "repeats": repeats}
    if job["kind"] == "compile":
        problem = case.make(device)
        with captured() as launched:
            problem.call(job["backend"])
        return {"ok": True, "launched": launched}
    return run_timing(case, job["backends"], device, job["seconds"], say)


def serve(prepare: Callable[[], Any], do: Callable[[Message, Any, Say], Mapping[str, Any]]) -> None:
    """Answer the jobs on standard input; the first message says whether ``prepare`` succeeded."""
    if sys.platform == "linux":  # otherwise a kernel that hangs would keep the device when the parent is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def say(message: Message) -> None:
        print("@" + json.dumps(message), flush=True)

    try:
        prepared = prepare()
    except Exception as error:
        say({"ok": False, "no_device": True, "message": f"{type(error).__name__}: {error}"[:500]})
        return
    say({"ok": True})
    for line in sys.stdin:
        start = time.perf_counter()
        try:
            answer = do(json.loads(line), prepared, say)
        except Exception as error:
            answer = {
                "ok": False,
                "message": f"{type(error).__name__}: {error}"[:500],
                "no_memory": isinstance(error, torch.OutOfMemoryError),
                "traceback": traceback.format_exc()[-3000:],
            }
        say({**answer, "wall_s": round(time.perf_counter() - start, 3)})
        if "traceback" in answer:
            return


def open_device(device: torch.device) -> None:
    """Create this process's context on the device, and limit its memory."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # events and graphs record the streams of the current device
    torch.zeros(1, device=device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(MAX_MEMORY_BYTES, 0.8 * free) / total, device)


def main() -> None:
    device = torch.device(sys.argv[1])
    cases = sys.argv[2]
    fields = json.loads(sys.argv[3])

    def prepare() -> list[Case]:
        open_device(device)
        return pkgutil.resolve_name(cases)(Workload(**fields))

    serve(prepare, lambda job, cases, say: do(job, cases, device, say))
