"""The one interface of everything that makes training cheaper."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from python_trainer.data import Example, Group, Rollout
from python_trainer.rollout.settings import RolloutConfig
from python_trainer.tasks.base import Task
from python_trainer.tasks.rewards import Scores

if TYPE_CHECKING:
    from rich.console import Console

    from python_trainer.model.optimizer import PolicyOptimizer
    from python_trainer.model.policy import Policy
    from python_trainer.rollout.engine import Engine

Once = Callable[[Callable[[], Any]], Any]  # what a function returns that the first rank calls, and no other
# examples, texts, token ids -> what each answer is worth to the loss
Judge = Callable[[Sequence[Example], Sequence[str], Sequence[Sequence[int]]], Scores]


@dataclass
class StepContext:
    """What an accelerator may see and use in one training step.

    Attributes:
        seed: of this step: keyed by (run seed, step).
        telemetry: metrics of this step; add your own as "name/metric".
        evaluate_each: (split, rows) -> for each prompt of "gate" or "test" 1 where it is answered right, else 0, or the
            raw reward where nothing is right or wrong; the noise is the same every time.
        groups_of: numbers of training prompts -> the usual request for answers to each.
        plain_order: count -> numbers of the next training prompts in plain order, which moves on by them.
        generation: the section ``rollout`` of the settings.
        micro_batch_tokens: how many tokens a pass of training may have.
        max_steps: of the run.
        once: calls a function on the first rank alone -> what it returned, on all; for files and databases.
        facts: what describes the run in a database: ``algorithm``, ``settings`` (without those of accelerators).
        rules: what decides the reward of an answer; answers judged by other rules have to be judged again.
    """

    step: int
    policy: "Policy"
    optimizer: "PolicyOptimizer"
    engine: "Engine"
    task: Task
    seed: int
    judge: Judge
    evaluate_each: Callable[[str, range | None], list[float]]
    groups_of: Callable[[Sequence[int]], list[Group]]
    plain_order: Callable[[int], list[int]]
    generation: RolloutConfig
    micro_batch_tokens: int
    max_steps: int
    once: Once
    facts: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    telemetry: dict[str, float] = field(default_factory=dict)
    samples: int = 0  # asked for so far, in all rounds of dynamic sampling


@dataclass
class RunContext:
    """What an accelerator may see and use before the first step of a run."""

    output_dir: Path
    tokenizer: Any
    prompts: list[list[int]]  # token ids of the training prompts; a prompt key is an index into it
    answer: Callable[[Sequence[int], int], list[Rollout]]
    # (prompt keys, number of the attempt) -> one whole answer each by the policy, scored
    seed: int
    console: "Console"
    once: Once  # as of StepContext


class Accelerator:
    """Optional hooks, called in this order within a step. Subclasses override what they need."""

    watches: ClassVar[bool] = False
    """Whether training is the same without it: a run may be resumed with it or without."""
    numbers_prompts: ClassVar[bool] = True
    """Whether its state names training prompts by their numbers: a run is then not resumed with other prompts."""

    def __init__(self, settings: Any):
        self.settings = settings

    @property
    def name(self) -> str:
        return self.settings.name

    def begin(self, run: RunContext) -> None:
        """Before the first step of a new run, on its clock; a resumed run calls :meth:`load_state_dict` instead."""

    def rehearse(self, context: StepContext) -> list[list[Rollout]]:
        """Before a step generates: stored answers to train on by themselves, an update each, as of :meth:`replay`."""
        return []

    def choose(self, context: StepContext, count: int) -> list[Group] | None:
        """Which ``count`` prompts come next, where they start and how many answers they get; None: no opinion."""
        return None

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        """Before generation: change prefixes, lengths, order."""
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """After scoring, before advantages: shape rewards, remember answers, mix in others."""
        return rollouts

    def replay(self, context: StepContext, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """After all have collected: stored answers to train on beside these, each a group of its own.

        They say how often their prompt is answered right, ``expected``, which they are judged against. Whoever needs
        the groups as they will be trained on looks at them here.
        """
        return []

    def after_update(self, context: StepContext) -> None:
        """After the optimizer step. Whoever changes the weights ends with ``context.engine.policy_updated()``."""

    def summary(self) -> dict[str, Any]:
        """What a finished run should know of it, for ``accelerators.NAME`` in summary.json: numbers, strings, lists."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as tensors, strings, numbers, lists and dictionaries."""
        return {}

    def snapshot(self) -> dict[str, Any]:
        """As :meth:`state_dict`, and what the hooks up to ``replay`` do later changes nothing in it."""
        return copy.deepcopy(self.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undoes :meth:`state_dict`."""
