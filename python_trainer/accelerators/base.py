"""The one interface of everything that makes training cheaper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_trainer.data import PlannedGroup, Rollout

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from python_trainer.config import Config
    from python_trainer.model.optimizer import PolicyOptimizer
    from python_trainer.model.policy import Policy
    from python_trainer.rollout import Engine
    from python_trainer.tasks.base import Task


@dataclass
class StepContext:
    """What an accelerator may see and use in one training step."""

    step: int
    policy: "torch.nn.Module"
    optimizer: "PolicyOptimizer"
    engine: "Engine"
    tokenizer: Any
    evaluate: Any  # evaluate(split: "gate" | "test", limit: int | None) -> accuracy in [0, 1]
    evaluate_each: Any  # the same, as a list of 0 or 1 for each prompt; the noise is the same every time
    seed: int  # of this step: keyed by (run seed, step)
    telemetry: dict[str, float]  # metrics of this step; add your own as "name/metric"
    gate_size: int = 0  # prompts in the gate split
    task: "Task" = None  # type: ignore[assignment]
    config: "Config" = None  # type: ignore[assignment]
    scorer: "Policy" = None  # type: ignore[assignment]  # log-probabilities of answers by the current policy


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
    writes: bool = True  # whether this process writes what all ranks share


class Accelerator:
    """Optional hooks, called in this order within a step. Subclasses override what they need."""

    def __init__(self, settings: Any):
        self.settings = settings

    @property
    def name(self) -> str:
        return self.settings.name

    def begin(self, run: RunContext) -> None:
        """Before the first step of a new run, on its clock; a resumed run calls :meth:`load_state_dict` instead."""

    def plan(self, context: StepContext, groups: list[PlannedGroup]) -> list[PlannedGroup]:
        """Before generation: change prefixes, lengths, order."""
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """After scoring, before advantages: shape rewards, remember answers, mix in others."""
        return rollouts

    def after_update(self, context: StepContext) -> None:
        """After the optimizer step. Whoever changes the weights ends with ``context.engine.policy_updated()``."""

    def summary(self) -> dict[str, Any]:
        """What a finished run should know of it, for ``accelerators.NAME`` in summary.json: numbers, strings, lists."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as tensors, strings, numbers, lists and dictionaries."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undoes :meth:`state_dict`."""
