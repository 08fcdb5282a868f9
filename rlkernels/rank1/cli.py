"""``python -m rlkernels rank1 BASE CHECKPOINT...``: a table per checkpoint, and JSON."""

import argparse
import json
import sys
from pathlib import Path

import torch

from rlkernels.rank1.stream import ModuleUpdate, stream_top1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("base", type=Path, help="folder with the base model's safetensors")
    parser.add_argument("checkpoints", type=Path, nargs="+", help="folders of checkpoints, in training order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--tol", type=float, default=1e-2, help="radians at which to stop (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where to compute (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)


def table(found: list[ModuleUpdate]) -> str:
    """The updates of one checkpoint as text."""
    width = max([len(m.name) for m in found] + [6])
    head = (
        f"{'module':<{width}} {'shape':>13} {'sigma':>10} {'share':>6} {'gap':>6} {'angle <=':>9} {'changed':>8} status"
    )
    lines = [head]
    for module in found:
        u, shape = module.update, "x".join(map(str, module.shape))
        lines.append(
            f"{module.name:<{width}} {shape:>13} {u.sigma:>10.3e} {u.share:>6.1%} {u.gap:>6.1%} "
            f"{u.angle_bound:>9.1e} {u.changed:>8.2%} {u.status}"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Prints the tables and writes the JSON; every checkpoint warm-starts the next. Returns the exit code."""
    starts: dict[str, torch.Tensor] = {}
    report = []
    for folder in args.checkpoints:
        try:
            found = list(
                stream_top1(args.base, folder, starts=starts, tol=args.tol, seed=args.seed, device=args.device,
                            progress=sys.stderr.isatty())
            )  # fmt: skip
        except (ValueError, TypeError, ImportError) as error:
            print(f"rlkernels rank1: {error}", file=sys.stderr)
            return 1
        starts = {m.name: m.update.v for m in found}
        print(f"{folder}\n{table(found)}\n")
        report.append({"checkpoint": str(folder), "modules": [m.row() for m in found]})
    if args.json:
        args.json.write_text(json.dumps({"base": str(args.base), "checkpoints": report}, indent=1) + "\n")
    return 0
