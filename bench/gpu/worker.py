"""Does the jobs given on standard input, one JSON line each, and answers with one line each on standard output.

A process of its own, because a kernel that goes astray takes its process with it. Started by bench/gpu/__main__.py.
"""

import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from bench import Case, Missing, _limits, _runner
from bench._case import Provider
from bench.gpu.cases import CASES
from bench.gpu.problem import GpuCase, Problem, check
from rlkernels import backend as backends


def find(op: str, label: str) -> GpuCase:
    return next(case for case in CASES if (case.op, case.label) == (op, label))


def run_check(case: GpuCase, backend: str, device: torch.device) -> dict[str, Any]:
    """The verdict on one backend."""
    reason = backends.unavailable(case.op, backend, device)
    if reason:
        return {"ok": False, "message": f"written, but cannot run: {reason}"}
    torch.manual_seed(0)
    error, allowed = check(case.make(device), backend, device)
    return {"ok": error <= allowed, "error": error, "allowed": allowed}


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


def ready(makers: Mapping[str, Callable[[], Callable[[], Any]]], device: torch.device) -> dict[str, Provider]:
    """What to time, called once; one that fails is named with its reason.

    Raises:
        RuntimeError: it has broken the device, on which nothing in this process runs any more.
    """
    out: dict[str, Provider] = {}
    for name, make in makers.items():
        try:
            call = out[name] = make()
            call()
            settled(device)
        except Exception as error:
            out[name] = Missing(f"{type(error).__name__}: {error}"[:200])
            settled(device)
    return out


def settled(device: torch.device) -> None:
    """Waits for the kernels that were started, and raises where one failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(out: Any, reference: Any) -> str:
    if out is None:
        return ""
    alone = isinstance(out, torch.Tensor) and isinstance(reference, (list, tuple))
    return _runner.match(out, reference[0] if alone else reference)


def run_timing(case: GpuCase, device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Rows of the benchmark runner: every GPU backend and plain torch, on the same inputs."""
    torch.manual_seed(0)
    problem = case.make(device)
    names = ("cuda", "triton") if device.type == "cuda" else ("cpu", "triton")
    working = [b for b in names if getattr(backends.OPS[case.op], b) and not backends.unavailable(case.op, b, device)]
    own = {backend: partial(partial, problem.call, backend) for backend in [*working, "torch"]}
    providers = ready({**own, **problem.rivals}, device)
    # what changes its inputs gives another result every time
    compared = not problem.reset and not isinstance(providers["torch"], Missing)
    timed = Case(
        op=case.op,
        shape=case.label,
        providers=providers,
        dtype=str(problem.dtype).removeprefix("torch."),
        device=str(device),
        reference="torch" if compared else None,
        limit=limit(problem, device),
        compare=compare,
    )
    return [dataclasses.asdict(row) for row in _runner.run_case(timed, seconds)]


def do(job: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(job["device"])
    if job["kind"] == "facts":
        return facts(device)
    case = find(job["op"], job["case"])
    if job["kind"] == "check":
        return run_check(case, job["backend"], device)
    return {"rows": run_timing(case, device, job["seconds"])}


def facts(device: torch.device) -> dict[str, Any]:
    """The device and what it can do."""
    out: dict[str, Any] = {"name": "cpu", "torch": torch.__version__, "python": sys.version.split()[0]}
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
    out["extension"] = backends.extension_error() or "loaded"
    out["extension_with_cuda"] = backends.built_with_cuda()
    out["copy_bandwidth_bytes_s"] = copy_bandwidth(device)
    for dtype in (torch.bfloat16, torch.float32):
        out[f"matmul_{str(dtype).removeprefix('torch.')}_flops_s"] = matmul_rate(dtype, device)
    return out


def main() -> None:
    for line in sys.stdin:
        start, failed = time.perf_counter(), False
        try:
            answer = do(json.loads(line))
        except Exception as error:
            failed, text = True, f"{type(error).__name__}: {error}"
            answer = {"ok": False, "message": text[:500], "traceback": traceback.format_exc()[-3000:]}
        answer["wall_s"] = round(time.perf_counter() - start, 3)
        print("@" + json.dumps(answer), flush=True)
        if failed:  # a CUDA error spoils everything that follows in this process
            return


if __name__ == "__main__":
    main()
