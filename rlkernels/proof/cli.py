"""``python -m rlkernels prove``: verdicts for this GPU, and a record of them."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkernels.proof import Workload, prove, write_record
from rlkernels.verdicts import summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("--ops", nargs="+", metavar="OP", help="these ops only (default: all that have a GPU kernel)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings of python_trainer: prove for that run")
    parser.add_argument("--seconds", type=float, default=60, help="time for all of it (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="prove anew what has a verdict")
    parser.add_argument("--device", help="cuda:1, say (default: the current CUDA device; cpu: a dry run)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a record for bench/gpu/records")


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand -> exit code, 1 where an op was left out."""
    try:
        workload = workload_of_config(args.config) if args.config else None
        result = prove(args.ops, device=args.device, seconds=args.seconds, workload=workload, again=args.again)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for op, verdict in result["verdicts"].items():
        print(f"{op:<24} {verdict['backend']:<7} {summary(verdict)}".rstrip())
    for op, reason in result["left_out"].items():
        print(f"{op:<24} {reason}")
    if args.record:
        write_record(args.record, result)
        print(f"record: {args.record}")
    return 1 if result["left_out"] else 0


def workload_of_config(path: Path) -> Workload:
    """The workload of a run of python_trainer, from its settings and the ``config.json`` of its model.

    Raises:
        ValueError: it is no such file, or the model's shape cannot be read.
    """
    try:
        import yaml
    except ImportError as error:
        raise ValueError("--config needs PyYAML: pip install pyyaml") from error
    settings = yaml.safe_load(path.read_text())
    if not isinstance(settings, dict):
        raise ValueError(f"--config: {path} holds no settings")
    model = Path(str((settings.get("model") or {}).get("path", "")), "config.json")
    if not model.is_file():
        raise ValueError(f"--config: model.path must be a folder with a config.json, there is no {model}")
    return workload_of_run(settings, json.loads(model.read_text()))


def workload_of_run(settings: Mapping[str, Any], model: Mapping[str, Any]) -> Workload:
    """The workload of a run.

    Args:
        settings: of python_trainer, nested; what is missing counts as in the default workload.
        model: the configuration of a Transformers model.
    """
    rollout = settings.get("rollout") or {}
    longest = rollout.get("max_completion_length")
    found = {
        "dtype": (settings.get("model") or {}).get("dtype"),
        "heads": model.get("num_attention_heads"),
        "kv_heads": model.get("num_key_value_heads") or model.get("num_attention_heads"),
        "head_dim": model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"],
        "hidden": model.get("hidden_size"),
        "vocab": model.get("vocab_size"),
        "prompts": rollout.get("prompts_per_step"),
        "samples": rollout.get("num_generations"),
        "completion_tokens": max(16, longest // 2) if longest else None,  # few answers are as long as they may be
        **{name: rollout.get(name) for name in ("temperature", "top_p", "top_k")},
    }
    given = {name: value for name, value in found.items() if value is not None}
    if given.get("dtype") not in ("float32", "bfloat16", "float16"):
        given.pop("dtype", None)
    return dataclasses.replace(Workload(), **given)
