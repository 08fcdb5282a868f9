"""Times large cases and a model, in a process of its own: a kernel that goes astray takes its process with it.

Its argument is ``module:function`` that gives the cases; :class:`rlkernels.proof.process.Worker` speaks to it.
"""

import dataclasses
import pkgutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench import Case as TimedCase
from bench import _limits, _runner
from bench.gpu.cases import rivals_of
from bench.gpu.rivals import Rival
from rlkernels import backend as backends
from rlkernels.proof.problem import Case, Problem, Tolerance
from rlkernels.proof.worker import Message, Say, finding, serve, synchronize

INPUTS = "the inputs and the reference"


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
        from triton import __version__ as triton
    except ImportError:
        triton = None
    out |= {"triton": triton, "copy_bandwidth_bytes_s": copy_bandwidth(device)}
    for dtype in (torch.bfloat16, torch.float32):
        out[f"matmul_{str(dtype).removeprefix('torch.')}_flops_s"] = matmul_rate(dtype, device)
    return out


def judged(gate: Tolerance, make: Callable[[], Any], rival: Rival | None, device: torch.device) -> tuple[Any, Message]:
    """The call of a provider, made once, and the verdict on what it returned.

    Raises:
        ModuleNotFoundError: a rival's package is not installed.
    """
    call = make()
    if gate.problem.reset:
        gate.problem.reset()
    returned = call()
    synchronize(device)
    found = finding(rival.verdict(gate, returned) if rival else gate.judge(returned))
    return call, {"ok": found.pop("right"), **found}


def run_contest(case: Case, device: torch.device, seconds: float, without: list[str], say: Say) -> Message:
    """A row for every provider that is not in ``without``: the verdict, and the time if it is right.

    Raises:
        RuntimeError: the device is broken; nothing runs on it in this process any more.
    """
    torch.manual_seed(0)
    say({"begin": INPUTS})
    problem = case.make(device)
    gate = Tolerance(problem)
    synchronize(device)
    names = ("cuda", "triton") if device.type == "cuda" else ("cpu", "triton")
    own = [b for b in (*names, "torch") if backends.unavailable(case.op, b, device) is None]
    providers: dict[str, tuple[Callable[[], Any], Rival | None]] = {
        b: (partial(partial, problem.call, b), None) for b in own
    }
    for name, rival in (rivals_of(case, problem) if device.type == "cuda" else {}).items():
        providers[name] = rival.make, rival
    for name, (make, other) in providers.items():
        if name in without:
            continue
        say({"begin": name})
        row: Message = {"op": case.op, "provider": name, "shape": case.label}
        try:
            call, found = judged(gate, make, other, device)
            row |= found
            if found["ok"]:
                timed = TimedCase(
                    op=case.op, shape=case.label, providers={name: call}, device=str(device), reference=None,
                    dtype=str(problem.dtype).removeprefix("torch."), limit=limit(problem, device),
                )  # fmt: skip
                row |= dataclasses.asdict(next(iter(_runner.run_case(timed, seconds))))
        except Exception as error:
            if other and isinstance(error, ModuleNotFoundError):
                say({"row": row | {"ok": None, "missing": error.name}})
                continue
            row |= {"ok": False, "missing": f"{type(error).__name__}: {error}"[:300]}
            synchronize(device)
        say({"row": row})
    return {"ok": True}


def do(job: Message, cases: list[Case], say: Say) -> Message:
    device = torch.device(job["device"])
    if job["kind"] == "device":
        return facts(device)
    if job["kind"] == "model":
        from bench.gpu import model  # needs Transformers and the trainer

        return model.run(job["op"], job["case"], device, job["without"], say)
    case = next(case for case in cases if (case.op, case.label) == (job["op"], job["case"]))
    return run_contest(case, device, job["seconds"], job["without"], say)


def main() -> None:
    serve(lambda: pkgutil.resolve_name(sys.argv[1]), do)


if __name__ == "__main__":
    main()
