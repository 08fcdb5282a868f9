"""Rivals of extrapolated weights: higher learning rates, averages of weights, stretches by rank, cheaper gates.

    python -m bench.studies alpha_rivals --output-dir runs/studies/alpha_rivals

The parts: `rates` trains 24 steps at four learning rates, up to the tuned one of configs/arithmetic.yaml, and averages
the weights of the lowest and of the tuned rate over the last steps; `ranks` stretches the update at the lowest rate,
whole or its part of a low rank, with no gate; `gates` trains 48 steps at the tuned rate, plainly, with attempts whose
gate is not counted, and with attempts that are judged by the next training batch (``on_batches.py``), and
`lattice_paths` does so on that task, whose configuration is tuned. Accuracies are of 4,096 test prompts, on the way
1,024, one sampled answer each, with the same noise per seed. What is finished is not done again. Writes
bench/studies/results/alpha_rivals.md.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench._runner import commit
from bench.studies import alpha_rivals_report as report
from bench.studies.alpha import CONFIG, SETTINGS, Part, alpha_of, answers_with, at, known, leading_parts, train
from bench.studies.alpha_rivals_report import (
    AVERAGES,
    GATES,
    LATTICE,
    LONGER,
    LOW,
    ON_THE_WAY,
    PARTS,
    RANKS,
    RATES,
    STEPS,
    STRETCHES,
    TUNED,
    plain_rate,
    rank_name,
)
from python_trainer.callbacks import Callback
from python_trainer.config import Config, load_config

Weights = Mapping[str, torch.Tensor]
COMMON = ["evaluation.eval_limit=4096", f"evaluation.eval_limit_during={ON_THE_WAY}"]
ON_BATCHES = "bench.studies.on_batches:OnBatchesSettings"
ATTEMPTS = {"first_step": 6, "every": 12, "horizon": 2.0, "predictor": "full"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/alpha_rivals"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                        help=f"{', '.join(PARTS)}; default: all, in this order")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--gate-seeds", type=int, nargs="+", default=[0, 1], help="of the part gates")
    parser.add_argument("--lattice-seeds", type=int, nargs="+", default=[1], help="of the part lattice_paths")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE", help="more settings")
    parser.add_argument("--report-only", action="store_true", help="the tables of what there is")


def average(snapshots: Sequence[Weights], shares: Sequence[float]) -> dict[str, torch.Tensor]:
    """The mean of weights, the last one with the last of the shares, which need not add up to 1.

    Raises:
        ValueError: fewer snapshots than shares.
    """
    if len(snapshots) < len(shares):
        raise ValueError(f"snapshots must be at least {len(shares)}, as many as shares, got {len(snapshots)}")
    last = snapshots[len(snapshots) - len(shares) :]
    whole = sum(shares)
    return {name: sum(s / whole * weights[name] for s, weights in zip(shares, last)) for name in last[0]}  # type: ignore[misc]


def shares_of(name: str, steps: int) -> list[float]:
    """Of each step's weights in an average of :data:`AVERAGES`, oldest first."""
    return [1.0] * 8 if name == AVERAGES[0] else [0.8 ** (steps - 1 - i) for i in range(steps)]


def stretched(weights: Weights, parts: Weights, factor: float) -> dict[str, torch.Tensor]:
    """Weights whose update goes on to so many times its size in these parts of it; the rest stays as trained."""
    return {name: weights[name] + (factor - 1) * part for name, part in parts.items()}


class Averages(Callback):
    """Keeps the weights of every step in the run's folder, and after the last one only their averages."""

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        weights = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
        save_file(weights, trainer.folder / f"weights-{step:06d}.safetensors")
        if step == trainer.config.max_steps:
            files = sorted(trainer.folder.glob("weights-*.safetensors"))
            snapshots = [load_file(file) for file in files]
            for name in AVERAGES:
                shares = shares_of(name, len(snapshots))
                save_file(average(snapshots, shares), averages_file(trainer.folder, name, step))
            for file in files:
                file.unlink()


def averages_file(run: Path, name: str, step: int) -> Path:
    return run / f"{name.replace(' ', '-')}-{step}.safetensors"


def settings(rate: str, seed: int, steps: int, overrides: Sequence[str], *more: str) -> Config:
    """Of a run at this learning rate."""
    rates = [f"optimizer.learning_rate={rate}", f"seed={seed}", f"max_steps={steps}"]
    if rate in (LOW, TUNED):
        rates.append("callbacks=[bench.studies.alpha_rivals:Averages]")
    if rate == TUNED:
        rates.append("evaluation.eval_steps=12")
    return load_config(CONFIG, [*SETTINGS, *COMMON, *rates, *more, *overrides])


