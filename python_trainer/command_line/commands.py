"""The commands of the command line. Slow modules are imported once the arguments are known to be right."""

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from python_trainer.accelerators import ACCELERATORS
from python_trainer.config import Config, describe_settings, dump_config, load_config
from python_trainer.errors import UserError, tell, wait_for_first_rank
from python_trainer.model.hub import policy_folder
from python_trainer.process.launch import read_launch
from python_trainer.run.directory import check_run_directory, write_text
from rlkernels._text import escape_controls


class Parser(argparse.ArgumentParser):
    """Report errors on the first process of a host before others end it."""

    def error(self, message: str) -> NoReturn:
        wait_for_first_rank()
        super().error(message)


class SettingsHelp(argparse.Action):
    """Lists all settings."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        print("settings (in the YAML file, or by --set key=value; values are YAML):")
        for key, kind, default, text in describe_settings():
            print(f"  {key}: {kind} = {default}")
            print(textwrap.fill(text, 118, initial_indent=" " * 6, subsequent_indent=" " * 6))
        parser.exit()


def make_parser() -> Parser:
    """Make the parser of all commands; each sets ``call`` to the function that runs it, and shows its docstring."""
    about = "Trains language models on tasks with checkable answers (GRPO and relatives)."
    parser = Parser(prog="python -m python_trainer", description=about)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, call: Any, *shared: Parser) -> Parser:
        text = call.__doc__ or ""
        command = commands.add_parser(name, parents=shared, help=re.split(r"[.:,]\s", text)[0], description=text)
        command.set_defaults(call=call)
        return command

    settings, output, resume = (Parser(add_help=False) for _ in range(3))
    text = "settings; the others are default. Also the bare name of a shipped file, such as smoke"
    settings.add_argument("--config", required=True, metavar="FILE.yaml", help=text)
    text = "change settings, for example optimizer.learning_rate=1e-5"
    settings.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text
    )
    settings.add_argument("--help-settings", nargs=0, action=SettingsHelp, help="list all settings, and exit")
    output.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="where the results go")
    resume.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in OUTPUT_DIR")

    train = add("train", run_train, settings, resume)
    train.add_argument("--output-dir", type=Path, metavar="DIR", help="where the results go; needed but for --dry-run")
    text = "print all settings and the memory that they take; exit with code 2 if it does not fit"
    train.add_argument("--dry-run", action="store_true", help=text)
    text = "for --dry-run: GPUs to plan for, as GB or COUNTxGB; default: those of this machine"
    train.add_argument("--gpus", metavar="NxGB", help=text)
    compare = add("compare", run_compare, settings, output)
    names = ", ".join(ACCELERATORS.names)
    text = (
        f"comma-separated: baseline (no accelerator), {names}, all, or several joined by +; @N: N steps; "
        "default: baseline,all"
    )
    compare.add_argument("--variants", default="baseline,all", metavar="A,B,...", help=text)
    text = "seeds of each variant, from the config's seed on; default: 1"
    compare.add_argument("--seeds", type=int, default=1, metavar="N", help=text)
    add("sft", run_sft, settings, output, resume)
    probe = add("probe", run_probe, settings)
    probe.add_argument("--seconds", type=float, default=60.0, help="about how long, without loading; default: 60")
    text = "write all findings there, with the accuracy of each prompt"
    probe.add_argument("--json", type=Path, metavar="FILE", help=text)
    report = add("report", run_report)
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run, or a folder with runs in it")
    history = add("history", run_history)
    history.add_argument("url", metavar="URL", help="a path, sqlite:/// or postgresql:// URL")
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line, that of the program itself without one."""
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser().parse_args(argv)
    if args.command in ("compare", "sft", "probe") and read_launch().size > 1:
        raise UserError(f"{args.command} runs in one process: start it without torchrun")
    return args


def run_train(args: argparse.Namespace) -> None:
    """Train one run. OUTPUT_DIR gets config.yaml (all settings), metrics.jsonl (one row a step),
    samples.jsonl (a few answers of each step), summary.json, report.html, checkpoints/, tensorboard/, model/ (the
    trained policy, Hugging Face format), best/ (the checkpoint with the best evaluation, if it is not the last)
    and, with model.lora, adapter/ (PEFT)."""
    if args.output_dir is None and not args.dry_run:
        raise UserError("train needs --output-dir DIR, or --dry-run")
    config = load_checked(args, resume=None if args.dry_run else args.resume)
    for sentence in config.without_effect():
        tell(sentence)
    if args.dry_run:
        return print_plan(config, args.gpus)
    from python_trainer.command_line.report import report
    from python_trainer.distributed import start
    from python_trainer.trainer import Trainer

    if args.resume:
        note_beginning(args.output_dir)
    with start(config.parallel, config.model.device, timeout=config.ddp_timeout) as ranks:
        Trainer(config, args.output_dir, resume=args.resume, ranks=ranks).run()
    if ranks.rank == 0:
        report([args.output_dir])


