"""What `curriculum` expects of its choice, against what gradients show of it; and what seconds instead of tokens add.

    python -m bench.studies gradients
    python -m bench.studies gradients --config configs/lattice_paths.yaml --output-dir runs/studies/gradients-paths

A run with `curriculum` is made to each of these steps (``--at``), and the policy of that moment answers batches of
prompts three times: drawn uniformly, chosen by signal per token, chosen by signal per second at the same breadth of the
draw. No weight changes. Seconds are CPU seconds of one thread; those expected of an answer are so much for each token
that is generated and each that is trained on (answers without an advantage are not), fitted to the steps of the run.

Beside each kind of batch its ratio to uniform ones: the signal that its answers show, by token and by second; and what
its gradient g brings by token, <g, G>^2 / |g|^2, G the expected gradient of uniform prompts. That is up to a constant
the most that a step along g can gain, and does not hang on the size of a batch as long as noise prevails. G is the mean
over the uniform batches, of their own never the batch itself; +- is one deviation, by a jackknife over batches.
Finished runs are kept. Prints its tables as Markdown.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from bench._markdown import table_lines
from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.curriculum.accelerator import Curriculum, difference
from python_trainer.accelerators.curriculum.field import WEIGHTS, at_nodes, chance_to_differ
from python_trainer.config import load_config
from python_trainer.data import Group, Rollout, by_group
from python_trainer.keyed import keyed_seed, prompt_order
from python_trainer.objective import MetricSums, make_batch, set_advantages
from python_trainer.run import Trainer
from python_trainer.run_directory import read_metrics
from python_trainer.run_state import Clock

UNIFORM, BY_TOKENS, BY_SECONDS = "uniform", "chosen per token", "chosen per second"
FIRST = 3  # steps of a run that no seconds are fitted to
COUNTED = {
    "tokens": ["tokens/generated"],
    "tokens, trained": ["tokens/generated", "tokens/trained"],
    "tokens, trained, longest": ["tokens/generated", "tokens/trained", "completions/max_length"],
}
OURS = [
    "accelerators.enabled=[curriculum]", "accelerators.curriculum.least_gain=1e9",  # foretold, never done
    "evaluation.eval_steps=0", "evaluation.eval_limit=512", "save.save_model=false",
]  # fmt: skip
Row = Mapping[str, float | None]
Cost = Callable[[torch.Tensor], torch.Tensor]  # numbers of prompts [K] -> what an answer to each costs [K]
Kept = NDArray[np.intp]  # numbers of batches
Value = Callable[[str, Kept], float]  # kind of batch, which of them -> what they are worth
FACTS = {"prompts": "{:.1f}", "tokens": "{:,.0f}", "trained": "{:,.0f}", "seconds": "{:.2f}"}  # of a batch


@dataclass
class Batch:
    """What came of the answers to one batch of prompts; ``gradient`` [W] of the loss."""

    gradient: torch.Tensor
    tokens: int
    trained: int
    seconds: float
    signal: float
    prompts: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/gradients"), metavar="DIR")
    parser.add_argument("--config", default="configs/sums.yaml", metavar="FILE")
    parser.add_argument("--at", type=int, nargs="+", default=[20, 60], metavar="STEP")
    parser.add_argument("--batches", type=int, default=40, help="of each kind (default: %(default)s)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings of the run")


def fit(rows: Sequence[Row], names: Sequence[str]) -> NDArray[np.float64]:
    """Seconds of a step per unit of each of these metrics, [len(names)]."""
    x = np.array([[row[name] for name in names] for row in rows], dtype=np.float64)
    seconds = np.array([spent(row) for row in rows])
    return np.linalg.lstsq(x, seconds, rcond=None)[0]


def spent(row: Row) -> float:
    """Seconds of generation and update in a step."""
    return (row["time/rollout_s"] or 0.0) + (row["time/train_s"] or 0.0)


def explained(rows: Sequence[Row], names: Sequence[str]) -> float:
    """Share of the variance of seconds that a fit to every other step explains in the steps between."""
    seconds, expected = np.array([spent(row) for row in rows]), np.empty(len(rows))
    for part in (0, 1):
        x = np.array([[row[name] for name in names] for row in rows[part::2]], dtype=np.float64)
        expected[part::2] = x @ fit(rows[1 - part :: 2], names)
    return float(1 - ((seconds - expected) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum())


def seconds_of(curriculum: Curriculum, rates: Sequence[float], size: int) -> Cost:
    """Expected seconds of an answer in a group of ``size``, which is trained on where the group has a spread."""
    outcomes, tokens = curriculum.outcomes, curriculum.outcomes.cost

    def cost(keys: torch.Tensor) -> torch.Tensor:
        believed = outcomes.best.moments(keys)
        p = at_nodes(*believed)
        spread = (1 - p**size - (1 - p) ** size) @ WEIGHTS
        seen = outcomes.signal(keys) / chance_to_differ(*believed)
        return tokens(keys) * (rates[0] + rates[1] * (spread * seen).clamp_max(1))

    return cost


def breadth(shares: torch.Tensor) -> float:
    """Prompts that as broad a uniform draw would have."""
    return 1 / shares.square().sum().item()


def as_broad(curriculum: Curriculum, cost: Cost) -> float:
    """The sharpness with which a choice by this cost is as broad as that of the curriculum."""
    keys, own = torch.arange(len(curriculum.lengths)), curriculum.settings
    signal = curriculum.outcomes.signal(keys)
    wanted = breadth(curriculum.shares(signal, curriculum.outcomes.cost(keys)))
    low, high = 0.0, 50.0
    for _ in range(40):
        curriculum.settings = own.model_copy(update={"sharpness": (low + high) / 2})
        broad = breadth(curriculum.shares(signal, cost(keys))) > wanted
        low, high = ((low + high) / 2, high) if broad else (low, (low + high) / 2)
    curriculum.settings = own
    return low


def batch_of(trainer: Trainer, context: StepContext, groups: list[Group]) -> Batch:
    """Answers these groups and takes their gradient; the policy stays as it is."""
    for group in groups:
        group.sample_id, context.samples = context.samples, context.samples + group.num_samples
    begun = time.process_time()
    rollouts = trainer.generate(groups, context.seed)
    trainer.score(groups, rollouts)
    gradient, trained = gradient_of(trainer, rollouts)
    seconds = time.process_time() - begun
    trainer.engine.policy_updated()  # nothing computed for this batch is used for the next
    signal = sum(difference(group) or 0.0 for group in by_group(rollouts).values())
    return Batch(gradient, sum(len(answer.ids) for answer in rollouts), trained, seconds, signal, len(groups))


def gradient_of(trainer: Trainer, rollouts: list[Rollout]) -> tuple[torch.Tensor, int]:
    """Of the loss of a step on these answers, [W], and the tokens of its passes."""
    learner, everything = trainer.learner, list(range(len(rollouts)))
    masters = learner.optimizer.masters.values()
    with trainer.policy.packed_attention():
        batch = make_batch(rollouts, learner.algorithm, trainer.policy.device)
        set_advantages(batch, learner.algorithm)
        teaching = [index for index, teaches in enumerate(learner._teaching(batch)) if teaches]
        _, trained = learner._pass(batch, everything, teaching or [0], MetricSums(batch.rewards.device))
    gradient = torch.cat([weight.grad.flatten() for weight in masters if weight.grad is not None])
    for weight in masters:
        weight.grad = None
    return gradient, trained


def look(trainer: Trainer, count: int, rates: Sequence[float]) -> dict[str, list[Batch]]:
    """So many batches of each kind."""
    trainer.clock, size = Clock(), trainer.generation.prompts_per_step
    (curriculum,) = (each for each in trainer.accelerators if isinstance(each, Curriculum))
    tokens, prompts = curriculum.outcomes.cost, len(curriculum.lengths)
    seconds = seconds_of(curriculum, rates, trainer.generation.num_generations)
    own = curriculum.settings.model_copy(update={"least_gain": 0.0})
    by_seconds = own.model_copy(update={"sharpness": as_broad(curriculum, seconds)})
    found: dict[str, list[Batch]] = {UNIFORM: [], BY_TOKENS: [], BY_SECONDS: []}
    for number in range(count):
        for kind, cost, curriculum.settings in zip(found, (None, tokens, seconds), (own, own, by_seconds)):
            context = trainer.context(trainer.state.step + 1)
            context.seed = keyed_seed(trainer.seed, "gradients", context.step, kind == UNIFORM, number)
            context.telemetry["curriculum/chosen_prompts"] = 0.0
            if cost is None:
                groups = context.groups_of(prompt_order(context.seed, 0, size, prompts))
            else:
                with mock.patch.object(curriculum.outcomes, "cost", cost):
                    groups = curriculum.choose(context, size) or []
            found[kind].append(batch_of(trainer, context, groups))
    return found


def over_uniform(found: Mapping[str, Sequence[Batch]], value: Value) -> dict[str, tuple[float, float]]:
    """Of each kind of batch a value over that of uniform ones, and its deviation, by a jackknife."""
    every = np.arange(len(found[UNIFORM]))

    def ratio(kind: str, kept: Kept) -> float:
        return value(kind, kept) / value(UNIFORM, kept)

    parts = {kind: np.array([ratio(kind, np.delete(every, i)) for i in every]) for kind in found}
    return {kind: (ratio(kind, every), float(part.std() * (len(every) - 1) ** 0.5)) for kind, part in parts.items()}


def signal_by(found: Mapping[str, Sequence[Batch]], unit: str) -> Value:
    """Signal that answers showed by token or by second, ``unit`` being the name in :class:`Batch`."""
    pairs = {kind: np.array([(b.signal, getattr(b, unit)) for b in batches]) for kind, batches in found.items()}

    def value(kind: str, kept: Kept) -> float:
        signal, units = pairs[kind][kept].sum(0)
        return signal / units

    return value


def gradient_by_token(found: Mapping[str, Sequence[Batch]]) -> Value:
    """What the gradients of a kind bring by token; negative where they lead away."""
    uniform = torch.stack([batch.gradient for batch in found[UNIFORM]])
    products, facts = {}, {}
    for kind, batches in found.items():
        gradients = torch.stack([batch.gradient for batch in batches])
        products[kind] = (gradients @ uniform.T).double().numpy()
        squares = gradients.double().square().sum(1).numpy()
        facts[kind] = np.array([squares, [batch.tokens for batch in batches]])
    others = ~np.eye(len(uniform), dtype=bool)

    def value(kind: str, kept: Kept) -> float:
        of_both = products[kind][np.ix_(kept, kept)]
        along = of_both[others[np.ix_(kept, kept)]].mean() if kind == UNIFORM else of_both.mean()
        square, tokens = facts[kind][:, kept].mean(1)
        return along * abs(along) / square / tokens

    return value


def table(found: Mapping[str, Sequence[Batch]]) -> list[str]:
    """A row for each kind of batch."""
    values = signal_by(found, "tokens"), signal_by(found, "seconds"), gradient_by_token(found)
    ratios = [over_uniform(found, value) for value in values]
    rows = []
    for kind, batches in found.items():
        means = {name: fmean(getattr(batch, name) for batch in batches) for name in FACTS}
        rows.append([
            kind, *(FACTS[name].format(mean) for name, mean in means.items()),
            *("{:.2f} +- {:.2f}".format(*ratio[kind]) for ratio in ratios),
        ])  # fmt: skip
    return table_lines(["batches", *FACTS, "signal by token", "by second", "gradient by token"], rows)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for step in args.at:
        config, folder = load_config(args.config, [*OURS, f"max_steps={step}", *args.set]), args.output_dir / str(step)
        options: dict[str, Any] = {"resume": True, "console": Console(quiet=True), "timer": time.process_time}
        if not (folder / "summary.json").exists():
            Trainer(config, folder, **options).run()
        rows = [row for row in read_metrics(folder) if row["step"] > FIRST]
        trainer = Trainer(config, folder, **options)
        found = look(trainer, args.batches, fit(rows, COUNTED["tokens, trained"]).tolist())
        known = ", ".join(f"{explained(rows, names):.2f} by {words}" for words, names in COUNTED.items())
        gain = rows[-1]["curriculum/expected_gain"]
        print(f"\nstep {step}: {gain:.2f} times the signal by token expected; of the seconds explained {known}\n")
        print("\n".join(table(found)), flush=True)
