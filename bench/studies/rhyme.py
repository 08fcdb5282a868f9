"""RhymeRL on `lattice_paths`, with GRPO and with PPO: history of the run itself, and of a smaller policy's run.

Each later arm reads a copy of the smaller run's database; that run's tokens and seconds have their own columns. *s of
rhyme*: the run's seconds inside the accelerator. Percentages are of the stages that stage 1 keeps. The oracle tries
every set on a copy, which no column of tokens counts; ignore its seconds.
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
from rlkernels.sampling.keys import keyed_unit
from tools.policies import lattice_paths

DATABASE = "accelerators.rhyme.database"
RHYME = ["accelerators.enabled=[rhyme]"]
PPO = ["algorithm.advantage=gae", "algorithm.lam=1.0", "critic.learning_rate=1e-3"]
CANDIDATE_SETS = 4  # that the oracle tries in a step
HELD_OUT_PROMPTS = 256  # on which it evaluates each


def prepare(work: Path) -> None:
    """Make the policy with a quarter of the weights, whose run comes first."""
    if not (work / "small" / "tokenizer.json").exists():
        lattice_paths.main(["--size", "small", "--output", str(work / "small")])


class Oracle(GroupSampler):
    """Draw random sets of stored answers, try the step with each, and keep the set with the best accuracy."""

    def __init__(self, trainer: Trainer, sampler: GroupSampler):
        super().__init__(sampler.settings, sampler.retrodictor)
        self.trainer = trainer
        self.attempt = 0

    def mix(self, context: StepContext, rollouts: Sequence[Rollout]) -> list[Rollout]:
        if not self.offers:
            return super().mix(context, rollouts)
        accuracies = []
        for self.attempt in range(CANDIDATE_SETS):
            trial = StepContext(context.run, context.step, context.seed)
            accuracies.append(self.after_update(super().mix(trial, rollouts), context.step))
        self.attempt = accuracies.index(max(accuracies))
        context.telemetry |= {"oracle/gain": max(accuracies) - fmean(accuracies), "oracle/right": max(accuracies)}
        return super().mix(context, rollouts)

    def _ranked(self, context: StepContext, offers: list[Candidate]) -> list[Candidate]:
        keys = [keyed_unit(context.seed, "oracle", self.attempt, i) for i in range(len(offers))]
        return [offers[i] for i in sorted(range(len(offers)), key=keys.__getitem__)]

    def after_update(self, rollouts: Sequence[Rollout], step: int) -> float:
        """Return the accuracy on held-out prompts after an update, which is undone."""
        trainer = self.trainer
        state = copy.deepcopy(trainer.learner.state_dict())
        trainer.learner.update(rollouts, step)
        trainer.engine.policy_updated()
        accuracy = fmean(trainer.evaluator.evaluate_each("gate", range(HELD_OUT_PROMPTS)))
        trainer.learner.load_state_dict(state)
        trainer.engine.policy_updated()
        return accuracy


def with_database(overrides: Sequence[str], folder: Path) -> list[str]:
    """Give a run its own database, which starts as a copy of the one in its settings, if any."""
    path = folder.with_name(f"{folder.name}.db")
    earlier_path = dict(text.split("=", 1) for text in overrides).get(DATABASE)
    if earlier_path is not None and not path.exists():
        shutil.copy(earlier_path, path)
    return [*overrides, f"{DATABASE}={path}"]


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
    """Return the run's seconds inside the accelerator, and their share."""
    summary = json.loads((run / "summary.json").read_text())
    seconds = summary["accelerator_s"].get("rhyme", 0.0)
    return {"s of rhyme": seconds, "share of rhyme": seconds / summary["training_s"]}


def after_smaller(name: str, *settings: str, train: Callable[..., None] = train) -> Arm:
    """Make an arm that has the database of the smaller run."""
    return Arm(name, [*RHYME, f"{DATABASE}={{earlier}}.db", *settings], after="smaller", train=train)


def arms() -> list[Arm]:
    selections = [f"accelerators.rhyme.{setting}" for setting in ("selection=random", "selection=retrodiction")]
    shares = [(share, f"accelerators.rhyme.fraction={share / 100}") for share in (5, 100)]
    return [
        Arm("plain"),
        *fewer_prompts(16),
        Arm("rhyme", RHYME),
        after_smaller("rhyme after the smaller run"),
        *(after_smaller(f"after it, {text.rpartition('.')[2].replace('=', ' ')}", text) for text in selections),
        *(after_smaller(f"after it, {share} % of stages", text) for share, text in shares),
        after_smaller("after it, an oracle", train=train_with_oracle),
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
