"""One op on one set of inputs, and the rule that decides whether a backend computes it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Problem:
    """An op with its inputs bound, on the device.

    Attributes:
        call: backend -> output (a tensor, or a tuple of tensors and numbers).
        exact: the same from float64 inputs through the reference. None: ``call("torch")`` is exact enough.
        reset: brings back the inputs of an op that changes them; ``call`` then returns what was changed.
        judge: (output, output of plain torch) -> (error, allowed), in place of the rule below.
        nbytes, flops: what must be moved and multiplied at least, for the limits; flops are of ``dtype``.
        rivals: by name, what else to time on the same inputs: each is called once, untimed, and returns the call. Its
            output is compared with the first output of plain torch, or with all of them where it gives several.
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
    rivals: Mapping[str, Callable[[], Callable[[], Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuCase:
    """``make(device)`` gives the problem; ``timed`` ones are large and made on a GPU only."""

    op: str
    label: str
    make: Callable[[torch.device], Problem]
    timed: bool = False


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
    a, b = ours.double(), exact.double()
    finite = b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    if not torch.equal(a.isfinite(), finite) or not bool(same[~finite].all()):
        return math.inf
    return (a - b)[finite].abs().max().item() if bool(finite.any()) else 0.0


def compare(ours: Any, plain: Any, exact: Any, floor: float) -> tuple[float, float]:
    """(error, allowed): at most twice the error of plain torch in the same dtype, both against ``exact``.

    Of several outputs the one that comes closest to breaking the rule is reported.
    """
    leaves = [list(_leaves(output)) for output in (ours, plain, exact)]
    if len({len(tensors) for tensors in leaves}) != 1:
        return math.inf, 0.0
    results = []
    for mine, theirs, gold in zip(*leaves):
        error = largest_error(mine, gold)
        finite = gold[gold.isfinite()]
        largest = finite.abs().max().item() if finite.numel() else 0.0
        allowed = 2 * largest_error(theirs, gold) + floor * max(largest, 0.01)
        if mine.dtype != theirs.dtype:
            error = math.inf
        results.append((error, allowed if math.isfinite(allowed) else 0.0))
    return max(results, key=lambda r: r[0] / r[1] if r[1] else r[0] * math.inf if r[0] else 0.0, default=(0.0, 0.0))


def poison(device: torch.device) -> None:
    """Leaves NaN in freed memory, so that a kernel that writes nothing cannot find an earlier result there."""
    blocks = [torch.full((n,), math.nan, device=device) for n in (2**10, 2**16, 2**20, 2**22)]
    del blocks


def check(problem: Problem, backend: str, device: torch.device) -> tuple[float, float]:
    """Runs ``backend`` first, on poisoned memory, then plain torch and the exact reference: (error, allowed)."""
    # torch.empty gives NaN from here on, in C++ too
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    outputs = []
    for name in (backend, "torch"):
        if problem.reset:
            problem.reset()
        poison(device)
        outputs.append(_copy(problem.call(name)))
    torch.use_deterministic_algorithms(False)
    ours, plain = outputs
    if problem.judge:
        return problem.judge(ours, plain)
    if problem.reset:
        problem.reset()
    exact = _copy(problem.exact()) if problem.exact else plain
    return compare(ours, plain, exact, problem.floor)
