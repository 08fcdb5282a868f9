"""The same training with different accelerators: ``python -m python_trainer compare``."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from python_trainer.accelerators import ACCELERATORS
from python_trainer.config import Config, changed_settings, check_config, dump_config
from python_trainer.errors import UserError
from python_trainer.report.page import report
from python_trainer.report.runs import BASELINE
from python_trainer.run_directory import load_evaluations, read_metrics

if TYPE_CHECKING:
    from python_trainer.evaluation import Evaluated


def enabled_in(variant: str) -> list[str]:
    """Accelerators of a variant: ``baseline``, ``all``, or names and ``module:Class`` joined by ``+``."""
    if variant == BASELINE:
        return []
    if variant == "all":
        return ACCELERATORS.names()
    names = variant.split("+")
    for name in names:
        if name not in ACCELERATORS.names() and ":" not in name:  # whose module is looked for with the settings
            allowed = ", ".join([BASELINE, *ACCELERATORS.choices, "all"])
            raise UserError(f"--variants must hold names out of {allowed} (or several joined by +), got {name!r}")
    return names


def compare(
    config: Config, output_dir: Path, *, variants: Sequence[str], seeds: int, console: Console | None = None
) -> None:
    """Trains every variant on as many seeds, from the configuration's own on, and reports.

    A finished run is kept, an interrupted one goes on from its newest checkpoint. All variants of a seed begin with the
    same policy, prompts and noise, so the evaluation before the first step is done once per seed.

    Raises:
        UserError: an unknown variant, or a run in ``output_dir`` that was made with other settings.
    """
    if seeds < 1:
        raise UserError(f"--seeds must be at least 1, got {seeds}")
    if config.parallel != "none":
        raise UserError(f"compare runs in one process: parallel must be none, got {config.parallel}")
    plans: list[tuple[str, Path, Config]] = []
    for seed in range(seeds):
        for variant in dict.fromkeys(variants):
            values = config.model_dump(mode="json")
            values["seed"] = config.seed + seed
            values["accelerators"] = config.accelerators.with_enabled(enabled_in(variant))
            folder = output_dir / variant / f"seed-{config.seed + seed}"
            plans.append((variant, folder, check_config(values, source=f"variant {variant}")))
    for _, folder, wanted in plans:
        check_same(folder, wanted)
    for number, (variant, folder, wanted) in enumerate(plans):
        label = f"{variant} (seed {wanted.seed}, run {number + 1} of {len(plans)})"
        siblings = [other for _, other, plan in plans if plan.seed == wanted.seed]
        train_once(wanted, folder, siblings, label=label, console=console)
    report([output_dir])


def train_once(
    config: Config,
    folder: Path,
    siblings: Sequence[Path],
    *,
    label: str,
    console: Console | None = None,
    timer: Callable[[], float] = time.perf_counter,
) -> None:
    """One run, unless it is finished; an interrupted one goes on from its newest checkpoint.

    Args:
        siblings: folders of runs with the same policy, task and seed, finished or not; the evaluation before the first
            step is taken from one that has it.
        timer: the clock of :class:`~python_trainer.trainer.Trainer`.

    Raises:
        UserError: ``folder`` holds a run with other settings.
    """
    check_same(folder, config)
    if not finished(folder):
        from python_trainer.trainer import Trainer  # seconds, which a mistake in the arguments need not cost

        start = next((found for found in map(known_start, siblings) if found is not None), None)
        Trainer(config, folder, resume=True, label=label, console=console, timer=timer, start=start).run()


def known_start(folder: Path) -> "Evaluated | None":
    """The evaluation before the first step, as a run has kept it; None: it has not come that far."""
    answers, rows = load_evaluations(folder).get("start"), read_metrics(folder)
    if answers is None or not rows:
        return None
    found = {name: value for name, value in rows[0].items() if name.startswith("eval/") and value is not None}
    return found, answers.tolist()


def finished(folder: Path) -> bool:
    """Whether a run came to its end."""
    path = folder / "summary.json"
    return path.exists() and "eval_accuracy_final" in json.loads(path.read_text(encoding="utf-8"))


def check_same(folder: Path, wanted: Config) -> None:
    """Raises when the folder holds a run with other settings."""
    path = folder / "config.yaml"
    if path.exists() and path.read_text(encoding="utf-8") != dump_config(wanted):
        changed = ", ".join(changed_settings(folder, wanted)) or "made by another version"
        raise UserError(
            f"{folder} holds a run with other settings ({changed}): choose another --output-dir, or remove it"
        )
