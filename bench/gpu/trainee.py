"""One training run in a process of its own, started by bench/gpu/train.py with a JSON job as its argument.

Exit codes: 0 finished, 3 stopped after a step that is saved, 1 failed. What it used goes into ``facts.json``.
"""

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from bench.gpu.cases import HOST_ONLY
from bench.gpu.proven import prove
from python_trainer.config import check_config
from python_trainer.errors import Interrupted
from python_trainer.trainer import Trainer
from rlkernels.backend import OPS, choose, extension_error

FACTS = "facts.json"
STOPPED = 3
CPU = torch.device("cpu")


def run(job: dict[str, Any], facts: dict[str, Any]) -> int:
    prove(job["proven"])
    start = time.monotonic()
    trainer = Trainer(check_config(job["config"], source="the job"), Path(job["folder"]), resume=True,
                      label=job["label"])  # fmt: skip
    device = trainer.policy.device
    facts |= {"from_step": trainer.state.step, "load_s": round(time.monotonic() - start, 1)}
    facts["backends"] = {op: choose(op, CPU if op in HOST_ONLY else device) for op in OPS}
    facts["extension"] = extension_error() or "loaded"
    try:
        trainer.run()
    except Interrupted as stopped:
        facts["message"] = str(stopped)
        return STOPPED
    finally:
        facts["to_step"] = trainer.state.step
        if device.type == "cuda":
            facts["peak_gpu_bytes"] = torch.cuda.max_memory_allocated(device)
    return 0


def main() -> int:
    """Runs the job of the command line and returns the exit code."""
    job, facts = json.loads(sys.argv[1]), dict[str, Any]()
    try:
        return run(job, facts)
    except Exception as error:
        facts |= {"message": f"{type(error).__name__}: {error}"[:500], "traceback": traceback.format_exc()[-3000:]}
        print(facts["message"], file=sys.stderr)
        return 1
    finally:
        folder = Path(job["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FACTS).write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
