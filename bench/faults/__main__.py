"""Kill small real training runs, and feed hostile input; every case is a row of bench/results/faults.jsonl.

    python -m bench.faults                       # one run of every variant for each signal; known rows are skipped
    python -m bench.faults kills --times 20      # 20 of each, at other moments
    python -m bench.faults fuzz --cases 10000    # this many inputs of every kind, in this process
    python -m bench.faults --report              # the table of docs/trust.md, of all rows

A kill loses nothing that was saved. After resume, weights equal those of an undisturbed run bit for bit. The process
ends with one clear line and no traceback. A run has one thread and takes a few seconds. The command prints every
problem and keeps the folder of its case.
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

FAMILIES = ("kills", "fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], metavar=" | ".join(FAMILIES))
    parser.add_argument("--times", type=int, default=1, help="runs of every variant for each signal")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--cases", type=int, default=1000, help="inputs of every kind for fuzz")
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
    # every run is a fork of this process: import once what each of them needs
    for name in ("torch.utils.tensorboard", "tensorboard.compat.proto.event_pb2", "python_trainer.trainer",
                 "sqlalchemy", "python_trainer.accelerators.rhyme.database",
                 "python_trainer.command_line.report"):  # fmt: skip
        importlib.import_module(name)
    return run(args)


def run(args: argparse.Namespace) -> int:
    known = {tuple(row[name] for name in records.KEY) for row in records.read(args.records)}
    num_failed = 0
    for family in args.families or ["kills"]:
        module = importlib.import_module(f"bench.faults.{family}")
        for case in module.cases(args.cases if family == "fuzz" else args.times, args.seed):
            name = f"{case.fault}, {case.variant}, {case.seed}"
            if (case.fault, case.variant, case.seed) in known or args.only not in name:
                continue
            start = time.monotonic()
            place = Place(args.work_dir.resolve(), case)
            outcome = case.run(place, case)
            ended = [text.replace(f"{place.root}/", "")[:300] for text in outcome.ended]
            row = {
                "fault": case.fault, "variant": case.variant, "seed": case.seed, "times": outcome.times,
                "problems": outcome.problems, "ended": ended, "seconds": round(time.monotonic() - start, 1),
            }  # fmt: skip
            records.add(args.records, row)
            print(f"{name}: {'; '.join(outcome.problems) or 'survived'}", flush=True)
            num_failed += bool(outcome.problems)
            if not outcome.problems:
                place.clear()
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
