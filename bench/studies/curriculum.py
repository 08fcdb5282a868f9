"""What a run's own history and that of earlier runs are worth: `curriculum` against plain GRPO and rivals, by task.

    python -m bench.studies curriculum --output-dir runs/studies/curriculum
    python -m bench.studies curriculum --tasks sums --names curriculum "shorter half" --seeds 0 1
    python -m bench.studies curriculum --report-only

Names with "earlier" are of runs that begin with what one run of another seed, with a curriculum too, has left in its
database; each has a copy of it. What that run took is told beside them. Those with "smaller" have it of a policy with a
quarter of the weights, which is made first. Those with "rhyme" mix answers of the earlier run into their groups, chosen
in several ways.

Every run has the task's settings and as many answers or steps as plain training; the seeds pair. What counts are the
seconds and tokens to plain training's own final accuracy, held in two successive evaluations. A finished run is a row
of bench/studies/results/curriculum.jsonl and is not made again; runs without history are those of the study of the
ground, in its records, but for those that were made again here, on the machine of the runs beside them. Writes
curriculum.md and curriculum.png.
"""

import argparse
import shutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.faults.records import read_rows
from bench.studies.curriculum_report import EARLIER, EARLIER_SMALLER, write
from bench.studies.ground import RECORDS as GROUND
from bench.studies.ground import RIVALS, SEEDS, Ground, add_task_arguments, rival, slug
from bench.studies.ground_report import PLAIN
from python_trainer.errors import UserError

RECORDS = Path(__file__).parent / "results" / "curriculum.jsonl"
ON, DATABASE = "accelerators.enabled", "accelerators.curriculum.database"
RHYME_DATABASE = "accelerators.rhyme.database"
CURRICULUM: dict[str, Any] = {ON: ["curriculum"]}
ALWAYS = CURRICULUM | {"accelerators.curriculum.rare_share": 0.0}  # whether right answers are rare or not
CHOOSING = ALWAYS | {"accelerators.curriculum.least_gain": 1.5}
# gradients of chosen prompts change in size from step to step: a second moment that follows, and a higher rate
STEADY: dict[str, Any] = {"optimizer.adam_beta2": 0.95, "optimizer.learning_rate": 1.5e-4}
TO_ZERO: dict[str, Any] = {"optimizer.lr_scheduler_type": "linear"}
RUNS: dict[str, Mapping[str, Any]] = {
    "Beta bandit": {ON: ["bench.studies.beta_bandit:BetaBanditSettings"]},
    "curriculum": CURRICULUM,
    "right answers kept, rare or not": ALWAYS,
    "prompts chosen": CHOOSING,
    "prompts chosen, twice the steps": CHOOSING,  # which are smaller ones: about the answers of plain training
    "by 1 / length, three times the steps": RIVALS["by 1 / length"],  # about the tokens of plain training
    "plain, beta2 0.95": STEADY,
    "by 1 / length, beta2 0.95": RIVALS["by 1 / length"] | STEADY,
    "prompts chosen, beta2 0.95": ALWAYS | {"accelerators.curriculum.least_gain": 1.1} | STEADY,
    "plain, half as long, rate to 0": TO_ZERO,
    "curriculum, half as long, rate to 0": CURRICULUM | TO_ZERO,
    "rpo": {ON: ["rpo"]},
    "rpo, 11 % of an answer at most": {ON: ["rpo"], "accelerators.rpo.cut_share": 0.11},  # the paper's 300 tokens
    # ablations
    "as many prompts": CHOOSING | {"accelerators.curriculum.same_signal": False},
    "random prompts, as few": ALWAYS  # no gain is expected of them, so none is asked for
    | {"accelerators.curriculum.sharpness": 0.0, "accelerators.curriculum.least_gain": 0.0},
    "from the first step, no floor": ALWAYS
    | {"accelerators.curriculum.floor": 1e-9, "accelerators.curriculum.least_gain": 0.0},
    "nothing stored": CHOOSING | {"accelerators.curriculum.stored_share": 0.0},
    "chosen for a gain of 1.1 already": ALWAYS | {"accelerators.curriculum.least_gain": 1.1},
    "from the first step": ALWAYS | {"accelerators.curriculum.least_gain": 0.0},
    "sizes by value": {ON: ["bench.studies.group_sizes:GroupSizesSettings"]},
    "sizes by 1 / p": {
        ON: ["bench.studies.group_sizes:GroupSizesSettings"],
        "accelerators.group_sizes.rule": "rarity",
    },
    "sizes by value, p known": {ON: ["bench.studies.group_sizes:KnownGroupSizesSettings"]},
    "a cut where p is 1/2": {ON: ["bench.studies.cuts:CutsSettings"]},
    "a random cut": {ON: ["bench.studies.cuts:CutsSettings"], "accelerators.cuts.cut": "random"},
    "one more visit, no cut": {ON: ["bench.studies.cuts:CutsSettings"], "accelerators.cuts.cut": "start"},
    "from the first step, no cost": {
        ON: ["bench.studies.signals:SignalsSettings"],
        "accelerators.signals.kind": "free",
    },
    "from the first step, weighed by G": {
        ON: ["bench.studies.signals:SignalsSettings"],
        "accelerators.signals.kind": "weighed",
    },
    "p known": {  # measured; not among the tokens, but in the seconds
        ON: ["bench.studies.oracle:OracleSettings"],
        "accelerators.oracle.least_gain": 1.5,
    },
    "p known, nothing stored": {
        ON: ["bench.studies.oracle:OracleSettings"],
        "accelerators.oracle.stored_share": 0.0,
        "accelerators.oracle.least_gain": 1.1,
    },
}
SIZES = {
    "plain, half as long, rate to 0": 0.5,
    "curriculum, half as long, rate to 0": 0.5,
    "prompts chosen, twice the steps": 2.0,
    "by 1 / length, three times the steps": 3.0,
    "plain, beta2 0.95": 2 / 3,
    "by 1 / length, beta2 0.95": 5 / 3,  # the tokens of the other two with this optimizer
    "prompts chosen, beta2 0.95": 5 / 4,
}  # of a run, in steps of plain training
EARLIER_SEED = 1000
THEN_PLAIN = CURRICULUM | {"accelerators.curriculum.stored_share": 0.0}
SELECTIONS: dict[str, dict[str, Any]] = {
    "by likelihood": {},
    "at random": {"selection": "random"},
    "by retrodiction": {"selection": "retrodiction", "retrodiction_steps": 1, "held_out": 64},
    "by the oracle": {"selection": "oracle"},
    "of the 20 % best stages": {"fraction": 0.2, "threshold": 0.7},
    "of the 5 % best stages": {"fraction": 0.05, "threshold": 0.7},
}


