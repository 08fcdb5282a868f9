"""Faults injected into real, small training runs; what came of each is a row of bench/results/faults.jsonl.

    python -m bench.faults                       # every family once; rows that are there are not made again
    python -m bench.faults kills --times 20      # 20 runs of every variant for each signal
    python -m bench.faults --report              # the table of docs/trust.md, of all rows
    python -m bench.faults fuzz --cases 100000   # hostile input, in this process and by the command line

After each fault: nothing is lost that was said to be saved; weights after resume are those of a run that nothing was
done to, bit for bit; one clear line, no traceback, no process and no shared memory left. A run has one thread and takes
a few seconds. Whatever went wrong is printed, and its folder is kept.
"""

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.faults import records
from bench.faults.case import Place

FAMILIES = {
    "kills": "SIGKILL and SIGTERM at random moments",
    "writes": "a disk that is full, read-only or fails, at one write of a run after another",
    "checkpoints": "the newest checkpoint torn, or with a bit flipped",
    "memory": "the trainer or a worker out of memory",
    "database": "the database locked, full, cut off, restarted",
    "folder": "two trainers in one folder",
    "badly": "a reward that hangs, forks, writes or ends the process",
    "vllm": "a vLLM server that dies",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, "fuzz", []], metavar=" | ".join([*FAMILIES, "fuzz"]))
    parser.add_argument("--times", type=int, default=1, help="of every fault, with other moments")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--cases", type=int, default=1000, help="of fuzz")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults and variants whose name has it")
    parser.add_argument("--records", type=Path, default=records.RECORDS, metavar="FILE")
    parser.add_argument(
        "--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "rlkernels-faults", metavar="DIR"
    )
    parser.add_argument("--report", action="store_true", help="run nothing, print the table")
    args = parser.parse_args()
    if args.report:
        print(records.table(records.read(args.records)), end="")
        return 0
    torch.set_num_threads(1)
    # what a run would import on its way; every run is a fork of this process
    for name in ("torch.utils.tensorboard", "tensorboard.compat.proto.event_pb2", "python_trainer.trainer",
                 "sqlalchemy", "python_trainer.accelerators.rhyme.database",
                 "python_trainer.report.page"):  # fmt: skip
        importlib.import_module(name)
    return run(args)


def run(args: argparse.Namespace) -> int:
    done = {tuple(row[name] for name in records.KEY) for row in records.read(args.records)}
    wrong = 0
    for family in args.families or FAMILIES:
        module = importlib.import_module(f"bench.faults.{family}")
        for case in module.cases(args.cases if family == "fuzz" else args.times, args.seed):
            name = f"{case.fault}, {case.variant}, {case.seed}"
            if (case.fault, case.variant, case.seed) in done or args.only not in name:
                continue
            began, place = time.monotonic(), Place(args.work_dir.resolve(), case)
            outcome = case.run(place, case)
            row = {"fault": case.fault, "variant": case.variant, "seed": case.seed, "times": outcome.times}
            row |= {
                "problems": outcome.problems,
                "ended": [text.replace(f"{args.work_dir.resolve()}/", "")[:300] for text in outcome.ended],
            }
            records.add(args.records, row | {"seconds": round(time.monotonic() - began, 1)})
            print(f"{name}: {'; '.join(outcome.problems) or 'survived'}", flush=True)
            wrong += bool(outcome.problems)
            if not outcome.problems:
                place.clear()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
