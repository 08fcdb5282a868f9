"""What the command line takes: the parser of every command, its help and examples."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from python_trainer.errors import UserError, after_the_first
from python_trainer.registry import load

PROGRAM = "python -m python_trainer"
EXAMPLES = [
    "train --config configs/sums.yaml --output-dir runs/first",
    "train --config configs/sums.yaml --output-dir runs/{name} \\\n      --set 'accelerators.enabled=[{name}]'",
    "train --config configs/sums.yaml --output-dir runs/first --resume \\\n"
    "      --set max_steps=120 max_seconds=null",
    "compare --config configs/sums.yaml --variants baseline,{name},all --seeds 3 \\\n"
    "      --output-dir runs/compare",
    "report runs/compare",
    "report runs/first runs/{name}",
]

CONFIG_HELP = "settings; what is not in it is default. Also the bare name of one that is shipped, such as smoke"
RESUME = "go on from the newest checkpoint in OUTPUT_DIR"

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
            f"python_trainer needs packages that {sys.executable} lacks: {', '.join(missing)}; the extra train brings "
            "them: `pip install --no-build-isolation '.[train]'` in the clone, or `pip install 'NAME.whl[train]'`"
        )


def settings_help() -> str:
    """All settings, from the configuration's own documentation."""
    check_packages()
    from python_trainer.describe import describe_settings

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


class Parser(argparse.ArgumentParser):
    """Of several processes on a host the first one says what is wrong."""

    def error(self, message: str) -> NoReturn:
        after_the_first()
        super().error(message)


class Parsers:
    """The parser of the command line, to which commands are added one by one, each with its examples."""

    def __init__(self) -> None:
        self.whole = Parser(
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
    """The trainer's own commands, for accelerators of these names."""
    add_train(parsers, names)
    add_compare(parsers, names)
    add_sft(parsers)
    add_probe(parsers)
    add_plan(parsers)
    add_export(parsers)
    add_report(parsers)


def add_settings(command: argparse.ArgumentParser, *, output: bool = True) -> None:
    """The arguments of commands that take a configuration."""
    command.add_argument("--config", required=True, metavar="FILE.yaml", help=CONFIG_HELP)
    command.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change settings, for example optimizer.learning_rate=1e-5",
    )
    if output:
        command.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="where the results go")
    command.add_argument("--help-settings", nargs=0, action=SettingsHelp, help="list all settings, and leave")


def add_train(parsers: Parsers, names: Sequence[str]) -> None:
    train = parsers.add(
        "train",
        examples=[example.format(name=names[0]) for example in EXAMPLES],
        help="one training run",
        description="One training run. OUTPUT_DIR gets config.yaml (all settings as used), metrics.jsonl (one row a "
        "step), samples.jsonl\n(a few answers of some steps), summary.json, report.html, checkpoints/, tensorboard/ "
        "and model/ (the trained policy,\nHugging Face format).",
    )
    add_settings(train)
    train.add_argument("--resume", action="store_true", help=RESUME)
    train.set_defaults(call="python_trainer.commands:run_train")


def add_compare(parsers: Parsers, names: Sequence[str]) -> None:
    compare = parsers.add(
        "compare",
        help="the same training with and without accelerators",
        description="Trains every variant on every seed, one after the other, into OUTPUT_DIR/VARIANT/seed-N; then "
        "prints a table and\ndraws accuracy over wall time. What is finished is not run again, what was interrupted "
        "goes on.",
    )
    add_settings(compare)
    compare.add_argument(
        "--variants",
        default="baseline,all",
        metavar="A,B,...",
        help=f"comma-separated: baseline (no accelerator), auto, {', '.join(names)}, all, or several joined by + "
        f"({'+'.join(names[:2])}); default: baseline,all",
    )
    compare.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="that many, from the config's seed on (default: 1)"
    )
    compare.set_defaults(call="python_trainer.commands:run_compare")


def add_sft(parsers: Parsers) -> None:
    sft = parsers.add(
        "sft",
        examples=["sft --config configs/gsm8k_smollm2.yaml --output-dir runs/sft --set model.path=MODEL"],
        help="supervised steps on reference answers",
        description="Supervised steps on the reference answers of the task's training examples (settings: section "
        "sft), for models that hardly ever\nanswer right. OUTPUT_DIR/model can then be the model.path of train.",
    )
    add_settings(sft)
    sft.add_argument("--resume", action="store_true", help=RESUME)
    sft.set_defaults(call="python_trainer.commands:run_sft")


def add_probe(parsers: Parsers) -> None:
    probe = parsers.add(
        "probe",
        examples=["probe --config configs/sums.yaml"],
        help="how hard the prompts are, where time would go, what could pay",
        description="Answers some training prompts and makes one update, in about a minute: how often answers are "
        "right, how many groups\nteach anything, seconds of a step, memory, and how much each accelerator can gain at "
        "most (docs/probe.md). Nothing is kept.",
    )
    add_settings(probe, output=False)
    probe.add_argument("--seconds", type=float, default=60.0, help="about how long, loading not counted (default: 60)")
    probe.add_argument("--prompts", type=int, default=1 << 30, metavar="N", help="most prompts to ask")
    probe.add_argument("--tries", type=int, metavar="N", help="answers to each (default: rollout.num_generations)")
    probe.add_argument("--json", type=Path, metavar="FILE", help="write all findings there, p of every prompt too")
    probe.add_argument("--plot", type=Path, metavar="PNG", help="draw p, lengths and seconds")
    probe.set_defaults(call="python_trainer.commands:run_probe")


def add_plan(parsers: Parsers) -> None:
    plan = parsers.add(
        "plan",
        examples=["plan --config configs/gpu_7b_8x80gb.yaml --gpus 8x80 --set model.path=MODEL"],
        help="memory, before anything runs",
        description="What each device would hold in every phase of a training run, by the settings and the model's "
        "config.json; no weights are read\n(docs/scale.md). Exit code 2 where it does not fit, with what would.",
    )
    add_settings(plan, output=False)
    plan.add_argument("--gpus", metavar="NxGB", help="such as 80, or 8x80 (default: what this machine has)")
    plan.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="of a prompt (default: 256)")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, in bytes")
    plan.set_defaults(call="python_trainer.plan.command:run")


def add_export(parsers: Parsers) -> None:
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


def add_report(parsers: Parsers) -> None:
    report = parsers.add(
        "report",
        help="verdict, table, curves and answers of runs, finished or not",
        description="Prints the table of all runs under the folders, draws accuracy.png in the first, and writes "
        "report.html in each: one page\nwith a sentence on each variant, the curve of accuracy, the table, curves of "
        "every metric, sample answers and\nsettings that differ, all runs side by side. It opens in any browser and "
        "needs no network: copy or mail the file.\nTo compare runs, name them: report runs/a runs/b.",
    )
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run, or a folder with runs in it")
    report.set_defaults(call="python_trainer.commands:run_report")
