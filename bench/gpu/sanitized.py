"""What runs under compute-sanitizer: every GPU backend of these ops on its small cases, each call once.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m bench.gpu.sanitized MODULE OP ...

Whether the results are right is the business of the checks; here nothing else runs that would have to be instrumented.
"""

import importlib
import sys

import torch

from bench.gpu.problem import GpuCase
from bench.gpu.proven import GPU_BACKENDS
from rlkernels.backend import OPS, unavailable


def main() -> int:
    cases: list[GpuCase] = importlib.import_module(sys.argv[1]).CASES
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    called = 0
    for case in cases:
        if case.op not in sys.argv[2:] or case.timed or case.spins:
            continue
        for backend in GPU_BACKENDS:
            if getattr(OPS[case.op], backend) and not unavailable(case.op, backend, device):
                print(f"{case.op} on {backend}: {case.label}", flush=True)
                torch.manual_seed(0)
                case.make(device).call(backend)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                called += 1
    print(f"{called} calls")
    return 0 if called else 1


if __name__ == "__main__":
    raise SystemExit(main())
