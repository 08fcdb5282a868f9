"""One op on one set of inputs, and the rule that decides whether a backend computes it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

COMPARED_ELEMENTS = 1 << 26  # numbers compared at a time: float64 copies of a whole output would not fit in memory
ErrorBound = tuple[float, float]  # largest error, and the error that is allowed


@dataclass
class Problem:
    """An op with its inputs bound, on the device."""

    call: Callable[[str], Any]  # backend -> output (a tensor, or a tuple of tensors and numbers)
    # the same from float64 inputs through the reference; None: ``call("torch")`` is exact enough
    exact: Callable[[], Any] | None = None
    reset: Callable[[], Any] | None = None  # restores inputs that the op changes; ``call`` then returns these
    # (output, output of plain torch) -> error and its bound, in place of :class:`Tolerance`
    judge: Callable[[list[torch.Tensor], list[torch.Tensor]], ErrorBound] | None = None
    nbytes: float = 0.0  # fewest bytes that the op can move
    flops: float = 0.0  # fewest operations on ``dtype`` that the op can do
    dtype: torch.dtype = torch.float32
    floor: float = 2e-6  # error that is always allowed, relative to the largest magnitude (0.01 at least)
    inputs: dict[str, Any] = field(default_factory=dict)  # by name, for rivals that compute the same


@dataclass(frozen=True)
class Case:
    """``make(device)`` builds the problem. Small cases have odd shapes and are checked; timed ones are large."""

    op: str
    label: str
    make: Callable[[torch.device], Problem]
    timed: bool = False
    in_cuda_graph: bool = False  # engines capture it, so that replays are timed where it can be captured


def leaves(output: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors and numbers of an output, as tensors without history."""
    if isinstance(output, (tuple, list)):
        for item in output:
            yield from leaves(item)
    else:
        yield (output if isinstance(output, torch.Tensor) else torch.tensor(output, device="cpu")).detach()


def copy(output: Any) -> list[torch.Tensor]:
    """Copy the leaves of an output in memory of their own."""
    return [leaf.clone() for leaf in leaves(output)]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Return whether two outputs are equal to the bit; NaN equals NaN."""
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each entry, one NaN for all."""
    x = x.masked_fill(x.isnan(), math.nan) if x.is_floating_point() else x
    return x.contiguous()[..., None].view(torch.uint8)


def largest_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference; infinite where the shape, NaN, infinities or integers differ."""
    if result.shape != exact.shape:
        return math.inf
    exact = exact.to(result.device)
    if not result.dtype.is_floating_point or not exact.dtype.is_floating_point:
        return 0.0 if torch.equal(result.to(exact.dtype), exact) else math.inf
    pieces = zip(result.flatten().split(COMPARED_ELEMENTS), exact.flatten().split(COMPARED_ELEMENTS))
    return max((_largest_error(a.double(), b.double()) for a, b in pieces), default=0.0)


def _largest_error(a: torch.Tensor, b: torch.Tensor) -> float:
    errors = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0)
    return errors.nan_to_num(math.inf, math.inf).max().item() if errors.numel() else 0.0


def _largest(exact: torch.Tensor) -> float:
    pieces = exact.flatten().split(COMPARED_ELEMENTS)
    return max((piece.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for piece in pieces if piece.numel()), default=0.0)


class Tolerance:
    """The rule that outputs of a problem must keep. Plain torch and the exact reference run once, at construction.

    Against the exact reference, an output has at most twice the error of plain torch in the same dtype, plus ``floor``.
    Integers must be equal.
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
        if len(self.exact) == len(self.plain):
            self.allowed = [_allowed_error(plain, exact, problem.floor) for plain, exact in zip(self.plain, self.exact)]

    def judge(self, output: Any, dtypes: list[torch.dtype] | None = None) -> ErrorBound:
        """Return the error of an output and its bound; of several tensors those of the one closest to failing.

        ``dtypes``: what the tensors must have, by default the dtypes of plain torch; another number of them is wrong.
        """
        results = list(leaves(output))
        if self.problem.judge:
            return self.problem.judge(results, self.plain)
        if dtypes is None:
            dtypes = [plain.dtype for plain in self.plain]
        if len(results) != len(dtypes):
            return math.inf, 0.0
        bounds = []
        for result, exact, allowed, dtype in zip(results, self.exact, self.allowed, dtypes):
            error = largest_error(result, exact) if result.dtype == dtype else math.inf
            bounds.append((error, allowed))
        return max(bounds, key=_share_of_allowed, default=(0.0, 0.0))


def _allowed_error(plain: torch.Tensor, exact: torch.Tensor, floor: float) -> float:
    """Return the error that :class:`Tolerance` allows; 0 for integers, and where plain torch is infinitely wrong."""
    allowed = 2 * largest_error(plain, exact) + floor * max(_largest(exact), 0.01)
    return allowed if math.isfinite(allowed) and exact.dtype.is_floating_point else 0.0


def _share_of_allowed(bound: ErrorBound) -> float:
    error, allowed = bound
    if allowed:
        return error / allowed
    return math.inf if error else 0.0


def poison(device: torch.device) -> None:
    """Leave NaN in freed memory, so that a kernel that writes nothing cannot pass with an earlier result."""
    blocks = [torch.full((n,), math.nan, device=device) for n in (2**10, 2**16, 2**20, 2**22)]
    del blocks


def check(problem: Problem, backend: str, device: torch.device) -> tuple[ErrorBound, bool]:
    """Run a backend twice on poisoned memory; return its error and bound, and whether both runs gave the same bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # from here on torch.empty gives NaN, in C++ too
    try:
        outputs = []
        for _ in range(2):
            if problem.reset:
                problem.reset()
            poison(device)
            outputs.append(copy(problem.call(backend)))
        poison(device)
        tolerance = Tolerance(problem)
    finally:
        torch.use_deterministic_algorithms(False)
    return tolerance.judge(outputs[0]), same_bits(*outputs)