def rhyme(**chosen: Any) -> dict[str, Any]:
    """Settings of a run that mixes stored answers into its groups, and is not recorded itself.

    Two of the four places of a group are for the best of up to sixteen candidates, here of all stages.
    """
    settings = {"record": False, "history_ratio": 1.0, "candidates": 16, "bank_per_prompt": 256, "bank_size": 65536,
                "window": 4, "fraction": 1.0, "threshold": 0.0, **chosen}  # fmt: skip
    return {ON: ["rhyme"], RHYME_DATABASE: None} | {f"accelerators.rhyme.{key}": x for key, x in settings.items()}


AFTER: dict[str, tuple[str, dict[str, Any]]] = {  # the earlier run, settings
    "curriculum after an earlier run": (EARLIER, CURRICULUM),
    "prompts chosen, after an earlier run": (EARLIER, CHOOSING),
    # the rule that could explain it: supervised steps on the stored answers, then plain training
    "answers of an earlier run, then plain": (EARLIER, THEN_PLAIN),
    "curriculum after a smaller policy's run": (EARLIER_SMALLER, CURRICULUM),
    "answers of a smaller policy's run, then plain": (EARLIER_SMALLER, THEN_PLAIN),
    **{f"rhyme, {words}": (EARLIER, rhyme(**chosen)) for words, chosen in SELECTIONS.items()},
}  # fmt: skip
PARTS = "rivals", "curriculum", "earlier"
NAMES = [*RIVALS, *RUNS, *AFTER]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_task_arguments(parser, "curriculum", RECORDS)
    parser.add_argument("--names", nargs="+", choices=NAMES, metavar="NAME", default=NAMES,
                        help=f"{', '.join(NAMES).replace('%', '%%')}; default: all")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="N")
    parser.add_argument(
        "--ground-records", type=Path, default=GROUND, metavar="FILE", help="of the runs without history"
    )


def after_an_earlier_run(ground: Ground, name: str, seed: int) -> None:
    """A run on a copy of the database that the earlier run, which is made unless it is there, has left."""
    earlier, settings = AFTER[name]
    left = ground.folder / f"{slug(earlier)}.db"
    own = ground.folder / f"{slug(name)}-{seed}.db"
    settings = settings | {RHYME_DATABASE if RHYME_DATABASE in settings else DATABASE: str(own)}
    if ground.known("curriculum", name, settings, seed):
        return
    policy = {"model.path": smaller_policy(ground)} if earlier == EARLIER_SMALLER else {}
    ground.run("earlier", earlier, CHOOSING | policy | {DATABASE: str(left)}, EARLIER_SEED)
    if not left.exists():
        raise UserError(f"{left} is not there: its run is in the records, so make it again with other --records")
    if not own.exists():
        shutil.copy(left, own)
    ground.run("curriculum", name, settings, seed)


def smaller_policy(ground: Ground) -> str:
    """Where a policy with a quarter of the weights is, which is made unless it is there; that of `sums` is shipped."""
    if ground.task == "sums":
        return "small"
    folder = ground.folder / "small-policy"
    if not folder.exists():
        maker = import_module(f"tools.policies.{ground.task}")
        maker.main(["--size", "small", "--output", str(folder)])
    return str(folder)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for seed in args.seeds if not args.report_only else ():
        for task in args.tasks:
            ground = Ground(task, args.output_dir, args.ground_records)
            chosen = Ground(task, args.output_dir, args.records)
            for name in dict.fromkeys([PLAIN, *args.names]):
                if name in RIVALS:
                    rival(ground, name, seed)
                elif name in AFTER:
                    after_an_earlier_run(chosen, name, seed)
                else:
                    chosen.run("curriculum", name, RUNS[name], seed, SIZES.get(name, 1.0))
    rows = [*read_rows(args.ground_records), *read_rows(args.records)]
    told = {(row["task"], row["name"], row["seed"]): row for row in rows if row["part"] in PARTS}
    write(list(told.values()), args.records.parent)
