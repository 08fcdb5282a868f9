"""The processes (ranks) that share a run: their interface, which in one process does the plain thing."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from python_trainer.checkpoint import save_checkpoint
from python_trainer.data import Example, Messages, Rollout
from python_trainer.distributed.ranked_engine import RankedEngine
from python_trainer.model.dtype import name_of
from python_trainer.model.packing import micro_batches
from python_trainer.model.policy import Policy, find_dtype, load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.rollout.engine import Engine
from python_trainer.tasks import Task
from python_trainer.tasks.rewards import Scores, score

T = TypeVar("T")


class RankGroup:
    """The processes that share a run. This one is a group of one: every method does the plain thing.

    Several ranks go through the same steps with the same data. They divide what costs time: generation, rewards, and
    the forward and backward passes of an update.

    Attributes:
        rank, size: this process is number ``rank`` out of ``size``.
        name: the setting ``parallel``.
        sharded: whether each rank has a part of the weights and moments only.
    """

    name = "none"
    rank, size = 0, 1
    sharded = False

    def together(self) -> AbstractContextManager[None]:
        """What fails within it on one rank fails on all; nothing within it may wait for other ranks."""
        return nullcontext()

    def all_know(self, error: Exception) -> bool:
        """Whether an error ends all ranks, each of them knowing of it, so that they can still save together."""
        return True

    def first(self, value: T) -> T:
        """What the first rank says."""
        return value

    def once(self, function: Callable[[], T]) -> T:
        """What the first rank's call of it returns: it alone calls, and what fails in that fails on all."""
        said: Any = None
        with self.together():
            if self.rank == 0:
                said = function()
        return self.first(said)

    def any(self, value: T) -> T:
        """The value of the first rank where it is true (or not empty); else that of the first."""
        return value

    def folder(self, output_dir: Path) -> Path:
        """Where this rank writes metrics and the like."""
        return output_dir

    def console(self, console: Console | None) -> Console | None:
        """Where this rank says how far it is."""
        return console

    def engine(self, engine: Engine, policy: Policy) -> Engine:
        """An engine that all ranks call with the same requests, on ``policy.whole``, and that follows ``policy``."""
        return engine if policy.whole is policy.model else RankedEngine(engine, policy)

    def score(
        self, task: Task, examples: Sequence[Example], texts: Sequence[str | Messages], ids: Sequence[Sequence[int]]
    ) -> Scores:
        """As :func:`python_trainer.tasks.rewards.score`, and every answer is judged once."""
        return score(task, examples, texts, ids)

    def micro_batches(
        self, rollouts: Sequence[Rollout], samples: Sequence[int], max_tokens: int, *, share: bool
    ) -> Iterator[tuple[list[int], bool]]:
        """The micro-batches that this rank computes, and whether each counts: some only keep step with other ranks."""
        return ((part, True) for part in micro_batches(rollouts, samples, max_tokens, share=share))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over all ranks."""
        return tensor

    def merge(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers of which each rank knows some; NaN where it does not."""
        return values

    def sum_gradients(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
        """Adds up the gradients of all ranks, where the backward pass has not.

        Args:
            weights: of ``module``, those whose ``grad`` counts.
        """

    def load(self, config: ModelConfig, note: Callable[[str], None]) -> Policy:
        """As :func:`python_trainer.model.policy.load_policy`; all ranks call it together.

        Args:
            note: tells the user of what takes more memory than it might.
        """
        config = self.in_one_dtype(config)
        with self.together():
            return load_policy(config)

    def in_one_dtype(self, config: ModelConfig) -> ModelConfig:
        """With ``model.dtype: auto`` as the type that the first rank would take, whose processor may be another."""
        with self.together():
            mine = name_of(find_dtype(config))
        return config.model_copy(update={"dtype": self.first(mine)})

    def copy(self, module: Any, *, trains: bool) -> Any:
        """A copy of a plain module, of which each rank has as much as of the policy's model."""
        return copy.deepcopy(module).requires_grad_(trains)

    def shard(self, module: torch.nn.Module) -> None:
        """Before an optimizer is made of the parameters of ``module``, which is whole so far."""

    def save(
        self,
        folder: Path,
        step: int,
        state: Mapping[str, Any],
        learned: Mapping[str, Any],
        *,
        keep: int,
        spare: int | None = None,
    ) -> None:
        """Writes a checkpoint: ``state``, the same on all ranks, and ``learned`` by ``Learner.state_dict``.

        ``keep`` and ``spare`` are those of ``save_checkpoint``. Where it cannot be written all ranks say so.
        """
        with self.together():
            if self.rank == 0:
                save_checkpoint(folder, step, {**state, **learned}, keep=keep, spare=spare)
