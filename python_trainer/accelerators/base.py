"""The one interface of everything that makes training cheaper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_trainer.data import Example, Group, Rollout
from python_trainer.tasks.base import Task
from python_trainer.tasks.rewards import Scores

if TYPE_CHECKING:
    from python_trainer.model.optimizer import MasterWeightAdamW
    from python_trainer.model.policy import Policy
    from python_trainer.rollout.engine import Engine


@dataclass
class RunContext:
    """The parts of a run that accelerators use.

    Attributes:
        prompts: token ids of the training prompts; a prompt index is an index into it, and into ``task.train``.
        answer: (prompt indices, number of the attempt) -> one whole answer each by the policy, scored.
        score_stored: (examples, texts, token ids) -> scores of stored answers, with rewards as the advantages see them.
        evaluate_each: (split, rows) -> for each prompt of "gate" or "test" 1 if it is answered right, else 0, or the
            raw reward if nothing is right or wrong; the noise is the same every time.
        on_rank0: calls a function on rank 0 -> what it returned, on all ranks; for files and databases.
        note: prints a line for the user.
        seconds: -> seconds of training so far, without evaluations.
    """

    config: Any
    folder: Path
    task: Task
    prompts: list[list[int]]
    policy: "Policy"
    optimizer: "MasterWeightAdamW"
    engine: "Engine"
    answer: Callable[[Sequence[int], int], list[Rollout]]
    score_stored: Callable[[Sequence[Example], Sequence[str], Sequence[Sequence[int]]], Scores]
    evaluate_each: Callable[[str, range], list[float]]
    on_rank0: Callable[[Callable[[], Any]], Any]
    note: Callable[[str], None]
    seconds: Callable[[], float]


@dataclass
class StepContext:
    """One training step. Its seed is keyed by (run seed, step); metrics of an accelerator are named "name/metric"."""

    run: RunContext
    step: int
    seed: int
    telemetry: dict[str, float] = field(default_factory=dict)

    def count(self, metric: str, amount: float) -> None:
        """Add to a metric, which grows over the rounds of dynamic sampling."""
        self.telemetry[metric] = self.telemetry.get(metric, 0.0) + amount


class Accelerator:
    """Optional hooks. Subclasses override what they need.

    Within a step they are called in the order below, with dynamic sampling ``plan`` and ``collect`` once a round.
    ``collect`` goes through the accelerators in reverse: the one that planned first sees what the others added.
    """

    enabled = True  # false: it takes part only to record the run, and training is the same without it

    def __init__(self, settings: Any):
        self.settings = settings

    @property
    def name(self) -> str:
        return self.settings.name

    def begin(self, run: RunContext) -> None:
        """Prepare a new run, on its clock. A resumed run calls :meth:`load_state_dict` instead."""

    def before_step(self, context: StepContext) -> list[list[Rollout]]:
        """Return batches of stored answers to train on alone, an update each, before the step generates.

        Each has a ``success_rate``, that of its prompt, which is its baseline.
        """
        return []

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        """Change prefixes, lengths, numbers of answers or drafts before generation."""
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """Shape rewards, remember answers, and mix in others, after scoring and before advantages.

        A stored answer joins the group whose number it has. One with a ``success_rate`` is a group of its own.
        """
        return rollouts

    def after_update(self, context: StepContext) -> None:
        """Act on the new weights. This hook alone may change them, and then ends with ``engine.policy_updated()``."""

    def summary(self) -> dict[str, Any]:
        """Return what a finished run should know, for ``accelerators.NAME`` in summary.json."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as tensors, strings, numbers, lists and dictionaries.

        Later steps must not change its tensors in place. Its lists and dictionaries are copied.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
