"""The same training with different accelerators: ``python -m python_trainer compare``."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from python_trainer.accelerators import ACCELERATORS
from python_trainer.command_line.report import BASELINE, report
from python_trainer.config import Config, changed_settings, dump_config, load_config
from python_trainer.errors import UserError


def parse_variant(variant: str) -> tuple[list[str], int | None]:
    """Return the accelerators of a variant and its number of steps; None: that of the configuration.

    A variant is ``baseline``, ``all``, or names and ``module:Class`` joined by ``+``; ``@`` and a number may follow.
    """
    accelerators, at, steps = variant.partition("@")
    if at and not (steps.isdecimal() and int(steps) > 0):
        raise UserError(f"--variants must hold a number of steps >= 1 after @, got {variant!r}")
    names = {BASELINE: [], "all": ACCELERATORS.names}.get(accelerators, accelerators.split("+"))
    for name in names:
        if name not in ACCELERATORS.names and ":" not in name:  # whose module is looked for with the settings
            allowed = f"{BASELINE}, all, or names out of {', '.join(ACCELERATORS.choices)} joined by +"
            raise UserError(f"--variants must hold {allowed}, got {accelerators!r}")
    return names, int(steps) if at else None


def compare(
    config: Config, output_dir: Path, *, variants: Sequence[str], seeds: int, console: Console | None = None
) -> None:
    """Train every variant on as many seeds, from the configuration's own on, and report.

    It keeps finished runs and continues interrupted ones. A seed's variants begin with the same policy, prompts, noise.

    Raises:
        UserError: an unknown variant, or a run in ``output_dir`` that was made with other settings.
    """
    if seeds < 1:
        raise UserError(f"--seeds must be at least 1, got {seeds}")
    if config.parallel != "none":
        raise UserError(f"compare runs in one process: parallel must be none, got {config.parallel}")
    plans: list[tuple[str, Path, Config]] = []  # of the runs that are not finished
    for seed in range(seeds):
        for variant in dict.fromkeys(variants):
            values = config.model_dump(mode="json")
            values["seed"] = config.seed + seed
            accelerators, steps = parse_variant(variant)
            values["accelerators"] = config.accelerators.with_enabled(accelerators)
            values["max_steps"] = steps or config.max_steps
            folder = output_dir / variant / f"seed-{config.seed + seed}"
            run_config = load_config(values)
            path = folder / "config.yaml"
            if path.exists() and path.read_text(encoding="utf-8") != dump_config(run_config):
                changed = ", ".join(changed_settings(folder, run_config)) or "made by another version"
                raise UserError(
                    f"{folder} holds a run with other settings ({changed}): choose another --output-dir, or remove it"
                )
            if not (folder / "summary.json").exists():
                plans.append((variant, folder, run_config))
    if used := [settings for _, _, run_config in plans for settings in run_config.accelerators.chosen()]:
        task = config.task.load()
        for settings in used:
            settings.check_task(task)  # before any variant trains
        del task  # with its reward models
    for number, (variant, folder, run_config) in enumerate(plans):
        from python_trainer.trainer import Trainer  # takes seconds, which wrong arguments need not cost

        label = f"{variant} (seed {run_config.seed}, run {number + 1} of {len(plans)})"
        Trainer(run_config, folder, resume=True, label=label, console=console).run()
    report([output_dir])
