"""The command line: ``python -m python_trainer train | compare | report | extrapolate | history``."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from python_trainer.errors import Interrupted, UserError

if TYPE_CHECKING:
    from python_trainer.config import Config

EPILOG = """\
examples:
  python -m python_trainer train --config configs/arithmetic.yaml --output-dir runs/first
  python -m python_trainer train --config configs/arithmetic.yaml --output-dir runs/rpo \\
      --set 'accelerators.enabled=[rpo]'
  python -m python_trainer train --config configs/arithmetic.yaml --output-dir runs/first --resume \\
      --set max_steps=120 max_seconds=null
  python -m python_trainer compare --config configs/arithmetic.yaml --variants baseline,rpo,all --seeds 3 \\
      --output-dir runs/compare
  python -m python_trainer report runs/compare
  python -m python_trainer report runs/first runs/rpo
  python -m python_trainer train --config configs/arithmetic.yaml --output-dir runs/kept \\
      --set save.save_steps=5 save.save_total_limit=12
  python -m python_trainer extrapolate runs/kept --output-dir runs/kept/extrapolated
  python -m python_trainer extrapolate out/checkpoint-10 out/checkpoint-20 out/checkpoint-30 --base models/base \\
      --config configs/gsm8k.yaml --set task.gate_path=gate.jsonl --output-dir out/extrapolated
  python -m python_trainer history runs/history.db --run 1
"""

# modules of the extra "train"; some are used at the end of a run only, which is too late to miss them
NEEDED = (
    "jinja2",
    "matplotlib",
    "pydantic",
    "rich",
    "safetensors",
    "sqlalchemy",
    "tensorboard",
    "transformers",
    "yaml",
)


def check_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"python_trainer needs packages that {sys.executable} lacks: {', '.join(missing)}; in the clone "
            "`pip install --no-build-isolation '.[train]'` brings them"
        )


def settings_help() -> str:
    """All settings, from the configuration's own documentation."""
    check_packages()
    from python_trainer.config import describe_settings

    lines = ["settings (in the YAML file, or by --set key=value; values are YAML):"]
    for key, kind, default, text in describe_settings():
        lines += [f"  {key}: {kind} = {default}", f"      {text}"]
    return "\n".join(lines)


class SettingsHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        try:
            print(settings_help())
        except UserError as error:
            parser.error(str(error))
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m python_trainer", formatter_class=raw, epilog=EPILOG,
        description="Trains language models on tasks with checkable answers (GRPO and relatives).",
    )  # fmt: skip
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="train | compare | report | extrapolate | history"
    )

    train = commands.add_parser(
        "train", formatter_class=raw, help="one training run", epilog=EPILOG,
        description="One training run. OUTPUT_DIR gets config.yaml (all settings as used), metrics.jsonl (one row a "
        "step), samples.jsonl\n(a few answers of some steps), summary.json, report.html, checkpoints/, tensorboard/ "
        "and model/ (the trained policy,\nHugging Face format).",
    )  # fmt: skip
    compare = commands.add_parser(
        "compare", formatter_class=raw, help="the same training with and without accelerators", epilog=EPILOG,
        description="Trains every variant on every seed, one after the other, into OUTPUT_DIR/VARIANT/seed-N; then "
        "prints a table and\ndraws accuracy over wall time. What is finished is not run again, what was interrupted "
        "goes on.",
    )  # fmt: skip
    for command in (train, compare):
        command.add_argument(
            "--config", required=True, metavar="FILE.yaml", help="settings; what is not in it is default"
        )
        command.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
                             help="change settings, for example optimizer.learning_rate=1e-5")  # fmt: skip
        command.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="where the results go")
        command.add_argument("--help-settings", nargs=0, action=SettingsHelp, help="list all settings, and leave")
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in OUTPUT_DIR")
    compare.add_argument(
        "--variants", default="baseline,all", metavar="A,B,...",
        help="comma-separated: baseline (no accelerator), rhyme, rpo, drafts, alpha, all, or several joined by + "
             "(rhyme+drafts); default: baseline,all",
    )  # fmt: skip
    compare.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="that many, from the config's seed on (default: 1)"
    )

    report = commands.add_parser(
        "report", formatter_class=raw, help="table, curves and answers of finished runs", epilog=EPILOG,
        description="Prints the table of all runs under the folders, draws accuracy.png in the first, and writes "
        "report.html in each: one page\nwith the table, settings that differ, curves of every metric, sample answers "
        "and versions, all runs side by side. It\nopens in any browser and needs no network: copy or mail the file. "
        "To compare runs, name them: report runs/a runs/b.",
    )  # fmt: skip
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run, or a folder with runs in it")

    offline = commands.add_parser(
        "extrapolate", formatter_class=raw, help="predict weights from checkpoints, behind a gate", epilog=EPILOG,
        description="Follows the weights over checkpoints, predicts where they are heading (AlphaRL), and writes the "
        "prediction if it answers\nsignificantly more of the task's held-out gate prompts right than the last "
        "checkpoint. Three checkpoints are needed at\nleast (a run keeps save.save_total_limit), and prompts that "
        "training has not seen (task.gate_path; the arithmetic task\nhas them). The settings are those of the "
        "accelerator alpha, for example:\n--set accelerators.alpha.predictor=full accelerators.alpha.horizon=1.5",
    )  # fmt: skip
    offline.add_argument("folders", nargs="+", type=Path, metavar="DIR",
                         help="a run directory, or checkpoints in Hugging Face format, oldest first")  # fmt: skip
    offline.add_argument("--base", type=Path, metavar="DIR", help="the model that training began with (not for a run)")
    offline.add_argument("--accuracy", type=float, nargs="+", metavar="A", help="of each checkpoint (not for a run)")
    offline.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="task and generation for the gate (not for a run)"
    )
    offline.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
                         help="change settings")  # fmt: skip
    offline.add_argument("--no-gate", action="store_true", help="write the prediction although nothing has tested it")
    offline.add_argument(
        "--output-dir", required=True, type=Path, metavar="DIR", help="new folder, Hugging Face format"
    )

    history = commands.add_parser(
        "history", formatter_class=raw, help="look into a retrospective database", epilog=EPILOG,
        description="Lists the runs in the database that accelerators.rhyme.database names, draws how their stages "
        "rhyme, and\nshows the best matches of one run.",
    )  # fmt: skip
    history.add_argument("url", metavar="URL", help="a path, sqlite:/// or postgresql:// URL")
    history.add_argument("--run", type=int, metavar="ID", help="show what each stage of this run rhymes with")
    history.add_argument("--picture", type=Path, metavar="FILE.png", help="default: rhyme.png beside a SQLite file")
    history.add_argument("--window", type=int, default=8, metavar="N", help="steps of a stage (default: 8)")
    return parser


