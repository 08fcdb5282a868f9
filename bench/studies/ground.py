"""Ground: tasks of mixed difficulty, and what training without history makes of them.

    python -m bench.studies ground --output-dir runs/studies/ground
    python -m bench.studies ground --output-dir runs/studies/ground --tasks sums --parts tune
    python -m bench.studies ground --report-only

The parts: `tune` looks for the settings of plain GRPO, one coordinate after the other (learning rate, group size,
answers in a step, aggregation of the loss), in runs of half the length with a seed that nothing else uses; `rivals` are
what a sceptic would try first, one seed each, all with the tuned settings; `seeds` repeats plain training and the best
rival over five seeds; `longer` gives plain training twice the answers. A run's size is a number of answers, so that
settings with larger steps make fewer of them, and the learning rate rises over a share of the run. Seconds are CPU
seconds of one thread without evaluations. But for the search, runs end with pass@8 on 512 prompts.

A finished run is a row of bench/studies/results/ground.jsonl, with its settings, machine and commit, and is not made
again. Writes ground.md and ground.png beside it. Run it on a core of its own, with nothing beside it.
"""

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from bench._runner import commit, cpu_model
from bench.faults.records import read_rows
from bench.studies.ground_report import DYNAMIC_SAMPLING, PLAIN, write
from bench.studies.pass_at import pass_at_8
from python_trainer.compare import train_once
from python_trainer.config import Config, check_config, load_config
from python_trainer.engine_choice import choose_engine
from python_trainer.errors import UserError
from python_trainer.run_directory import read_metrics

RECORDS = Path(__file__).parent / "results" / "ground.jsonl"
ANSWERS = {"sums": 15_360, "lattice_paths": 15_360, "countdown": 15_360}  # of a run
SHORT = 0.5  # of a run's answers are what one of the search gets
WARMUP = 0.04  # share of the steps
EVALUATIONS = 12  # over a run
TUNING_SEED = 100
SEEDS = (0, 1, 2, 3, 4)
RIVALS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    DYNAMIC_SAMPLING: {"rollout.dynamic_sampling": True},
    "by 1 / length": {"rollout.prompt_order": "inverse_length"},
    "shortest first": {"rollout.prompt_order": "shortest_first"},
    "shorter half": {"rollout.prompt_order": "shorter_half"},
}
START: dict[str, Any] = {"learning rate": 2e-4, "group": 8, "answers a step": 128, "loss": "dapo"}
# coordinate -> what it tries, in this order; rates are multiples of the best so far
SEARCH: list[tuple[str, list[Any]]] = [
    ("learning rate", [0.5, 1.0, 2.0]),
    ("group", [4, 8, 16]),
    ("answers a step", [64, 128, 256]),
    ("loss", ["dapo", "grpo", "dr_grpo"]),
    ("learning rate", [0.7, 1.0, 1.4]),
    ("learning rate", [1.0, 1.4]),
    ("answers a step", [32, 64]),  # beyond the edge, as far as 16 runs go
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_task_arguments(parser, "ground", RECORDS)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"{', '.join(PARTS)}; default: all, in this order")  # fmt: skip


def add_task_arguments(parser: argparse.ArgumentParser, study: str, records: Path) -> None:
    """What studies over these tasks have in common."""
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies") / study, metavar="DIR")
    parser.add_argument("--records", type=Path, default=records, metavar="FILE")
    parser.add_argument("--tasks", nargs="+", choices=list(ANSWERS), default=list(ANSWERS), metavar="TASK",
                        help=f"{', '.join(ANSWERS)}; default: all")  # fmt: skip
    parser.add_argument("--report-only", action="store_true", help="train nothing, report the records that are there")


