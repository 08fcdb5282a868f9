"""What the commands of the command line do; heavy modules are imported when the arguments are known to be right."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from python_trainer.errors import UserError, found_by_each, tell
from python_trainer.files import check_output_dir

if TYPE_CHECKING:
    from python_trainer.config import Config


def run_report(args: argparse.Namespace) -> None:
    from python_trainer.report.write import report

    report(args.folders)


def run_compare(args: argparse.Namespace) -> None:
    from python_trainer.compare import compare
    from python_trainer.config import load_config

    config = load_config(args.config, args.overrides)
    check_files(config)
    check_output_dir(args.output_dir)
    tell_of_load()
    compare(config, args.output_dir, variants=args.variants.split(","), seeds=args.seeds)


def run_train(args: argparse.Namespace) -> None:
    config = config_of(args)
    from python_trainer.distributed import start
    from python_trainer.report.write import report
    from python_trainer.run import Trainer

    if args.resume:
        tell_of_resuming(args.output_dir, config)
    with start(config.parallel, config.model.device) as ranks:
        Trainer(config, args.output_dir, resume=args.resume, ranks=ranks).run()
    if ranks.rank == 0:
        report([args.output_dir])


def config_of(args: argparse.Namespace) -> "Config":
    """Settings of a run in one folder; mistakes in them, or in the folder, come before torch, which takes seconds."""
    from python_trainer.config import load_config

    with found_by_each():
        config = load_config(args.config, args.overrides)
        check_files(config)
        check_output_dir(args.output_dir)
        if not args.resume:
            from python_trainer.run_directory import check_new

            check_new(args.output_dir)
    tell_of_load()
    return config


def check_files(config: "Config") -> None:
    """Raises UserError for a file or folder in the settings that is not there."""
    from python_trainer.model.shipped import policy_folder

    policy_folder(config.model.path, config.model.revision)
    for name, value in config.task:
        if isinstance(value, Path) and not value.exists():
            raise UserError(f"task.{name}: there is no file {value}")


def tell_of_load() -> None:
    """Says so where other programs have more to do than there are cores."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1  # both of the whole machine, within a container too
    if load > cores:
        tell(
            f"note: the load is {load:.1f} on {cores} cores: other programs are at work, and training is slower by that"
        )


def run_sft(args: argparse.Namespace) -> None:
    config = config_of(args)
    from python_trainer.sft import Sft

    if args.resume:
        tell_of_resuming(args.output_dir, config)
    summary = Sft(config, args.output_dir, resume=args.resume).run()
    losses = [
        summary[f"{part}loss_{when}"] for part, when in (("", "final"), ("held_out_", "start"), ("held_out_", "final"))
    ]
    said = "final loss {}, held out {} -> {}".format(*("-" if x is None else f"{x:.3f}" for x in losses))
    print(f"{said}; the model is in {args.output_dir / 'model'}")


def run_probe(args: argparse.Namespace) -> None:
    from python_trainer.config import load_config

    config = load_config(args.config, [*args.overrides, "accelerators.enabled=[]"])
    from python_trainer.probe import run

    limits = {name: getattr(args, name) for name in ("seconds", "prompts", "tries")}
    run(config, json_file=args.json, plot=args.plot, **limits)


def tell_of_resuming(folder: Path, config: "Config") -> None:
    """What a mistyped folder or a forgotten setting would hide."""
    from python_trainer.checkpoint import list_checkpoints
    from python_trainer.config import changed_settings

    if not list_checkpoints(folder / "checkpoints"):
        tell(f"{folder} has no checkpoint to resume: training begins with the first step")
    elif changed := changed_settings(folder, config):
        tell(f"resumed with other settings than before: {', '.join(changed)}")