def run(args: argparse.Namespace) -> None:
    check_packages()
    if args.command == "report":
        from python_trainer.report.tables import report

        return report(args.folders)
    if args.command == "extrapolate":
        from python_trainer.extrapolate import extrapolate_folders

        return extrapolate_folders(
            args.folders, args.output_dir, base=args.base, accuracy=args.accuracy, config_path=args.config,
            overrides=args.overrides, gated=not args.no_gate,
        )  # fmt: skip
    if args.command == "history":
        from python_trainer.accelerators.rhyme.browse import history

        return history(args.url, run=args.run, picture=args.picture, window=args.window)
    from python_trainer.config import load_config

    config = load_config(args.config, args.overrides)
    if args.command == "compare":
        from python_trainer.compare import compare

        return compare(config, args.output_dir, variants=args.variants.split(","), seeds=args.seeds)
    from python_trainer.distributed import start
    from python_trainer.report.tables import report
    from python_trainer.trainer import Trainer

    if args.resume:
        tell_of_resuming(args.output_dir, config)
    with start(config) as ranks:
        Trainer(config, args.output_dir, resume=args.resume, ranks=ranks).run()
    if ranks.rank == 0:
        report([args.output_dir])


def tell_of_resuming(folder: Path, config: "Config") -> None:
    """What a mistyped folder or a forgotten setting would hide."""
    from python_trainer.checkpoint import list_checkpoints
    from python_trainer.config import changed_settings

    if not list_checkpoints(folder / "checkpoints"):
        tell(f"{folder} has no checkpoint to resume: training begins with the first step")
    elif changed := changed_settings(folder, config):
        tell(f"resumed with other settings than before: {', '.join(changed)}")


def how_to_go_on(args: argparse.Namespace) -> str:
    """What becomes of a run that was interrupted; empty for commands that have none."""
    if args.command == "compare":
        return "; the same command keeps what is finished and goes on with the rest"
    if args.command != "train":
        return ""
    # list_checkpoints would import torch, and that may be what was interrupted
    if not any((args.output_dir / "checkpoints").glob("step-*")):
        return "; there is no checkpoint to go on from"
    return f"; the same command{'' if args.resume else ' with --resume'} goes on from the newest checkpoint"


def tell(message: str) -> None:
    """Once, whatever the number of processes that torchrun started."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(message, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, also for a run that was asked to stop and has saved; 2 after one line on what the user can fix."""
    args = make_parser().parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        run(args)
    except UserError as error:
        tell(f"error: {' '.join(str(error).split())}")
        return 2
    except Interrupted as stopped:
        tell(f"{stopped}{how_to_go_on(args)}")
    except KeyboardInterrupt:
        print(f"interrupted{how_to_go_on(args)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
