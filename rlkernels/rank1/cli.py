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


def cosines(found: list[ModuleUpdate], before: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the cosine of every v with that of the checkpoint before, where both exist; the sign is arbitrary."""
    return {
        m.name: abs(torch.dot(m.update.v.cpu(), before[m.name].cpu()).item())
        for m in found
        if m.name in before and m.update.status != "zero" and before[m.name].any()
    }


def table(found: list[ModuleUpdate], turned: dict[str, float]) -> str:
    """Return the updates of one checkpoint as text; ``turned``: name -> cosine with the checkpoint before."""
    width = max([len(m.name) for m in found] + [6])
    head = (
        f"{'module':<{width}} {'shape':>13} {'sigma':>10} {'share':>6} {'gap':>6} {'angle <=':>9} {'changed':>8} "
        f"{'cos':>6} status"
    )
    lines = [head]
    for module in found:
        u, shape = module.update, "x".join(map(str, module.shape))
        cosine = f"{turned[module.name]:.3f}" if module.name in turned else "-"
        lines.append(
            f"{module.name:<{width}} {shape:>13} {u.sigma:>10.3e} {u.share:>6.1%} {u.gap:>6.1%} "
            f"{u.angle_bound:>9.1e} {u.changed:>8.2%} {cosine:>6} {u.status}"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Prints the tables and writes the JSON; every checkpoint warm-starts the next. Returns the exit code."""
    starts: dict[str, torch.Tensor] = {}
    report = []
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:  # the second where torch knows no GPUs
        print(f"rlkernels rank1: --device {args.device} cannot be used: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    for folder in args.checkpoints:
        try:
            found = list(
                stream_top1(args.base, folder, starts=starts, tol=args.tol, seed=args.seed, device=args.device,
                            progress=sys.stderr.isatty())
            )  # fmt: skip
        except (ValueError, TypeError, ImportError) as error:
            print(f"rlkernels rank1: {error}", file=sys.stderr)
            return 1
        turned = cosines(found, starts)
        starts = {m.name: m.update.v for m in found}
        print(f"{folder}\n{table(found, turned)}\n")
        rows = [{**m.row(), "cosine_to_previous": turned.get(m.name)} for m in found]
        report.append({"checkpoint": str(folder), "modules": rows})
    if args.json:
        try:
            args.json.write_text(json.dumps({"base": str(args.base), "checkpoints": report}, indent=1) + "\n")
        except OSError as error:
            print(f"rlkernels rank1: --json: {error}", file=sys.stderr)
            return 1
    return 0
