"""The processes (ranks) that share a run: one, or those that torchrun started, each with all weights (``ddp``)."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from python_trainer.errors import UserError, kind_of, mark_shared
from python_trainer.model.policy import Policy, load_policy
from python_trainer.model.settings import ModelConfig

T = TypeVar("T")

NO_COLLECTIVE = "no collective within fail_together(): a failed rank would never reach it"


class RankGroup:
    """The processes that share a run; all end an update with the same weights, to the bit.

    Every rank goes through the same steps, knows all answers of a step and computes the advantages of all of them.
    Ranks divide generation, rewards, and the forward and backward passes of an update; gradients are added up in
    float32. In a group of one every method does the plain thing.

    Args:
        name: the setting ``parallel``; "none" is one process without a process group.

    Attributes:
        rank, size: this process is number ``rank`` out of ``size``.
        sharded: each rank holds a part of weights and moments; all must compute equally many micro-batches.
        entered: collectives that this rank has entered here; ``waits``: it has not left the newest one.
    """

    sharded = False
    stores = 0  # how many this process has made

    def __init__(self, name: str = "none"):
        self.name = name
        self.rank, self.size = (0, 1) if name == "none" else (dist.get_rank(), dist.get_world_size())
        self.entered = 0
        self.waits = False
        self.group: dist.ProcessGroup | None = None  # None: torch's default one
        self._fails_together = False  # within fail_together()
        self._temporary: TemporaryDirectory[str] | None = None

    def for_thread(self) -> "RankGroup":
        """Return the same ranks for a thread beside the main one, whose calls need not come in the main one's order."""
        ranks = copy.copy(self)
        ranks.group = dist.new_group(backend="gloo")
        return ranks

    def store_for_thread(self) -> Any:
        """Return a store of keys that all ranks share, for one thread; each call on every rank makes another."""
        from torch.distributed.distributed_c10d import _get_default_store

        RankGroup.stores += 1
        return dist.PrefixStore(f"thread {RankGroup.stores}", _get_default_store().clone())  # type: ignore[attr-defined]

    @contextmanager
    def _collective(self) -> Iterator[None]:
        assert not self._fails_together, NO_COLLECTIVE
        self.entered += 1
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, by rank."""
        values: list[Any] = [value] * self.size
        with self._collective():
            if self.size > 1:
                dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Make all ranks fail where one fails; nothing within the block may wait for other ranks.

        The failed rank raises its error as it is; the others raise an error of its kind, or a UserError.
        """
        if self.size == 1:
            yield
            return
        assert not self._fails_together, NO_COLLECTIVE
        problem: Exception | None = None
        report: tuple[type[Exception], str] | None = None  # the error that other ranks raise for it
        self._fails_together = True
        try:
            yield
        except Exception as error:
            problem = error
            name = type(error).__name__
            kind = kind_of(error)
            report = (UserError, f"{name}: {error}") if kind is None else (kind, str(error) or name)
        finally:
            self._fails_together = False
        for rank, rank_report in enumerate(self.gather(report)):
            if problem is None and rank_report is not None:
                kind, text = rank_report
                problem = kind(f"process {rank} of {self.size}: {text}")
        if problem is not None:
            mark_shared(problem)
            raise problem

    def check_equal(self, shown: Mapping[str, Any], hidden: Mapping[str, Any]) -> None:
        """Compare facts of all ranks by their names.

        Args:
            shown: facts whose values a message may show; those of ``hidden`` are digests.

        Raises:
            UserError: they differ; on all ranks.
        """
        rank_facts = self.gather({**shown, **hidden})
        differing = [rank for rank, facts in enumerate(rank_facts) if facts != rank_facts[0]]
        if not differing:
            return
        problems = []
        for name in dict.fromkeys(name for facts in rank_facts for name in facts):
            expected, value = (rank_facts[rank].get(name, "missing") for rank in (0, differing[0]))
            if value != expected:
                problems.append(f"{name} ({value}, not {expected})" if name in shown else name)
        plural = len(differing) > 1
        processes = f"process{'es' if plural else ''} {', '.join(map(str, differing))} of {self.size}"
        verb = "differ" if plural else "differs"
        error = UserError(f"{processes} {verb} from process 0 in {', '.join(problems)}")
        mark_shared(error)
        raise error

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        values = [value]
        with self._collective():
            if self.size > 1:
                dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Call the function on rank 0 only, and return its result on all ranks; if it fails, all ranks fail."""
        result: Any = None
        with self.fail_together():
            if self.rank == 0:
                result = function()
        return self.broadcast(result)

    def folder(self, output_dir: Path) -> Path:
        """Return where this rank writes: rank 0 to the run directory, others to a temporary folder."""
        if self.rank == 0:
            return output_dir
        self._temporary = self._temporary or TemporaryDirectory(prefix="rlkernels-rank-")
        return Path(self._temporary.name)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        with self._collective():
            dist.all_reduce(total)
        return total

    def merge(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor of which each rank knows some numbers, and has NaN in place of the others."""
        known = ~values.isnan()
        total = self.sum(torch.where(known, values, 0.0))
        return torch.where(self.sum(known.float()) > 0, total, torch.nan)

    @torch.no_grad()
    def sum_gradients(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
        """Add up the gradients of all ranks, unless the backward pass has done so."""
        if self.size == 1:
            return
        # a rank without samples has no gradients at all, a parameter that nothing uses has none anywhere
        used = self.sum(torch.tensor([float(w.grad is not None) for w in weights], device=weights[0].device))
        sums = []
        for weight, is_used in zip(weights, used.tolist()):
            if is_used:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                sums.append(dist.all_reduce(weight.grad, async_op=True))
        for work in sums:
            work.wait()

    def load(self, config: ModelConfig, *, offload: bool = False) -> Policy:
        """Load the policy, as :func:`python_trainer.model.policy.load_policy`; all ranks call it together."""
        with self.fail_together():
            return load_policy(config)

    def copy(self, module: Any, *, trains: bool) -> Any:
        """Copy a plain module; each rank has as much of it as of the policy's model."""
        return copy.deepcopy(module).requires_grad_(trains)

    def shard(self, module: torch.nn.Module) -> None:
        """Cut a whole module into shards, before an optimizer takes its parameters."""
