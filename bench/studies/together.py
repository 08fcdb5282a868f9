"""The four accelerators of the papers: each alone, in pairs, all; what they are worth, what they do to each other.

    python -m bench.studies together --output-dir runs/studies/together
    python -m bench.studies together --output-dir runs/studies/together --parts short --seeds 0   # a part of it
    python -m bench.studies together --output-dir runs/studies/together --report-only

The parts: `short` and `long` are what ``compare`` runs with its defaults on either variant of the task; `pairs` are all
pairs, on short sums; `history` gives `rhyme` and `all` a database of an earlier run of the policy `small`, whose cost
is reported beside; `control` is plain training with half the prompts in a step. Seconds are CPU seconds of one
thread from the first step on, with all that accelerators do (filling caches, tracking, the gate, the database) and
without evaluations. Runs that are finished are kept, so that seeds and parts may run side by side. Writes
bench/studies/results/together.md and .png.
"""

import argparse
import time
from itertools import combinations
from pathlib import Path

import torch
from rich.console import Console

from bench.studies import PAPERS
from bench.studies.together_report import write
from python_trainer.compare import enabled_in, train_once
from python_trainer.config import Config, load_config

SINGLE = ["baseline", *PAPERS, "all"]
PAIRS = ["+".join(pair) for pair in combinations(PAPERS, 2)]
COMMON = ["save.save_steps=10", "save.save_total_limit=1", "save.save_model=false"]
SHORT = ["max_steps=40", "evaluation.eval_steps=4", "evaluation.eval_limit_during=1024"]
LONG = ["max_steps=24", "evaluation.eval_steps=6", "evaluation.eval_limit=null", "evaluation.eval_limit_during=512"]
FILL = ["model.path=small", "max_steps=60", "evaluation.eval_limit=1024", "accelerators.enabled=[rhyme]",
        "accelerators.rhyme.history_ratio=0", "accelerators.rhyme.rescue=false"]  # fmt: skip

# part -> (folder, variants); all but `long` are on short sums
PARTS: dict[str, tuple[str, list[str]]] = {
    "short": ("short", SINGLE),
    "long": ("long", SINGLE),
    "pairs": ("short", PAIRS),
    "history": ("short", ["rhyme, database", "all, database"]),
    "control": ("short", ["baseline, half the prompts"]),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/together"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"{', '.join(PARTS)}; default: all, in this order")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--report-only", action="store_true", help="train nothing, report what is there")


def enabled(variant: str) -> list[str]:
    """Accelerators of a variant of ``compare``, where `all` are the four, and not what has come later too."""
    return list(PAPERS) if variant == "all" else enabled_in(variant)


def settings(folder: str, variant: str, seed: int, database: Path) -> Config:
    """Of one run; a variant is a name of ``compare``, perhaps with what is special about it after a comma."""
    names, _, special = variant.partition(", ")
    config = ["configs/arithmetic_long.yaml", *LONG] if folder == "long" else ["configs/arithmetic.yaml", *SHORT]
    more = {
        "": [],
        "database": [f"accelerators.rhyme.database={database}", "accelerators.rhyme.record=false"],
        "half the prompts": ["rollout.prompts_per_step=16"],
    }[special]
    on = f"accelerators.enabled=[{', '.join(enabled(names))}]"
    return load_config(config[0], [*COMMON, *config[1:], on, *more, f"seed={seed}"])


def fill(database: Path, folder: Path) -> None:
    """The earlier run whose answers the database holds."""
    database.parent.mkdir(parents=True, exist_ok=True)
    config = load_config("configs/arithmetic.yaml", [*COMMON, *FILL, f"accelerators.rhyme.database={database}"])
    train_once(config, folder, [], label="earlier run of small", console=Console(), timer=time.process_time)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    database = args.output_dir / "earlier" / "history.db"
    for part in args.parts if not args.report_only else ():
        if part == "history":
            fill(database, args.output_dir / "earlier" / "run")
        home, variants = PARTS[part]
        for seed in args.seeds:
            folders = {variant: args.output_dir / home / folder_name(variant) / f"seed-{seed}"
                       for variant in SINGLE + variants}  # fmt: skip
            for variant in variants:
                config = settings(home, variant, seed, database)
                train_once(config, folders[variant], list(folders.values()), label=f"{home}, {variant} (seed {seed})",
                           console=Console(), timer=time.process_time)  # fmt: skip
    write(args.output_dir, args.results)


def folder_name(variant: str) -> str:
    return variant.replace(", ", "-").replace(" ", "-")
