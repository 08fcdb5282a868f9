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

ALONE = "no rank waits for others within together(): one that has failed there would not come"


class RankGroup:
    """The processes that share a run; all end an update with the same weights, to the bit.

    Every rank goes through the same steps, knows all answers of a step and computes the advantages of all of them.
    Ranks divide generation, rewards, and the forward and backward passes of an update; gradients are added up in
    float32. In a group of one every method does the plain thing.

    Args:
        name: the setting ``parallel``; "none" is one process without a process group.

    Attributes:
        rank, size: this process is number ``rank`` out of ``size``.
        sharded: each rank has a part of the weights and moments only; all must compute as many micro-batches.
        entered: collectives that this rank has entered here; ``waits``: it has not left the newest one.
    """

    sharded = False
    stores = 0  # made in this process

    def __init__(self, name: str = "none"):
        self.name = name
        self.rank, self.size = (0, 1) if name == "none" else (dist.get_rank(), dist.get_world_size())
        self.entered, self.waits = 0, False
        self.group: dist.ProcessGroup | None = None  # None: torch's default one
        self._apart = False  # within together()
        self._aside: TemporaryDirectory[str] | None = None

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
        assert not self._apart, ALONE
        self.entered, self.waits = self.entered + 1, True
        try:
            yield
        finally:
            self.waits = False

    def gather(self, value: T) -> list[T]:
        """Returns the value of every rank, by rank."""
        found: list[Any] = [value] * self.size
        with self._collective():
            if self.size > 1:
                dist.all_gather_object(found, value, group=self.group)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Makes all ranks fail where one fails; nothing within it may wait for other ranks.

        An error is raised as it is where it came up, and elsewhere as an error of its kind, or a UserError.
        """
        if self.size == 1:
            yield
            return
        assert not self._apart, ALONE
        problem, mine = None, None  # the error, and what ranks without one raise for it
        self._apart = True
        try:
            yield
        except Exception as error:
            problem, kind, name = error, kind_of(error), type(error).__name__
            mine = (UserError, f"{name}: {error}") if kind is None else (kind, str(error) or name)
        finally:
            self._apart = False
        for rank, report in enumerate(self.gather(mine)):
            if problem is None and report is not None:
                kind, text = report
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
        every = self.gather({**shown, **hidden})
        others = [rank for rank, facts in enumerate(every) if facts != every[0]]
        if not others:
            return
        names = dict.fromkeys(name for facts in every for name in facts)
        values = {name: [every[rank].get(name, "missing") for rank in (0, others[0])] for name in names}
        differing = [
            f"{name} ({there}, not {here})" if name in shown else name
            for name, (here, there) in values.items()
            if here != there
        ]
        who = f"process{'es' * (len(others) > 1)} {', '.join(map(str, others))} of {self.size}"
        verb = "differ" if len(others) > 1 else "differs"
        error = UserError(f"{who} {verb} from process 0 in {', '.join(differing)}")
        mark_shared(error)
        raise error

    def first(self, value: T) -> T:
        """Returns the value of rank 0."""
        sent = [value]
        with self._collective():
            if self.size > 1:
                dist.broadcast_object_list(sent, src=0, group=self.group)
        return sent[0]

    def once(self, function: Callable[[], T]) -> T:
        """Returns what the call of rank 0 returns: it alone calls, and what fails there fails on all ranks."""
        found: Any = None
        with self.together():
            if self.rank == 0:
                found = function()
        return self.first(found)

    def folder(self, output_dir: Path) -> Path:
        """Returns where this rank writes: rank 0 into the run directory, others into a folder that goes in the end."""
        if self.rank == 0:
            return output_dir
        self._aside = self._aside or TemporaryDirectory(prefix="rlkernels-rank-")
        return Path(self._aside.name)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        with self._collective():
            dist.all_reduce(total)
        return total

    def merge(self, values: torch.Tensor) -> torch.Tensor:
        """Returns numbers of which each rank knows some and has NaN in the place of the others."""
        known = ~values.isnan()
        total = self.sum(torch.where(known, values, 0.0))
        return torch.where(self.sum(known.float()) > 0, total, torch.nan)

    @torch.no_grad()
    def sum_gradients(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
        """Adds up the gradients of all ranks, where the backward pass has not."""
        if self.size == 1:
            return
        # a rank without samples has no gradients at all, a parameter that nothing uses has none anywhere
        used = self.sum(torch.tensor([float(w.grad is not None) for w in weights], device=weights[0].device))
        sums = []
        for weight, has in zip(weights, used.tolist()):
            if has:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                sums.append(dist.all_reduce(weight.grad, async_op=True))
        for work in sums:
            work.wait()

    def load(self, config: ModelConfig, *, offload: bool = False) -> Policy:
        """Loads the policy, as :func:`python_trainer.model.policy.load_policy`; all ranks call it together."""
        with self.together():
            return load_policy(config)

    def copy(self, module: Any, *, trains: bool) -> Any:
        """Copies a plain module; each rank has as much of it as of the policy's model."""
        return copy.deepcopy(module).requires_grad_(trains)

    def shard(self, module: torch.nn.Module) -> None:
        """Cuts a module that is whole so far, before an optimizer is made of its parameters."""
