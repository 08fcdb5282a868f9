"""The command line: ``python -m python_trainer --help``; commands of its own, and those of accelerators."""

import argparse
import errno
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_trainer.errors import Interrupted, NotFinite, UserError, hide_passwords
from python_trainer.files import check_output_dir
from python_trainer.registry import load

if TYPE_CHECKING:
    from python_trainer.config import Config

PROGRAM = "python -m python_trainer"
EXAMPLES = [
    "train --config configs/arithmetic.yaml --output-dir runs/first",
    "train --config configs/arithmetic.yaml --output-dir runs/{name} \\\n      --set 'accelerators.enabled=[{name}]'",
    "train --config configs/arithmetic.yaml --output-dir runs/first --resume \\\n"
    "      --set max_steps=120 max_seconds=null",
    "compare --config configs/arithmetic.yaml --variants baseline,{name},all --seeds 3 \\\n"
    "      --output-dir runs/compare",
    "report runs/compare",
    "report runs/first runs/{name}",
]

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)  # nothing that the trainer can help

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


def check_packages(needed: Sequence[str] = NEEDED) -> None:
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
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
            print(settings_help(), flush=True)
        except UserError as error:
            parser.error(str(error))
        parser.exit()


class Parsers:
    """The parser of the command line, to which commands are added one by one, each with its examples."""

    def __init__(self) -> None:
        self.whole = argparse.ArgumentParser(
            prog=PROGRAM,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            description="Trains language models on tasks with checkable answers (GRPO and relatives).",
        )
        self._commands = self.whole.add_subparsers(dest="command", required=True)
        self._examples: list[str] = []

    def add(self, name: str, *, examples: Sequence[str] = (), **options: Any) -> argparse.ArgumentParser:
        """The parser of a command; ``examples`` are what comes after the name of the program."""
        self._examples += [f"  {PROGRAM} {example}" for example in examples]
        return self._commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def finished(self) -> argparse.ArgumentParser:
        """With the names of all commands, and all examples under the help of each."""
        self._commands.metavar = " | ".join(self._commands.choices)
        for parser in (self.whole, *self._commands.choices.values()):
            parser.epilog = "\n".join(["examples:", *self._examples])
        return self.whole


def make_parser() -> argparse.ArgumentParser:
    check_packages(["pydantic"])
    from python_trainer.accelerators import ACCELERATORS, registered

    names = ACCELERATORS.names()
    parsers = Parsers()
    add_own_commands(parsers, names)
    for accelerator in registered():
        if accelerator.command is not None:
            load(accelerator.command)(parsers.add)
    return parsers.finished()


