"""Time large cases, models and updates in a separate process, because a bad kernel can end its process.

Its argument is ``module:function`` that gives the cases; :class:`rlkernels.proof.process.Worker` speaks to it.
"""

import dataclasses
import importlib
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench import Case as TimedCase
from bench import _limits, _runner
from bench.gpu.cases import rivals_of
from bench.gpu.journal import measured, reason_of
from bench.gpu.rivals import Rival
from rlkernels.backend import unavailable
from rlkernels.proof.problem import Case, Problem, Tolerance
from rlkernels.proof.worker import Message, Say, finding, replay, seconds_of, serve, synchronize
from rlkernels.registry import OPS

# the ops of decoding, which engines run inside CUDA graphs: there the host's time is none
REPLAYED = ("write_kv", "paged_attention", "shared_prefix_attention", "merge_attention", "sample_tokens",
            "verify_drafts")  # fmt: skip
# rivals that take a compiler's time, and the ops that have them
COMPILERS = ("torch FlexAttention", "torch.compile")
COMPILED = ("linear_token_logprobs", "token_logprobs", "grouped_attention", "tree_attention", "sample_tokens",
            "shared_prefix_attention", "paged_attention", "verify_drafts", "merge_attention",
            "delta_matvec")  # fmt: skip
# whose rivals run there too
ON_A_CPU = ("grouped_attention", "tree_attention", "paged_attention", "shared_prefix_attention")
CALLS = 10  # of an op in a graph: the start of a graph takes as long as a small kernel
LEAST_REPLAYS, MOST_REPLAYS = 5, 100
SLOW_S = 3.0  # a reference that takes longer is not timed
INPUTS = "the inputs and the reference"


def copy_bandwidth(device: torch.device) -> float:
    return _limits.copy_bandwidth(2**30 if device.type == "cuda" else 2**20, str(device))


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    return _limits.matmul_rate(dtype, 8192 if device.type == "cuda" else 256, str(device))


def limit(problem: Problem, device: torch.device) -> tuple[str, float] | None:
    """Return the later of two: all bytes at this device's copy bandwidth, all operations at its matrix rate."""
    memory = problem.nbytes / copy_bandwidth(device)
    compute = problem.flops / matmul_rate(problem.dtype, device) if problem.flops else 0.0
    if not memory and not compute:
        return None
    return ("copy bandwidth", memory) if memory >= compute else ("matrix rate", compute)


def facts(device: torch.device) -> Message:
    """Return the device, and its rates."""
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


def judge(gate: Tolerance, rival: Rival | None, output: Any) -> Message:
    """Return the verdict on an output: ``ok``, and by what."""
    verdict = dict(finding(rival.verdict(gate, output) if rival else gate.judge(output)))
    return {"ok": verdict.pop("right"), **verdict}


def run_once(gate: Tolerance, run: Callable[[], Any], device: torch.device) -> Any:
    """Run on the problem's inputs, and wait for the device."""
    if gate.problem.reset:
        gate.problem.reset()
    output = run()
    synchronize(device)
    return output


def run_replay(gate: Tolerance, call: Callable[[], Any], rival: Rival | None, device: torch.device, seconds: float
               ) -> Message:  # fmt: skip
    """Judge and time a call inside a CUDA graph, seconds for each; on a CPU, plain calls."""
    outputs = list[Any]()
    on_gpu = device.type == "cuda"
    num_calls, min_samples = (CALLS, LEAST_REPLAYS) if on_gpu else (1, 1)

    def calls() -> None:
        for _ in range(num_calls):
            outputs[:] = [call()]

    run = replay(calls) if on_gpu else calls
    if run is calls and on_gpu:
        return {"unfit": "it waits for the GPU, which no graph can record"}
    run_once(gate, run, device)
    verdict = judge(gate, rival, outputs[0])
    samples = list[float]()
    end = time.monotonic() + seconds
    while len(samples) < min_samples or (time.monotonic() < end and len(samples) < MOST_REPLAYS):
        samples.append(seconds_of(run, 1, device) / num_calls)
    return verdict | {"replay_s": statistics.median(samples)}


