"""Run or resume a study: ``python -m bench.studies rpo --seeds 3``. Finished runs are not repeated."""

import argparse
import importlib
import math
import sys
from pathlib import Path

import torch

from bench.studies.harness import Harness, at_rate
from bench.studies.report import RESULTS, draw_seconds, read_rows, write_page

STUDIES = {
    "alpha": "extrapolated weights, up to the plateau",
    "rhyme": "training guided by history, with GRPO and PPO",
    "rpo": "suffix rollouts, by where the policy's errors lie",
    "drafts": "lossless drafts: forward passes and seconds, and that training does not change",
    "sentences": "SmolLM2-135M learns to write under constraints, and what its update is like",
    "trl": "this trainer against TRL's: seconds to the same accuracy",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies", description=__doc__)
    parser.add_argument("name", choices=STUDIES, help="; ".join(f"{name}: {text}" for name, text in STUDIES.items()))
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--output", type=Path, default=Path("runs/studies"), metavar="DIR", help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="folder of the page")
    parser.add_argument("--study", metavar="NAME", help="run only this section of the page")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="run only these arms")
    rate_help = "learning rate of the baseline; other arms keep their multiple of it (default: arms are tuned)"
    parser.add_argument("--rate", type=float, metavar="LR", help=rate_help)
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every run"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs that train at the same time")
    stop_help = "seconds after which runs save and stop; the same command resumes them"
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS", help=stop_help)
    parser.add_argument("--report-only", action="store_true", help="run nothing; write the page of the finished runs")
    picture_help = "run nothing; draw the seconds to the last level from the rows in --results"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=picture_help)
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
    if not args.report_only:
        for harness in harnesses:
            harness.run_all(args.seeds)
    rows = [row for harness in harnesses for row in harness.rows(args.seeds, measure=not args.report_only)]
    if not rows:
        print(f"error: no run below {args.output / args.name} has finished; nothing was written", file=sys.stderr)
        return 2
    print(write_page(args.name, module.__doc__ or "", studies, rows, args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
