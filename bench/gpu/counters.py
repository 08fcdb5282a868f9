"""Hardware counters of a few ops: ``python -m bench.gpu.counters``, under Nsight Compute.

Each op runs twice before, so that the counts exclude compiling and first launches.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

OPS = ("paged_attention", "shared_prefix_attention", "sample_tokens", "grouped_attention", "linear_token_logprobs")
METRICS = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum",
           "dram__throughput.avg.pct_of_peak_sustained_elapsed", "sm__throughput.avg.pct_of_peak_sustained_elapsed",
           "sm__warps_active.avg.pct_of_peak_sustained_active", "launch__registers_per_thread")  # fmt: skip
MAX_KERNELS = 32


def command(log: Path, rehearse: bool) -> list[str]:
    """Return the command line that reports to ``log``; a rehearsal only calls the ops."""
    ncu_command = [
        "ncu", "--clock-control", "none", "--target-processes", "all", "--profile-from-start", "off", "--csv",
        "--print-units", "base", "--launch-count", str(MAX_KERNELS), "--metrics", ",".join(METRICS), "--log-file",
        str(log),
    ]  # fmt: skip
    ops_command = [sys.executable, "-m", "bench.gpu.counters"]
    return [*ops_command, "delta_matvec"] if rehearse else [*ncu_command, *ops_command]


def read(text: str) -> list[dict[str, Any]]:
    """Read the report: for each kernel its name and metrics, in nanoseconds, bytes and percent."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines):
        name = row.get("Metric Name")
        value = (row.get("Metric Value") or "").replace(",", "")
        if name in METRICS and value:
            kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"][:80]})
            try:
                kernel[name] = float(value)
            except ValueError:  # "n/a"
                kernel[name] = None
    return list(kernels.values())


def main(ops: Sequence[str]) -> int:
    """Call each op on its first large case, on a CPU its first small one."""
    from bench.gpu.cases import CASES

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    backend = "triton"
    for op in ops:
        case = next(case for case in CASES if case.op == op and case.timed == on_gpu)
        torch.manual_seed(0)
        problem = case.make(device)
        for _ in range(2):
            problem.call(backend)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        problem.call(backend)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        print(f"{op}: {case.label}", flush=True)
        del problem
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or OPS))