def time_provider(
    case: Case, gate: Tolerance, name: str, make: Callable[[], Any], rival: Rival | None, device: torch.device,
    seconds: float,
) -> tuple[Callable[[], Any] | None, Message]:  # fmt: skip
    """Return the call of a provider, and the verdict on it with the time if it is right.

    A rival that fails is no failure of ours: ``ok`` is None.
    """
    row: Message = {}
    try:
        call = make()
        row |= judge(gate, rival, run_once(gate, call, device))
        if row["ok"]:
            timed = TimedCase(
                op=case.op, shape=case.label, providers={name: call}, device=str(device), reference=None,
                dtype=str(gate.problem.dtype).removeprefix("torch."), limit=limit(gate.problem, device),
            )  # fmt: skip
            row |= dataclasses.asdict(next(iter(_runner.run_case(timed, seconds))))
            if rival and rival.copy:
                row["copy_s"] = statistics.median(seconds_of(rival.copy, 3, device) for _ in range(LEAST_REPLAYS))
    except Exception as error:
        synchronize(device)
        return None, row | {"ok": None if rival else False, "missing": reason_of(error)}
    return call, row


def run_contest(
    case: Case, device: torch.device, seconds: float, without: list[list[str]], say: Say, late: bool = True
) -> Message:
    """Send a row for every provider that is not in ``without``: the verdict, and the time if it is right.

    Rows of decode ops are followed by what a replay took. Rivals that read contiguous copies of what the op is given
    have the time of these copies in ``copy_s``. Those that are compiled run if ``late``.

    Raises:
        RuntimeError: the device is broken; nothing runs on it in this process any more.
    """
    torch.manual_seed(0)
    say({"begin": INPUTS})
    problem = case.make(device)
    start = time.monotonic()
    gate = Tolerance(problem)
    synchronize(device)
    is_slow = time.monotonic() - start > SLOW_S
    backends = [b for b in (*OPS[case.op].backends, "torch") if unavailable(case.op, b, device) is None]
    providers: dict[str, tuple[Callable[[], Any], Rival | None]] = {
        b: (partial(partial, problem.call, b), None) for b in backends
    }
    rivals = rivals_of(case, problem) if device.type == "cuda" or case.op in ON_A_CPU else {}
    for name, rival in rivals.items():
        providers[name] = rival.make, rival
    for name, (make, provider_rival) in providers.items():
        if [case.label, name] in without or (not late and name.startswith(COMPILERS)):
            continue
        say({"begin": name})
        row: Message = {"op": case.op, "provider": name, "shape": case.label}
        if name == "torch" and is_slow:
            say({"row": row | {"ok": True, "missing": f"takes more than {SLOW_S} s with its reference: not timed"}})
            continue
        call, result = time_provider(case, gate, name, make, provider_rival, device, seconds)
        say({"row": row | result})
        if call and result["ok"] and case.op in REPLAYED:
            say({"begin": f"{name}, replayed"})
            try:
                replayed = run_replay(gate, call, provider_rival, device, seconds)
            except Exception as error:
                replayed = {"unfit": reason_of(error)}
                synchronize(device)
            say({"replay": row | replayed})
    return {"ok": True}


# kinds of jobs that give one row, by modules that need Transformers or the trainer
MODULES = {"model": "bench.gpu.model", "preset": "bench.gpu.presets", "sharded": "bench.gpu.presets"}


def run_single(job: Message, device: torch.device, say: Say) -> Message:
    """Send the row of a job that has one."""
    provider = job["case"] if job["kind"] == "model" else "python_trainer"
    say({"begin": provider})
    measure = importlib.import_module(MODULES[job["kind"]]).measure
    labels = {"op": job["op"], "provider": provider, "shape": job["case"], "device": str(device)}
    say({"row": measured(labels, partial(measure, job["op"], job["case"], device), device)})
    return {"ok": True}


def do(job: Message, cases: list[Case], say: Say) -> Message:
    device = torch.device(job["device"])
    if job["kind"] == "device":
        return facts(device)
    if job["kind"] == "update":
        from bench.gpu import updates  # needs TRL

        return updates.run(job["op"], job["case"], device, job["without"], say)
    if job["kind"] in MODULES:
        return {"ok": True} if job["without"] else run_single(job, device, say)
    case = next(case for case in cases if (case.op, case.label) == (job["op"], job["case"]))
    return run_contest(case, device, job["seconds"], job["without"], say, job["late"])


def main() -> None:
    serve(lambda: pkgutil.resolve_name(sys.argv[1]), do)


if __name__ == "__main__":
    main()
