"""Does the jobs given on standard input, one line of JSON each, and answers on standard output.

What a job finds goes out as soon as it is known, and what is begun is named first, so that the other side knows who it
was where this process dies or hangs. The last message about a job has ``ok``. A process of its own, because a kernel
that goes astray takes its process with it; started by bench/gpu/process.py with the module that holds the cases.
"""

import ctypes
import dataclasses
import importlib
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench import Case, _limits, _runner
from bench.gpu.problem import Gate, GpuCase, Problem, Rival, check
from rlkernels import backend as backends

Message = dict[str, Any]
Say = Callable[[Message], None]
Contestant = tuple[Callable[[], Callable[[], Any]], Rival | None]  # makes the call; None: a backend of the op itself


def verdict(error: float, allowed: float) -> Message:
    """For the record; an ``error`` of None: shapes, dtypes, integers, NaN or infinities differ."""
    return {"ok": error <= allowed, "error": error if math.isfinite(error) else None, "allowed": allowed}


def run_check(case: GpuCase, backend: str, device: torch.device) -> Message:
    """The verdict on one backend."""
    reason = backends.unavailable(case.op, backend, device)
    if reason:
        return {"ok": False, "message": f"written, but cannot run: {reason}"}
    torch.manual_seed(0)
    return verdict(*check(case.make(device), backend, device))


def copy_bandwidth(device: torch.device) -> float:
    return _limits.copy_bandwidth(2**30 if device.type == "cuda" else 2**20, str(device))


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    return _limits.matmul_rate(dtype, 8192 if device.type == "cuda" else 256, str(device))


def limit(problem: Problem, device: torch.device) -> tuple[str, float] | None:
    """The later of two: all bytes at this device's copy bandwidth, all operations at its matrix rate."""
    memory = problem.nbytes / copy_bandwidth(device)
    compute = problem.flops / matmul_rate(problem.dtype, device) if problem.flops else 0.0
    if not memory and not compute:
        return None
    return ("copy bandwidth", memory) if memory >= compute else ("matrix rate", compute)


def settled(device: torch.device) -> None:
    """Waits for the kernels that were started, and raises where one failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def contestants(case: GpuCase, problem: Problem, device: torch.device) -> dict[str, Contestant]:
    """The op's GPU backends, what ``auto`` takes where nothing is proven, plain torch, and the rivals."""
    names = ("cuda", "triton") if device.type == "cuda" else ("cpu", "triton")
    written = [b for b in names if getattr(backends.OPS[case.op], b)]
    default = backends.choose(case.op, device)
    own: dict[str, Contestant] = {
        b: (partial(partial, problem.call, b), None) for b in dict.fromkeys([*written, default, "torch"])
    }
    return own | {name: (rival.make, rival) for name, rival in problem.rivals.items()}


def timed_row(case: GpuCase, name: str, problem: Problem, call: Callable[[], Any], device: torch.device,
              seconds: float) -> Message:  # fmt: skip
    timed = Case(
        op=case.op, shape=case.label, providers={name: call}, dtype=str(problem.dtype).removeprefix("torch."),
        device=str(device), reference=None, limit=limit(problem, device),
    )  # fmt: skip
    (row,) = _runner.run_case(timed, seconds)
    return dataclasses.asdict(row)


class NotInstalled(Exception):
    """The package of a rival."""


def contest(gate: Gate, contestant: Contestant, device: torch.device) -> tuple[Callable[[], Any], Message]:
    """The call of a contestant, made once, and the verdict on what it returned.

    Raises:
        NotInstalled: a rival's package is not there.
    """
    make, rival = contestant
    try:
        call = make()
    except ModuleNotFoundError as error:
        if rival is None:
            raise
        raise NotInstalled(error.name or str(error)) from error
    if gate.problem.reset:
        gate.problem.reset()
    returned = call()
    settled(device)
    return call, verdict(*(gate.rival(rival, returned) if rival else gate.own(returned)))


def run_contest(
    case: GpuCase,
    device: torch.device,
    seconds: float,
    without: list[str],
    say: Say,
    entrants: Callable[[GpuCase, Problem, torch.device], dict[str, Contestant]] = contestants,
) -> Message:
    """A row for everybody who is not in ``without``: right or not, and the time; wrong ones are not timed.

    Raises:
        RuntimeError: the device is broken, on which nothing in this process runs any more.
    """
    torch.manual_seed(0)
    say({"begin": "the inputs and the reference"})
    problem = case.make(device)
    gate = Gate(problem)
    settled(device)
    for name, contestant in entrants(case, problem, device).items():
        if name in without:
            continue
        say({"begin": name})
        row: Message = {"op": case.op, "provider": name, "shape": case.label}
        try:
            call, found = contest(gate, contestant, device)
            row |= found
            if found["ok"]:
                row |= timed_row(case, name, problem, call, device, seconds)
        except NotInstalled as error:
            row |= {"ok": None, "missing": str(error)}
        except Exception as error:
            row |= {"ok": False, "missing": f"{type(error).__name__}: {error}"[:300]}
            settled(device)
        say({"row": row})
    return {"ok": True}


def facts(device: torch.device) -> Message:
    """The device and what it can do."""
    out: Message = {"ok": True, "name": "cpu", "torch": torch.__version__, "python": sys.version.split()[0]}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        out |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    try:
        import triton

        out["triton"] = triton.__version__
    except ImportError:
        out["triton"] = None
    out["copy_bandwidth_bytes_s"] = copy_bandwidth(device)
    for dtype in (torch.bfloat16, torch.float32):
        out[f"matmul_{str(dtype).removeprefix('torch.')}_flops_s"] = matmul_rate(dtype, device)
    return out


def do(job: Message, cases: list[GpuCase], say: Say) -> Message:
    device, kind = torch.device(job["device"]), job["kind"]
    if kind == "device":
        return facts(device)
    if kind == "model":
        from bench.gpu import model  # needs Transformers and the trainer

        return model.run(job["op"], job["case"], device, job["without"], say)
    case = next(case for case in cases if (case.op, case.label) == (job["op"], job["case"]))
    if kind == "check":
        return run_check(case, job["backend"], device)
    if kind == "sweep":
        from bench.gpu import sweeps

        return run_contest(case, device, job["seconds"], job["without"], say, sweeps.tiles)
    return run_contest(case, device, job["seconds"], job["without"], say)


def die_with_parent() -> None:
    """A kernel that hangs would otherwise keep the device from the next call, where this one was killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    die_with_parent()
    cases: list[GpuCase] = importlib.import_module(sys.argv[1]).CASES
    # whatever was recorded earlier: here `auto` means the default
    backends.OPS.update({op: dataclasses.replace(facts, proven=()) for op, facts in backends.OPS.items()})

    def say(message: Message) -> None:
        print("@" + json.dumps(message), flush=True)

    say({"ok": True})  # ready
    for line in sys.stdin:
        start, failed = time.perf_counter(), False
        try:
            answer = do(json.loads(line), cases, say)
        except Exception as error:
            failed, text = True, f"{type(error).__name__}: {error}"
            answer = {"ok": False, "message": text[:500], "traceback": traceback.format_exc()[-3000:]}
        say({**answer, "wall_s": round(time.perf_counter() - start, 3)})
        if failed:  # a CUDA error spoils everything that follows in this process
            return


if __name__ == "__main__":
    main()
