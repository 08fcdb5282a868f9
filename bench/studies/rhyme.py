"""RhymeRL on `lattice_paths`, with GRPO and with PPO: history of the run itself, and of a smaller policy's run.

Every arm reads a copy of the database that the smaller run has left; its tokens and seconds are shown apart. *s of
rhyme*: seconds within the accelerator, of all that the run took. Shares are of the stages that stage 1 keeps. The
oracle tries every set on a copy, which no column of tokens counts; its seconds say nothing.
"""

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench._turns import Turns
from bench.studies import harness
from bench.studies.harness import Arm, Study, fewer_prompts
from python_trainer import Trainer
from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.rhyme.sampling import Candidate, GroupSampler
from python_trainer.data import Rollout
from python_trainer.keyed import keyed_unit
from tools.policies import lattice_paths

DATABASE = "accelerators.rhyme.database"
RHYME = ["accelerators.enabled=[rhyme]"]
PPO = ["algorithm.advantage=gae", "algorithm.lam=1.0", "critic.learning_rate=1e-3"]
SETS, HELD_OUT = 4, 256  # candidate sets that the oracle tries in a step, prompts on which it looks at each


def prepare(work: Path) -> None:
    """Make the policy of a quarter of the weights, whose run comes first."""
    if not (work / "small" / "tokenizer.json").exists():
        lattice_paths.main(["--size", "small", "--output", str(work / "small")])


class Oracle(GroupSampler):
    """Draws sets of stored answers at random, takes the step with each, and keeps the set after which most is right."""

    def __init__(self, trainer: Trainer, sampler: GroupSampler):
        super().__init__(sampler.settings, sampler.retrodictor)
        self.trainer, self.attempt = trainer, 0

    def mix(self, context: StepContext, rollouts: Sequence[Rollout]) -> list[Rollout]:
        if not self.offers:
            return super().mix(context, rollouts)
        right = []
        for self.attempt in range(SETS):
            trial = StepContext(context.run, context.step, context.seed)
            right.append(self.after_update(super().mix(trial, rollouts), context.step))
        self.attempt = right.index(max(right))
        context.telemetry |= {"oracle/gain": max(right) - fmean(right), "oracle/right": max(right)}
        return super().mix(context, rollouts)

    def _ranked(self, context: StepContext, offers: list[Candidate]) -> list[Candidate]:
        keys = [keyed_unit(context.seed, "oracle", self.attempt, i) for i in range(len(offers))]
        return [offers[i] for i in sorted(range(len(offers)), key=keys.__getitem__)]

    def after_update(self, rollouts: Sequence[Rollout], step: int) -> float:
        """Return the share of held-out prompts that the policy answers right after an update, which is undone."""
        trainer = self.trainer
        before = copy.deepcopy(trainer.learner.state_dict())
        trainer.learner.update(rollouts, step)
        trainer.engine.policy_updated()
        right = fmean(trainer.evaluator.evaluate_each("gate", range(HELD_OUT)))
        trainer.learner.load_state_dict(before)
        trainer.engine.policy_updated()
        return right


def with_database(overrides: Sequence[str], folder: Path) -> list[str]:
    """Give a run a database of its own, which begins as a copy of the one that its settings name, if any."""
    own = folder.with_name(f"{folder.name}.db")
    named = dict(text.split("=", 1) for text in overrides).get(DATABASE)
    if named is not None and not own.exists():
        shutil.copy(named, own)
    return [*overrides, f"{DATABASE}={own}"]


def train(turns: Turns, config: str, overrides: Sequence[str], folder: Path) -> None:
    """Train a run on its own database."""
    harness.train(turns, config, with_database(overrides, folder), folder)


def train_with_oracle(turns: Turns, config: str, overrides: Sequence[str], folder: Path) -> None:
    """Train a run whose stored answers an oracle chooses."""
    trainer = harness.trainer_of(turns, config, with_database(overrides, folder), folder)
    rhyme: Any = trainer.accelerators[0]
    rhyme.groups = Oracle(trainer, rhyme.groups)
    trainer.run()


def measure(run: Path) -> dict[str, float]:
    """Return what the accelerator took of the run's seconds."""
    summary = json.loads((run / "summary.json").read_text())
    spent = summary["accelerator_s"].get("rhyme", 0.0)
    return {"s of rhyme": spent, "share of rhyme": spent / summary["training_s"]}


def after(name: str, *settings: str, train: Callable[..., None] = train) -> Arm:
    """An arm that has the database of the smaller run."""
    return Arm(name, [*RHYME, f"{DATABASE}={{earlier}}.db", *settings], after="smaller", train=train)


def arms() -> list[Arm]:
    chosen = [f"accelerators.rhyme.{setting}" for setting in ("selection=random", "selection=retrodiction")]
    shares = [(share, f"accelerators.rhyme.fraction={share / 100}") for share in (5, 100)]
    return [
        Arm("plain"),
        *fewer_prompts(16),
        Arm("rhyme", RHYME),
        after("rhyme after the smaller run"),
        *(after(f"after it, {text.rpartition('.')[2].replace('=', ' ')}", text) for text in chosen),
        *(after(f"after it, {share} % of stages", text) for share, text in shares),
        after("after it, an oracle", train=train_with_oracle),
    ]


STUDIES = [
    Study(
        name=name,
        config="configs/lattice_paths.yaml",
        common=["task.test_size=2048", "save.save_total_limit=1", *settings],
        arms=arms(),
        levels=levels,
        earlier=[Arm("smaller", ["model.path={work}/small"], rate=2.8e-4, train=train)],
        rates=(1.4e-4, 2.8e-4, 5.6e-4),
        tuning_steps=60,
        prepare=prepare,
        columns={"stored": "rhyme/stored_answers", "rehearsed": "rhyme/rehearsed_answers"},
        measure=measure,
    )
    for name, settings, levels in (("grpo", ["max_steps=160"], (0.6, 0.7)), ("ppo", ["max_steps=80", *PPO], (0.4, 0.5)))
]
