"""One op on one set of inputs, and the rule that decides whether somebody computes it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

PIECE = 1 << 26  # numbers that are compared at a time: float64 copies of a large output would not fit


@dataclass(frozen=True)
class Rival:
    """Somebody else's way to compute the same.

    Attributes:
        make: prepares the inputs, untimed, and returns the call.
        outputs: from what the call returns to what is held against the op's own outputs: the first of them, or all.
        judge: what the call returned -> (error, allowed), where the op's own rule does not fit.
    """

    make: Callable[[], Callable[[], Any]]
    outputs: Callable[[Any], Any] | None = None
    judge: Callable[[Any], tuple[float, float]] | None = None


@dataclass
class Problem:
    """An op with its inputs bound, on the device.

    Attributes:
        call: backend -> output (a tensor, or a tuple of tensors and numbers).
        exact: the same from float64 inputs through the reference. None: ``call("torch")`` is exact enough.
        reset: brings back the inputs of an op that changes them; ``call`` then returns what was changed.
        judge: (output, output of plain torch) -> (error, allowed), in place of the rule below.
        nbytes, flops: what must be moved and multiplied at least, for the limits; flops are of ``dtype``.
        rivals: by name, what else to time on the same inputs.
        floor: error, relative to the largest magnitude (taken as 0.01 at least), that is allowed in any case.
    """

    call: Callable[[str], Any]
    exact: Callable[[], Any] | None = None
    reset: Callable[[], Any] | None = None
    judge: Callable[[Any, Any], tuple[float, float]] | None = None
    nbytes: float = 0.0
    flops: float = 0.0
    dtype: torch.dtype = torch.float32
    floor: float = 2e-6
    rivals: Mapping[str, Rival] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuCase:
    """``make(device)`` gives the problem; ``timed`` ones are large and made on a GPU only.

    ``spins``: a Triton kernel of it waits on counters for other programs, and may do so for ever.
    """

    op: str
    label: str
    make: Callable[[torch.device], Problem]
    timed: bool = False
    spins: bool = False


def _leaves(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, (tuple, list)):
        for item in output:
            yield from _leaves(item)
    else:
        yield torch.as_tensor(output).detach()


def _copy(output: Any) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in _leaves(output)]


def largest_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference; infinite where shape, NaN, infinities or integers differ."""
    if ours.shape != exact.shape:
        return math.inf
    exact = exact.to(ours.device)
    if not ours.dtype.is_floating_point or not exact.dtype.is_floating_point:
        return 0.0 if torch.equal(ours.to(exact.dtype), exact) else math.inf
    pieces = zip(ours.flatten().split(PIECE), exact.flatten().split(PIECE))
    return max((_largest_error(a.double(), b.double()) for a, b in pieces), default=0.0)


def _largest_error(a: torch.Tensor, b: torch.Tensor) -> float:
    finite = b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    if not torch.equal(a.isfinite(), finite) or not bool(same[~finite].all()):
        return math.inf
    return (a - b)[finite].abs().max().item() if bool(finite.any()) else 0.0


def _largest(exact: torch.Tensor) -> float:
    pieces = exact.flatten().split(PIECE)
    return max((piece.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for piece in pieces if piece.numel()), default=0.0)


class Gate:
    """Judges outputs of a problem on its own inputs; plain torch and the exact reference run once, when it is made.

    The rule: an error of at most twice that of plain torch in the same dtype, and ``floor``, both against the exact
    reference; integers must be equal.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        if problem.reset:
            problem.reset()
        plain = problem.call("torch")
        self.plain = _copy(plain) if problem.reset else list(_leaves(plain))
        if problem.judge:
            return
        if problem.reset:
            problem.reset()
        self.exact = list(_leaves(problem.exact())) if problem.exact else self.plain
        self.allowed = self._allowed() if len(self.exact) == len(self.plain) else []

    def _allowed(self) -> list[float]:
        found = []
        for theirs, gold in zip(self.plain, self.exact):
            allowed = 2 * largest_error(theirs, gold) + self.problem.floor * max(_largest(gold), 0.01)
            found.append(allowed if math.isfinite(allowed) and gold.dtype.is_floating_point else 0.0)
        return found

    def own(self, output: Any) -> tuple[float, float]:
        """(error, allowed) of what a backend of the op gave: of several outputs the one closest to failing."""
        ours = list(_leaves(output))
        if self.problem.judge:
            return self.problem.judge(ours, self.plain)
        if len(ours) != len(self.exact):
            return math.inf, 0.0
        return self._worst(ours, [theirs.dtype for theirs in self.plain])

    def rival(self, rival: Rival, returned: Any) -> tuple[float, float]:
        """The same of what a rival returned, which may be the first output alone, in a wider dtype."""
        if rival.judge:
            return rival.judge(returned)
        theirs = list(_leaves(rival.outputs(returned) if rival.outputs else returned))
        if self.problem.judge:
            return self.problem.judge(theirs, self.plain)
        if len(theirs) not in (1, len(self.exact)):
            return math.inf, 0.0
        return self._worst(theirs, [t.dtype for t in theirs])

    def _worst(self, outputs: list[torch.Tensor], dtypes: list[torch.dtype]) -> tuple[float, float]:
        results = []
        for mine, gold, allowed, dtype in zip(outputs, self.exact, self.allowed, dtypes):
            results.append((largest_error(mine, gold) if mine.dtype == dtype else math.inf, allowed))
        return max(results, key=_closeness, default=(0.0, 0.0))


def _closeness(result: tuple[float, float]) -> float:
    error, allowed = result
    return error / allowed if allowed else math.inf if error else 0.0


def poison(device: torch.device) -> None:
    """Leaves NaN in freed memory, so that a kernel that writes nothing cannot find an earlier result there."""
    blocks = [torch.full((n,), math.nan, device=device) for n in (2**10, 2**16, 2**20, 2**22)]
    del blocks


def check(problem: Problem, backend: str, device: torch.device) -> tuple[float, float]:
    """Runs ``backend`` first, on poisoned memory, then plain torch and the exact reference: (error, allowed)."""
    # torch.empty gives NaN from here on, in C++ too
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        if problem.reset:
            problem.reset()
        poison(device)
        ours = _copy(problem.call(backend))
        poison(device)
        gate = Gate(problem)
    finally:
        torch.use_deterministic_algorithms(False)
    return gate.own(ours)