def part_of(folder: Path, name: str, seed: int) -> Part:
    part = Part(folder / name / f"seed-{seed}")
    if commit() not in part.numbers.get("commit", ""):
        part.note("commit", f"{part.numbers.get('commit', '')} {commit()}".strip())
    return part


def train_and_average(config: Config, part: Part, name: str, start: Part | None) -> None:
    """Trains up to ``config.max_steps``, and tests the averages of the weights where they are kept."""
    base = None if start is None else known(start.answers["base"].tolist())
    train(config, part, name, start=base)
    for kind in AVERAGES if config.callbacks else ():
        if f"{name}, {kind}" not in part.answers:
            weights = load_file(averages_file(part.folder / "run", kind, config.max_steps))
            part.keep(
                f"{name}, {kind}",
                answers_with(at(part, config, config.max_steps), weights, config.evaluation.eval_limit),
            )


def rates(args: argparse.Namespace, seed: int) -> None:
    """As many steps at every learning rate."""
    low = part_of(args.output_dir, plain_rate(LOW), seed)
    for rate in RATES:
        part = low if rate == LOW else part_of(args.output_dir, plain_rate(rate), seed)
        start = None if rate == LOW else low
        train_and_average(settings(rate, seed, STEPS, args.overrides), part, f"{STEPS} steps", start)


def ranks(args: argparse.Namespace, seed: int) -> None:
    """The update at the lowest rate goes on, its part of a rank or the whole."""
    part = part_of(args.output_dir, plain_rate(LOW), seed)
    config = settings(LOW, seed, STEPS, args.overrides)
    train(config, part, f"{STEPS} steps")
    trainer = at(part, config, STEPS)
    tracked = alpha_of(trainer).trajectory
    assert tracked is not None
    final = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    whole = {name: final[name] - base for name, base in tracked.base.items()}
    for rank in RANKS:
        parts = whole if rank is None else leading_parts(final, tracked.base, rank)
        held = [float(parts[name].norm() / delta.norm().clamp(min=1e-30)) for name, delta in whole.items()]
        part.note(f"norm, {rank_name(rank)}", sum(held) / len(held))
        for factor in STRETCHES:
            name = f"{rank_name(rank)}, {factor} times"
            if name not in part.answers:
                part.keep(
                    name, answers_with(trainer, final | stretched(final, parts, factor), config.evaluation.eval_limit)
                )


def gates(args: argparse.Namespace, seed: int) -> None:
    """Longer runs at the tuned rate: plain, with attempts behind the gate, with attempts judged on batches."""
    low = part_of(args.output_dir, plain_rate(LOW), seed)
    train(settings(LOW, seed, STEPS, args.overrides), low, f"{STEPS} steps")
    plain = part_of(args.output_dir, plain_rate(TUNED), seed)
    for steps in (STEPS, LONGER):
        train_and_average(settings(TUNED, seed, steps, args.overrides), plain, f"{steps} steps", low)
    for name in GATES:
        config = settings(TUNED, seed, LONGER, args.overrides, *attempts(name), "callbacks=[]")
        train_and_average(config, part_of(args.output_dir, name, seed), f"{LONGER} steps", low)


def attempts(name: str) -> list[str]:
    """Settings of one of :data:`GATES`."""
    margin, section, kind = GATES[name], "on_batches", ON_BATCHES
    if margin is None:
        section, kind = "alpha", "alpha"
    chosen = ATTEMPTS | ({} if margin is None else {"margin": margin, "track_steps": 2})
    changes = [f"accelerators.{section}.{key}={value}" for key, value in chosen.items()]
    return [f"accelerators.enabled=[{kind}]", *changes]


def lattice_paths(args: argparse.Namespace, seed: int) -> None:
    """The same on a task where prompts come back every twelve steps."""
    own = ["max_seconds=null", "save.save_steps=0", "save.save_model=false", f"seed={seed}", "evaluation.eval_steps=60"]
    first: Part | None = None
    for name, more in {"plain": ["accelerators.enabled=[alpha]", "accelerators.alpha.first_step=1000000"],
                       **{name: attempts(name) for name in GATES}}.items():  # fmt: skip
        gate = ["accelerators.alpha.gate_prompts=512"]
        config = load_config("configs/lattice_paths.yaml", [*own, *COMMON, *more, *gate, *args.overrides])
        part = part_of(args.output_dir, f"{LATTICE}, {name}", seed)
        train_and_average(config, part, "end", first)
        first = first or part


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    make = {"rates": rates, "ranks": ranks, "gates": gates, LATTICE: lattice_paths}
    seeds = {"gates": args.gate_seeds, LATTICE: args.lattice_seeds}
    for part in args.parts if not args.report_only else ():
        for seed in seeds.get(part, args.seeds):
            make[part](args, seed)
            report.write(args.output_dir, args.results)
    if args.report_only:
        report.write(args.output_dir, args.results)