def add_own_commands(parsers: Parsers, names: Sequence[str]) -> None:
    """``train``, ``compare``, ``sft``, ``probe``, ``export`` and ``report``, for accelerators of these names."""
    examples = [example.format(name=names[0]) for example in EXAMPLES]
    train = parsers.add(
        "train",
        examples=examples,
        help="one training run",
        description="One training run. OUTPUT_DIR gets config.yaml (all settings as used), metrics.jsonl (one row a "
        "step), samples.jsonl\n(a few answers of some steps), summary.json, report.html, checkpoints/, tensorboard/ "
        "and model/ (the trained policy,\nHugging Face format).",
    )
    compare = parsers.add(
        "compare",
        help="the same training with and without accelerators",
        description="Trains every variant on every seed, one after the other, into OUTPUT_DIR/VARIANT/seed-N; then "
        "prints a table and\ndraws accuracy over wall time. What is finished is not run again, what was interrupted "
        "goes on.",
    )
    sft = parsers.add(
        "sft",
        help="supervised steps on reference answers",
        description="Supervised steps on the reference answers of the task's training examples (settings: section "
        "sft), for models that hardly ever\nanswer right. OUTPUT_DIR/model can then be the model.path of train.",
    )
    probe = parsers.add(
        "probe",
        help="how hard the prompts are, where time would go, what could pay",
        description="Answers some training prompts and makes one update, in about a minute: how often answers are "
        "right, how many groups\nteach anything, seconds of a step, memory, and how much each accelerator can gain at "
        "most (docs/probe.md). Nothing is kept.",
    )
    for command in (train, compare, sft, probe):
        command.add_argument(
            "--config", required=True, metavar="FILE.yaml", help="settings; what is not in it is default"
        )
        command.add_argument(
            "--set",
            dest="overrides",
            nargs="+",
            action="extend",
            default=[],
            metavar="KEY=VALUE",
            help="change settings, for example optimizer.learning_rate=1e-5",
        )
        if command is not probe:
            command.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="where the results go")
        command.add_argument("--help-settings", nargs=0, action=SettingsHelp, help="list all settings, and leave")
    train.set_defaults(call=run_train)
    compare.set_defaults(call=run_compare)
    sft.set_defaults(call=run_sft)
    probe.set_defaults(call=run_probe)
    probe.add_argument("--seconds", type=float, default=60.0, help="about how long, loading not counted (default: 60)")
    probe.add_argument("--prompts", type=int, default=1 << 30, metavar="N", help="most prompts to ask")
    probe.add_argument("--tries", type=int, metavar="N", help="answers to each (default: rollout.num_generations)")
    probe.add_argument("--json", type=Path, metavar="FILE", help="write all findings there, p of every prompt too")
    probe.add_argument("--plot", type=Path, metavar="PNG", help="draw p, lengths and seconds")
    for command in (train, sft):
        command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in OUTPUT_DIR")
    compare.add_argument(
        "--variants",
        default="baseline,all",
        metavar="A,B,...",
        help=f"comma-separated: baseline (no accelerator), {', '.join(names)}, all, or several joined by + "
        f"({'+'.join(names[:2])}); default: baseline,all",
    )
    compare.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="that many, from the config's seed on (default: 1)"
    )

    export = parsers.add(
        "export",
        examples=["export runs/first --checkpoint best --output-dir models/first"],
        help="a checkpoint as a model",
        description="Writes a checkpoint of a run, finished or interrupted, in Hugging Face format, with a model card.",
    )
    export.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    export.add_argument("--checkpoint", metavar="N | best", help="of which step (default: the newest)")
    export.add_argument("--output-dir", type=Path, metavar="DIR", help="a new folder (default: RUN/export)")
    export.add_argument("--adapter", action="store_true", help="the adapter (PEFT) of a run with model.lora alone")
    export.add_argument("--push", metavar="REPO", help="upload it to the Hugging Face Hub; a new repository is private")
    export.set_defaults(call="python_trainer.export:run")

    report = parsers.add(
        "report",
        help="verdict, table, curves and answers of runs, finished or not",
        description="Prints the table of all runs under the folders, draws accuracy.png in the first, and writes "
        "report.html in each: one page\nwith a sentence on each variant, the curve of accuracy, the table, curves of "
        "every metric, sample answers and\nsettings that differ, all runs side by side. It opens in "
        "any browser and needs no network: copy or mail the file. "
        "To compare runs, name them: report runs/a runs/b.",
    )
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run, or a folder with runs in it")
    report.set_defaults(call=run_report)


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
    from python_trainer.config import load_config

    config = load_config(args.config, args.overrides)
    check_files(config)
    check_output_dir(args.output_dir)
    if not args.resume:
        from python_trainer.run_directory import check_new

        check_new(args.output_dir)
    tell_of_load()
    from python_trainer.distributed import start  # torch, which takes seconds: all mistakes above come before it
    from python_trainer.report.write import report
    from python_trainer.run import Trainer

    if args.resume:
        tell_of_resuming(args.output_dir, config)
    with start(config.parallel, config.model.device) as ranks:
        Trainer(config, args.output_dir, resume=args.resume, ranks=ranks).run()
    if ranks.rank == 0:
        report([args.output_dir])


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
    from python_trainer.config import load_config

    config = load_config(args.config, args.overrides)
    from python_trainer.sft import Sft

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


def how_to_go_on(args: argparse.Namespace) -> str:
    """What becomes of a run that was interrupted; empty for commands that have none."""
    if args.command == "compare":
        return "; the same command keeps what is finished and goes on with the rest"
    if args.command not in ("train", "sft"):
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
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args = argparse.Namespace(command=None)
    try:
        make_parser().parse_args(argv, args)
        check_packages()
        call = load(args.call) if isinstance(args.call, str) else args.call
        call(args)
        sys.stdout.flush()
    except (UserError, NotFinite) as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        tell(f"error: {hide_passwords(' '.join(said.split()))}")
        return 2
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        tell(f"error: {error}; {'; '.join(getattr(error, '__notes__', ()))}".rstrip("; "))
        return 2
    except Interrupted as stopped:
        tell(f"{stopped}{how_to_go_on(args)}")
    except KeyboardInterrupt:
        print(f"interrupted{how_to_go_on(args)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