def print_plan(config: Config, gpus: str | None) -> None:
    """Print all settings, the engine chosen, and the memory of each device."""
    from python_trainer.loop import memory
    from python_trainer.loop.parts import resolve_engine

    config = resolve_engine(config)
    device = memory.device_here(config.model.device) if gpus is None else memory.parse_gpus(gpus)
    notes: list[str] = []
    if memory.needs_recomputing(config, device):
        config = config.with_changes("model", gradient_checkpointing=True)
        notes.append(memory.RECOMPUTES)
    plan = memory.plan_memory(config, device)
    print("\n".join([dump_config(config), *notes, *memory.memory_lines(plan)]))
    if plan.trouble:
        raise UserError(plan.trouble)


def run_compare(args: argparse.Namespace) -> None:
    """Train with and without accelerators: every variant on every seed, one after the other, into
    OUTPUT_DIR/VARIANT/seed-N; then reports on all. It keeps finished runs and continues interrupted ones."""
    from python_trainer.command_line.compare import compare

    config = load_checked(args, resume=True)
    compare(config, args.output_dir, variants=args.variants.split(","), seeds=args.seeds)


def run_sft(args: argparse.Namespace) -> None:
    """Train on reference answers, those of the task's training examples (settings: section sft), for models that
    hardly ever answer right. OUTPUT_DIR/model can then be the model.path of train."""
    config = load_checked(args, resume=args.resume)
    from python_trainer.command_line.sft import Sft

    if args.resume:
        note_beginning(args.output_dir)
    summary = Sft(config, args.output_dir, resume=args.resume).run()
    evaluations = summary["evaluation"]
    held_out = [f"{evaluations[name].get('held_out_loss', math.nan):.3f}" for name in ("start", "final")]
    losses = f"loss of the last step {summary['loss_final']:.3f}, of held-out examples {' -> '.join(held_out)}"
    print(f"{losses}; the model is in {args.output_dir / 'model'}")


def run_probe(args: argparse.Namespace) -> None:
    """Measure how hard the prompts are and where time goes: answer some training prompts and make one update, in
    about a minute. It keeps nothing (docs/quickstart.md)."""
    config = load_config(args.config, [*args.overrides, "accelerators.enabled=[]"])
    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        raise UserError(f"--json must be a file in a folder that exists, got {args.json}")
    from python_trainer.command_line.probe import lines, probe

    findings = probe(config, seconds=args.seconds)
    print("\n".join(lines(findings)))
    if args.json:
        write_text(args.json, json.dumps(findings, indent=1) + "\n")


def run_report(args: argparse.Namespace) -> None:
    """Report on runs, finished or not: prints a verdict and a table of all runs under the folders. Writes
    report.html, one page with curves, sample answers and the settings that differ: into DIR, or beside the first of
    several. It needs no network."""
    from python_trainer.command_line.report import report

    report(args.folders)


def run_history(args: argparse.Namespace) -> None:
    """List the runs that accelerators.rhyme.database has recorded in a retrospective database."""
    from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase

    database = RetrospectiveDatabase(args.url, create=False)
    for run in (runs := database.runs()):
        steps = database.trajectory(run.id)
        created = datetime.fromtimestamp(run.created)
        folder, seed = (run.settings.get(name, "-") for name in ("output_dir", "seed"))
        tokens = sum(step.generated_tokens for step in steps)
        accuracy = f"{steps[-1].accuracy:.3f}" if steps else "-"
        progress = f"{len(steps)} steps, {tokens} tokens, accuracy {accuracy}"
        line = f"run {run.id}, {created:%Y-%m-%d}, {folder}: {run.task}, seed {seed}, {progress}"
        print(escape_controls(line, keep=""))
    print(f"{database.name}: {len(runs)} runs")


def load_checked(args: argparse.Namespace, *, resume: bool | None = None) -> Config:
    """Read the settings of a run; find mistakes in them before torch loads, which takes seconds.

    Args:
        resume: whether a run in OUTPUT_DIR may go on; None: nothing is written there.
    """
    config = load_config(args.config, args.overrides)
    policy_folder(config.model.path)
    config.task.check_files()
    if resume is not None:
        check_run_directory(args.output_dir, resume=resume)
    return config


def note_beginning(output_dir: Path) -> None:
    """Tell that a run to resume has no checkpoint, which a mistyped folder would hide."""
    from python_trainer.run.checkpoint import list_checkpoints

    if not list_checkpoints(output_dir / "checkpoints"):
        tell(f"{output_dir} has no checkpoint to resume: training begins with the first step")