class Ground:
    """One task's runs; what was measured before is read from the records."""

    def __init__(self, task: str, folder: Path, records: Path):
        self.task, self.folder, self.records = task, folder / task, records

    def run(self, part: str, name: str, changes: Mapping[str, Any], seed: int, size: float = 1.0) -> dict[str, Any]:
        """The record of a run with these settings, made unless it is there.

        Args:
            size: of the task's answers.
        """
        if found := self.known(part, name, changes, seed, size):
            return found
        config = self.config(changes, seed, size)
        key = {"task": self.task, "part": part, "name": name, "seed": seed}
        folder = self.folder / part / slug(name) / f"seed-{seed}"
        label = f"{self.task}, {name} (seed {seed})"
        # with the same accuracy at the start; earlier runs may be of another policy
        siblings = [] if part == "earlier" else sorted(self.folder.glob(f"*/*/seed-{seed}"))
        train_once(config, folder, siblings, label=label, console=Console(), timer=time.process_time)
        row = key | {"settings": config.model_dump(mode="json")} | outcome(folder)
        if config.evaluation.eval_limit is None:
            row["pass@8"] = pass_at_8(folder, config)
        self.records.parent.mkdir(parents=True, exist_ok=True)
        with self.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def known(
        self, part: str, name: str, changes: Mapping[str, Any], seed: int, size: float = 1.0
    ) -> dict[str, Any] | None:
        """The record of a run with these settings; None: there is none."""
        config = self.config(changes, seed, size)
        key = {"task": self.task, "part": part, "name": name, "seed": seed}
        for row in read_rows(self.records):
            if {field: row.get(field) for field in key} == key and is_of(row, config):
                return row
        return None

    def config(self, changes: Mapping[str, Any], seed: int, size: float) -> Config:
        """The task's configuration with these changes, in as many steps as use up the answers."""
        path = f"configs/{self.task}.yaml"
        rollout = load_config(path, as_overrides(changes)).rollout
        steps = round(size * ANSWERS[self.task] / (rollout.prompts_per_step * rollout.num_generations))
        ours = {
            "seed": seed,
            "max_steps": steps,
            "optimizer.warmup_steps": max(1, round(WARMUP * steps)),
            "evaluation.eval_steps": max(1, round(steps / (EVALUATIONS * size))),
            "evaluation.eval_limit_during": 512,
            "save.save_steps": max(1, steps // 6),
            "save.save_total_limit": 1,
            "save.save_model": False,
        }
        # unless a database or a limit is named
        usual = {"accelerators.curriculum.database": None, "evaluation.eval_limit": None}
        return load_config(path, as_overrides({**usual, **changes, **ours}))

    def tune(self) -> dict[str, Any]:
        """The best settings of plain training, a coordinate at a time; all that was tried is in the records."""
        best = START
        for name, values in SEARCH:
            values = [float(f"{value * best[name]:.2g}") for value in values] if name == "learning rate" else values
            points = [best | {name: value} for value in values]
            best = max(
                points, key=lambda point: score(self.run("tune", words(point), settings_of(point), TUNING_SEED, SHORT))
            )
        return best


def is_of(row: Mapping[str, Any], config: Config) -> bool:
    """Whether a record is of a run with these settings; those that came later have their default there.

    But for the database of `curriculum`, which runs had none of before there was a setting.
    """
    sections = row["settings"]["accelerators"]
    if "curriculum" in sections:
        sections = sections | {"curriculum": {"database": None} | sections["curriculum"]}
    try:
        return in_use(check_config(row["settings"] | {"accelerators": sections}, source="a record")) == in_use(config)
    except UserError:  # with a setting that is no more
        return False


def in_use(config: Config) -> dict[str, Any]:
    """Its settings, without those of accelerators that are off, of what is read from no database, and where one is."""
    settings = choose_engine(config)[0].model_dump(mode="json")
    own = settings["accelerators"]
    on = {accelerator.name: own[accelerator.name] for accelerator in config.accelerators.chosen()}
    for name, section in on.items():
        if section.get("database") is not None:
            on[name] = section | {"database": "some"}
        else:  # nothing is rehearsed
            on[name] = {key: value for key, value in section.items() if not key.startswith("rehears")}
    return settings | {"accelerators": on | {"enabled": own["enabled"]}}


def slug(name: str) -> str:
    """Of a name, for a file."""
    return re.sub(r"[^a-z0-9.]+", "-", name)


def words(point: Mapping[str, Any]) -> str:
    """``learning rate 0.0002, group 8, answers a step 128, loss dapo``."""
    return ", ".join(f"{name} {value}" for name, value in point.items())


def settings_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a point of the search stands for."""
    return {
        "optimizer.learning_rate": point["learning rate"],
        "rollout.num_generations": point["group"],
        "rollout.prompts_per_step": point["answers a step"] // point["group"],
        "algorithm.loss_type": point["loss"],
        "evaluation.eval_limit": 512,
    }


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def score(row: Mapping[str, Any]) -> float:
    """What tuning goes by: the mean accuracy over the second half of the run, which is steadier than its end."""
    return fmean(accuracy for *_, accuracy in row["curve"][len(row["curve"]) // 2 :])


def no_spread(row: Mapping[str, Any]) -> float:
    """Share of the groups that were answered for nothing; dynamic sampling trains on none of them."""
    return 1 - row["sampling/kept_groups"] if "sampling/kept_groups" in row else row["frac_reward_zero_std"]


def outcome(folder: Path) -> dict[str, Any]:
    """What came of a finished run."""
    rows = read_metrics(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    steps = [row for row in rows if row["step"]]
    curve = [
        [row["step"], round(row["time/training_s"], 2), int(row["total/generated_tokens"]), row["eval/accuracy"]]
        for row in rows
        if "eval/accuracy" in row
    ]
    return {
        "steps": len(steps),
        "cpu_s": round(steps[-1]["time/training_s"], 1),
        "rollout_s": round(summary["rollout_s"], 1),
        "train_s": round(summary["train_s"], 1),
        "generated_tokens": int(steps[-1]["total/generated_tokens"]),
        "curve": curve,  # of step, CPU seconds, generated tokens, accuracy
        "start": summary["eval_accuracy_start"],
        "final": summary["eval_accuracy_final"],
        "without_spread": [round(no_spread(row), 4) for row in steps],  # share of groups, by step
        **means(steps, "rhyme/"),
        "torch": torch.__version__,
        "cpu": cpu_model(),
        "commit": commit(),
    }


def means(steps: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, float]:
    """Over the steps that have them, of all metrics whose names begin so."""
    names = dict.fromkeys(name for row in steps for name in row if name.startswith(prefix))
    return {name: round(fmean(row[name] for row in steps if name in row), 4) for name in names}


def tune(ground: Ground) -> None:
    print(f"{ground.task}: {words(ground.tune())}")


def rival(ground: Ground, name: str, seed: int) -> dict[str, Any]:
    """The record of one of the rivals."""
    return ground.run("rivals", name, RIVALS[name], seed)


def rivals(ground: Ground) -> None:
    for name in RIVALS:
        rival(ground, name, SEEDS[0])


def seeds(ground: Ground) -> None:
    first = {name: rival(ground, name, SEEDS[0]) for name in RIVALS}
    best = max((name for name in RIVALS if name != PLAIN), key=lambda name: score(first[name]))
    for seed in SEEDS[1:]:
        for name in (PLAIN, best):
            rival(ground, name, seed)


def longer(ground: Ground) -> None:
    ground.run("longer", PLAIN, {}, SEEDS[0], 2.0)


PARTS = {"tune": tune, "rivals": rivals, "seeds": seeds, "longer": longer}


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for part in args.parts if not args.report_only else ():
        for task in args.tasks:
            PARTS[part](Ground(task, args.output_dir, args.records))
    write(read_rows(args.records), args.records.parent)
