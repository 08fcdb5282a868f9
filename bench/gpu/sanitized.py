"""Call every GPU backend of these ops once on each small case, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m bench.gpu.sanitized OP ...

``rlkernels.prove`` judges the results; here nothing else runs, because instrumented code is slow.
"""

import sys

import torch

from rlkernels.backend import unavailable
from rlkernels.proof.cases import SMALL
from rlkernels.registry import OPS


def main() -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    called = 0
    for case in SMALL:
        for backend in OPS[case.op].backends:
            if backend != "cpu" and case.op in sys.argv[1:] and not unavailable(case.op, backend, device):
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
