"""One op on one set of inputs, and the rule that decides whether a backend computes it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

PIECE = 1 << 26  # numbers compared at a time: float64 copies of a large output would not fit
Verdict = tuple[float, float]  # largest error, and the error that is allowed


@dataclass
class Problem:
    """An op with its inputs bound, on the device."""

    call: Callable[[str], Any]  # backend -> output (a tensor, or a tuple of tensors and numbers)
    # the same from float64 inputs through the reference; None: ``call("torch")`` is exact enough
    exact: Callable[[], Any] | None = None
    reset: Callable[[], Any] | None = None  # restores inputs that the op changes; ``call`` then returns these
    # (output, output of plain torch) -> verdict, in place of the rule of :class:`Tolerance`
    judge: Callable[[list[torch.Tensor], list[torch.Tensor]], Verdict] | None = None
    nbytes: float = 0.0  # that the op must move at least
    flops: float = 0.0  # operations on ``dtype`` that it must do at least
    dtype: torch.dtype = torch.float32
    floor: float = 2e-6  # error, relative to the largest magnitude (0.01 at least), that is always allowed
    inputs: dict[str, Any] = field(default_factory=dict)  # named, for others that compute the same


@dataclass(frozen=True)
class Case:
    """``make(device)`` builds the problem. Small cases have odd shapes and are checked; timed ones are large."""

    op: str
    label: str
    make: Callable[[torch.device], Problem]
    timed: bool = False
    recorded: bool = False  # runs inside CUDA graphs: timed by replay, where it can be recorded


def leaves(output: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors and numbers of an output, as tensors without history."""
    if isinstance(output, (tuple, list)):
        for item in output:
            yield from leaves(item)
    else:
        yield torch.as_tensor(output).detach()


def copy(output: Any) -> list[torch.Tensor]:
    """Copy the leaves of an output in memory of their own."""
    return [leaf.clone() for leaf in leaves(output)]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Tell whether two outputs are equal to the bit; NaN equals NaN."""
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan()) for x, y in zip(a, b))


def largest_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference; infinite where the shape, NaN, infinities or integers differ."""
    if ours.shape != exact.shape:
        return math.inf
    exact = exact.to(ours.device)
    if not ours.dtype.is_floating_point or not exact.dtype.is_floating_point:
        return 0.0 if torch.equal(ours.to(exact.dtype), exact) else math.inf
    pieces = zip(ours.flatten().split(PIECE), exact.flatten().split(PIECE))
    return max((_largest_error(a.double(), b.double()) for a, b in pieces), default=0.0)


def _largest_error(a: torch.Tensor, b: torch.Tensor) -> float:
    errors = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0)
    return errors.nan_to_num(math.inf, math.inf).max().item() if errors.numel() else 0.0


def _largest(exact: torch.Tensor) -> float:
    pieces = exact.flatten().split(PIECE)
    return max((piece.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for piece in pieces if piece.numel()), default=0.0)


class Tolerance:
    """Judges outputs of a problem. Plain torch and the exact reference run once, when the gate is made.

    The rule: an error of at most twice that of plain torch in the same dtype plus ``floor``, both against the exact
    reference. Integers must be equal.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        if problem.reset:
            problem.reset()
        plain = problem.call("torch")
        self.plain = copy(plain) if problem.reset else list(leaves(plain))
        if problem.judge:
            return
        if problem.reset:
            problem.reset()
        self.exact = list(leaves(problem.exact())) if problem.exact else self.plain
        self.allowed: list[float] = []
        for theirs, gold in zip(self.plain, self.exact) if len(self.exact) == len(self.plain) else ():
            allowed = 2 * largest_error(theirs, gold) + problem.floor * max(_largest(gold), 0.01)
            self.allowed.append(allowed if math.isfinite(allowed) and gold.dtype.is_floating_point else 0.0)

    def judge(self, output: Any, dtypes: list[torch.dtype] | None = None) -> Verdict:
        """Return the verdict on an output of the op; of several tensors the one closest to failing.

        ``dtypes``: what the tensors must be, by default the dtypes of plain torch; another length is wrong.
        """
        ours = list(leaves(output))
        if self.problem.judge:
            return self.problem.judge(ours, self.plain)
        dtypes = [theirs.dtype for theirs in self.plain] if dtypes is None else dtypes
        if len(ours) != len(dtypes):
            return math.inf, 0.0
        found = [
            (largest_error(mine, gold) if mine.dtype == dtype else math.inf, allowed)
            for mine, gold, allowed, dtype in zip(ours, self.exact, self.allowed, dtypes)
        ]
        return max(found, key=_closeness, default=(0.0, 0.0))


def _closeness(verdict: Verdict) -> float:
    error, allowed = verdict
    return error / allowed if allowed else math.inf if error else 0.0


def poison(device: torch.device) -> None:
    """Leaves NaN in freed memory: a kernel that writes nothing cannot find an earlier result there."""
    blocks = [torch.full((n,), math.nan, device=device) for n in (2**10, 2**16, 2**20, 2**22)]
    del blocks


def check(problem: Problem, backend: str, device: torch.device) -> tuple[Verdict, bool]:
    """Runs a backend twice on poisoned memory, then judges it -> (verdict, whether both runs gave the same bits)."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # from here on torch.empty gives NaN, in C++ too
    try:
        found = []
        for _ in range(2):
            if problem.reset:
                problem.reset()
            poison(device)
            found.append(copy(problem.call(backend)))
        poison(device)
        gate = Tolerance(problem)
    finally:
        torch.use_deterministic_algorithms(False)
    return gate.judge(found[0]), same_bits(*found)
