"""Several processes (ranks), each with all weights: ``parallel: ddp``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from python_trainer.data import Example, Messages, Rollout
from python_trainer.distributed.group import RankGroup
from python_trainer.distributed.ranked_engine import RankedEngine
from python_trainer.errors import UserError, is_shared, kind_of, mark_shared
from python_trainer.model.packing import micro_batches, split_evenly
from python_trainer.model.policy import Policy
from python_trainer.rollout.engine import Engine
from python_trainer.tasks import Task
from python_trainer.tasks.rewards import Scores, score

T = TypeVar("T")

BUCKET_ELEMENTS = 1 << 24  # gradients that are sent at once
ALONE = "no rank waits for others within together(): one that has failed there would not come"


class Replicated(RankGroup):
    """The ranks of the default process group; all end an update with the same weights, to the bit.

    Every rank knows all answers of a step and computes the advantages of all of them. It trains on a stretch of the
    samples, with the weights that their tokens have in the whole batch; gradients are added up in float32.
    """

    name = "ddp"
    lockstep = False  # whether all ranks must compute as many micro-batches

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._apart = False  # within together()
        self._aside: TemporaryDirectory[str] | None = None

    def gather(self, value: T) -> list[T]:
        """What every rank says, by rank."""
        assert not self._apart, ALONE
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error is raised as it is where it came up, and elsewhere as an error of its kind, or a UserError."""
        assert not self._apart, ALONE
        problem: Exception | None = None
        self._apart = True
        try:
            yield
        except Exception as error:
            problem = error
        finally:
            self._apart = False
        said = self.gather(None if problem is None else _as_told(problem))
        for rank, told in enumerate(said):
            if problem is None and told is not None:
                kind, text = told
                problem = kind(f"process {rank} of {self.size}: {text}")
        if problem is not None:
            mark_shared(problem)
            raise problem

    def all_know(self, error: Exception) -> bool:
        return self.size == 1 or isinstance(error, UserError) or is_shared(error)

    def first(self, value: T) -> T:
        assert not self._apart, ALONE
        said = [value]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def any(self, value: T) -> T:
        said = self.gather(value)
        return next((x for x in said if x), said[0])

    def folder(self, output_dir: Path) -> Path:
        """The run directory is written by the first rank; others write into a folder that goes when they end."""
        if self.rank == 0:
            return output_dir
        self._aside = self._aside or TemporaryDirectory(prefix="rlkernels-rank-")
        return Path(self._aside.name)

    def console(self, console: Console | None) -> Console | None:
        return console if self.rank == 0 else Console(quiet=True)

    def engine(self, engine: Engine, policy: Policy) -> Engine:
        return RankedEngine(engine, policy, self)

    def score(
        self, task: Task, examples: Sequence[Example], texts: Sequence[str | Messages], ids: Sequence[Sequence[int]]
    ) -> Scores:
        bounds = [self._group_start(examples, rank * len(texts) // self.size) for rank in range(self.size + 1)]
        part = slice(bounds[self.rank], bounds[self.rank + 1])
        scores = None
        with self.together():
            if texts[part]:
                scores = score(task, examples[part], texts[part], ids[part])
        found = [scores for scores in self.gather(scores) if scores is not None]
        total = [x for scores in found for x in scores.total]
        return Scores(
            {name: [x for scores in found for x in scores.rewards[name]] for name in task.reward_functions},
            total,
            [x for scores in found for x in scores.accuracy],
            None if all(scores.merit is None for scores in found) else total,
        )

    @staticmethod
    def _group_start(examples: Sequence[Example], index: int) -> int:
        """From ``index`` on, the first answer to another example: answers to one are judged by one rank."""
        while 0 < index < len(examples) and examples[index].prompt is examples[index - 1].prompt:
            index += 1
        return index

    def micro_batches(
        self, rollouts: Sequence[Rollout], samples: Sequence[int], max_tokens: int, *, share: bool
    ) -> Iterator[tuple[list[int], bool]]:
        stretches = split_evenly(rollouts, samples, self.size, share=share)
        parts = [list(micro_batches(rollouts, stretch, max_tokens, share=share)) for stretch in stretches]
        yield from ((part, True) for part in parts[self.rank])
        if self.lockstep:
            shortest = min(samples, key=lambda i: len(rollouts[i].prompt_ids) + len(rollouts[i].response_ids))
            yield from [([shortest], False)] * (max(map(len, parts)) - len(parts[self.rank]))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        reduced = tensor.detach().clone()
        dist.all_reduce(reduced, operation)
        return reduced

    def merge(self, values: torch.Tensor) -> torch.Tensor:
        known = ~values.isnan()
        total = self.sum(torch.where(known, values, 0.0))
        return torch.where(self.max(known.float()) > 0, total, torch.nan)

    @torch.no_grad()
    def sum_gradients(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
        # a rank without samples has no gradients at all, a parameter that nothing uses has none anywhere
        used = self.max(torch.tensor([float(w.grad is not None) for w in weights], device=weights[0].device))
        bucket: list[torch.Tensor] = []
        elements = 0
        for weight, has in zip(weights, used.tolist()):
            if has:
                bucket.append(weight)
                elements += weight.numel()
            if elements >= BUCKET_ELEMENTS:
                self._sum_bucket(bucket)
                bucket, elements = [], 0
        self._sum_bucket(bucket)

    def _sum_bucket(self, weights: Sequence[torch.Tensor]) -> None:
        if not weights:
            return
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for weight, total in zip(weights, flat.split([w.numel() for w in weights])):
            weight.grad = total.view_as(weight)


def _as_told(error: Exception) -> tuple[type[Exception], str]:
    """What ranks without an error raise for this one."""
    kind, name = kind_of(error), type(error).__name__
    return (UserError, f"{name}: {error}") if kind is None else (kind, str(error) or name)
