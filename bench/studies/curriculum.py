"""Does history choose better prompts than rules without it? `curriculum` against plain GRPO and rivals, task by task.

    python -m bench.studies curriculum --output-dir runs/studies/curriculum
    python -m bench.studies curriculum --tasks sums --names curriculum "shorter half" --seeds 0 1
    python -m bench.studies curriculum --report-only

Every run has the task's settings and as many answers or steps as plain training; the seeds pair. What counts are the
seconds and tokens to plain training's own final accuracy, held in two successive evaluations. A finished run is a row
of bench/studies/results/curriculum.jsonl and is not made again; runs without history are those of the study of the
ground, in its records, but for those that were made again here, on the machine of the runs beside them. Writes
curriculum.md and curriculum.png.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.faults.records import read_rows
from bench.studies.curriculum_report import write
from bench.studies.ground import RECORDS as GROUND
from bench.studies.ground import RIVALS, SEEDS, Ground, add_task_arguments, rival
from bench.studies.ground_report import PLAIN

RECORDS = Path(__file__).parent / "results" / "curriculum.jsonl"
ON = "accelerators.enabled"
CURRICULUM: dict[str, Any] = {ON: ["curriculum"]}
RUNS: dict[str, Mapping[str, Any]] = {
    "Beta bandit": {ON: ["bench.studies.beta_bandit:BetaBanditSettings"]},
    "curriculum": CURRICULUM,
    "curriculum, twice the steps": CURRICULUM,  # which are smaller ones: about the answers of plain training
    "by 1 / length, three times the steps": RIVALS["by 1 / length"],  # about the tokens of plain training
    # ablations
    "as many prompts": CURRICULUM | {"accelerators.curriculum.same_signal": False},
    "random prompts, as few": CURRICULUM | {"accelerators.curriculum.sharpness": 0.0},
    "nothing stored": CURRICULUM | {"accelerators.curriculum.stored_share": 0.0},
    "chosen for a gain of 1.1 already": CURRICULUM | {"accelerators.curriculum.least_gain": 1.1},
    "plain order, stored answers": CURRICULUM | {"accelerators.curriculum.least_gain": 1e9},
    "from the first step": CURRICULUM | {"accelerators.curriculum.least_gain": 0.0},
}
SIZES = {
    "curriculum, twice the steps": 2.0,
    "by 1 / length, three times the steps": 3.0,
}  # of a run, in steps of plain training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_task_arguments(parser, "curriculum", RECORDS)
    parser.add_argument("--names", nargs="+", choices=[*RIVALS, *RUNS], metavar="NAME",
                        default=[*RIVALS, *RUNS], help=f"{', '.join([*RIVALS, *RUNS])}; default: all")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="N")
    parser.add_argument(
        "--ground-records", type=Path, default=GROUND, metavar="FILE", help="of the runs without history"
    )


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for seed in args.seeds if not args.report_only else ():
        for task in args.tasks:
            ground = Ground(task, args.output_dir, args.ground_records)
            chosen = Ground(task, args.output_dir, args.records)
            for name in dict.fromkeys([PLAIN, *args.names]):
                if name in RIVALS:
                    rival(ground, name, seed)
                else:
                    chosen.run("curriculum", name, RUNS[name], seed, SIZES.get(name, 1.0))
    rows = [*read_rows(args.ground_records), *read_rows(args.records)]
    told = {(row["task"], row["name"], row["seed"]): row for row in rows if row["part"] in ("rivals", "curriculum")}
    write(list(told.values()), args.records.parent)
