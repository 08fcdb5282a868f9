"""Run a study, or go on with it: ``python -m bench.studies rpo --seeds 3``. Runs that are over are kept."""

import argparse
import importlib
import math
import sys
from pathlib import Path

import torch

from bench.studies.harness import Harness, at_rate
from bench.studies.report import RESULTS, draw_seconds, read_rows, write

STUDIES = {
    "alpha": "extrapolated weights, up to the plateau",
    "rhyme": "training guided by history, with GRPO and PPO",
    "rpo": "suffix rollouts, by where the policy's errors lie",
    "drafts": "lossless drafts: forward passes and seconds, and that training does not change",
    "language": "a real language model on GSM8K, where right answers are rare",
    "sentences": "SmolLM2-135M learns to write under constraints, and what its update is like",
    "trl": "this trainer against TRL's: seconds to the same accuracy",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies", description=__doc__)
    parser.add_argument("name", choices=STUDIES, help="; ".join(f"{name}: {text}" for name, text in STUDIES.items()))
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--output", type=Path, default=Path("runs/studies"), metavar="DIR", help="of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="of the page")
    parser.add_argument("--study", metavar="NAME", help="run this section of the page alone")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="run these arms alone")
    rate = "of the baseline, whose multiples other arms keep; without it arms are tuned"
    parser.add_argument("--rate", type=float, metavar="LR", help=rate)
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE", help="more settings")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs that take their turn at the same time")
    stop = "seconds after which runs save and end; the same command goes on with them"
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS", help=stop)
    parser.add_argument("--report-only", action="store_true", help="run nothing, write the page of what there is")
    picture = "run nothing; draw the seconds to the last level from the rows in --results"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=picture)
    args = parser.parse_args()
    torch.set_num_threads(1)
    module = importlib.import_module(f"bench.studies.{args.name}")
    if args.picture:
        rows = read_rows(args.results / f"{args.name}.jsonl")
        draw_seconds(module.STUDIES[0], rows, args.picture)
        return 0
    studies = [at_rate(study, args.rate) for study in module.STUDIES if args.study in (None, study.name)]
    harnesses = [
        Harness(study, args.output / args.name, args.overrides, args.arms, jobs=args.jobs, stop_after=args.stop_after)
        for study in studies
    ]
    for harness in harnesses if not args.report_only else ():
        harness.run_all(args.seeds)
    rows = [row for harness in harnesses for row in harness.rows(args.seeds, measure=not args.report_only)]
    if not rows:
        print(f"error: no run below {args.output / args.name} is over; nothing was written", file=sys.stderr)
        return 2
    print(write(args.name, module.__doc__ or "", studies, rows, args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
