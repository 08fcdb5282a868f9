"""Public functions: argument checks and the choice of the implementation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rlkernels import _check
from rlkernels import backend as _backend
from rlkernels._contexts import public_op
from rlkernels.rank1 import reference
from rlkernels.rank1.update import STATUSES, LowRankDelta, Rank1Update, factors

Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # name -> (weight, base)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = 1 << 23  # entries of a weight: the update of a larger one takes a GPU longer than the host's launch


def _check_pair(weight: torch.Tensor, base: torch.Tensor, *, label: str = "", **_: object) -> None:
    _check.tensor(f"weight{label}", weight, ndim=2, dtype=DTYPES)
    _check.tensor(f"base{label}", base, ndim=2, dtype=DTYPES, device=weight.device)


def _check_product(weight: torch.Tensor, base: torch.Tensor, v: torch.Tensor, **_: object) -> None:
    _check_pair(weight, base)
    _check_vector("v", v, weight.device)


def _check_update(weight: torch.Tensor, u: torch.Tensor, v: torch.Tensor, **_: object) -> None:
    _check.tensor("weight", weight, ndim=2, dtype=DTYPES)
    _check_vector("u", u, weight.device)
    _check_vector("v", v, weight.device)


def _check_sizes(weight: torch.Tensor, base: torch.Tensor, label: str = "") -> None:
    _check.shape(f"base{label}", base, weight.shape)
    if weight.numel() == 0:
        raise ValueError(f"weight{label} must have at least one row and one column, got shape {list(weight.shape)}")


def _check_vector(name: str, value: torch.Tensor, device: torch.device) -> None:
    _check.tensor(name, value, ndim=1, dtype=(*DTYPES, torch.float64), device=device)


def _float_start(name: str, start: torch.Tensor | None, n: int, device: torch.device) -> torch.Tensor | None:
    """Return a checked start as float32; None without one or if it is all zeros."""
    if start is None:
        return None
    _check_vector(name, start, device)
    _check.shape(name, start, (n,))
    vector = _vector(start)
    if not vector.isfinite().all():
        fault = "entries that float32 does not hold" if start.isfinite().all() else "NaN or infinite entries"
        raise ValueError(f"{name} must be finite, got {fault}")
    return vector if vector.any() else None


def check_settings(tol: float, max_passes: int, seed: int) -> dict[str, Any]:
    """Check a solver's settings and return them, the seed as a signed 64-bit number."""
    _check.number("tol", tol)
    if not 0 < tol < math.pi / 2:
        raise ValueError(f"tol must be between 0 and pi / 2 (radians, exclusive), got {tol!r}")
    return {
        "tol": tol,
        "max_passes": _check.integer("max_passes", max_passes, 1, _check.MOST),
        "seed": _check.seed(seed),
    }


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with contiguous rows, as the C++ kernels need it; copy only if necessary."""
    matrix = matrix.detach() if matrix.requires_grad else matrix
    return matrix if matrix.is_contiguous() or matrix.stride(1) == 1 else matrix.contiguous()


def _vector(v: torch.Tensor) -> torch.Tensor:
    v = v.detach() if v.requires_grad else v
    return (v if v.dtype == torch.float32 else v.float()).contiguous()


def _cpp(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], starts: Sequence[torch.Tensor | None], *, rank: int,
            min_passes: int, tol: float, max_passes: int, seed: int) -> Iterator[LowRankDelta]:  # fmt: skip
    weights = [_rows(weight) for weight, _ in pairs]
    bases = [_rows(base) for _, base in pairs]
    us, vs, sigmas, facts = torch.ops.rlkernels.top1_deltas(
        weights, bases, starts, tol, max_passes, min_passes, rank, seed
    )
    for pair, u, v, sigma, row in zip(pairs, us, vs, sigmas.tolist(), facts.tolist()):
        frobenius, gap, residual, bound, passes, changed, status = row
        if status == len(STATUSES):
            raise reference.not_finite(*pair)
        update = Rank1Update(u[0], sigma[0], v[0], frobenius, gap, residual, bound, int(passes), changed,
                             STATUSES[int(status)])  # fmt: skip
        yield LowRankDelta(update, *factors(u, sigma, v))


def _triton(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], starts: Sequence[torch.Tensor | None],
            **settings: Any) -> Iterator[LowRankDelta]:  # fmt: skip
    from rlkernels.rank1 import grouped

    return grouped.solve([(_rows(w), _rows(b)) for w, b in pairs], starts, **settings)


def _torch(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], starts: Sequence[torch.Tensor | None],
           **settings: Any) -> Iterator[LowRankDelta]:  # fmt: skip
    for (weight, base), start in zip(pairs, starts):
        yield reference.solve_delta(weight, base, start=start, **settings)


# yield the result of each pair in turn, or raise ValueError for one that is not finite
_SOLVERS: dict[str, Callable[..., Iterator[LowRankDelta]]] = {"cpu": _cpp, "triton": _triton, "torch": _torch}


@public_op("top1_delta", _check_pair)
def top1_delta(weight: torch.Tensor, base: torch.Tensor, *, start: torch.Tensor | None = None, tol: float = 1e-2,
               max_passes: int = 12, seed: int = 0, backend: str = "auto") -> Rank1Update:  # fmt: skip
    """Find the leading singular triplet of ``weight - base``, with a certificate, without holding the delta.

    Block Krylov iteration reads both matrices once a step (Musco and Musco, NIPS 2015). The bound is the sin-theta
    theorem of Davis and Kahan; the random start bounds the second singular value.

    Args:
        weight, base: [m, n], bfloat16, float16 or float32 in any mix, m and n >= 1.
        start: [n], an estimate of v, such as that of the previous training step; zeros count as none. A good one saves
            reads, a bad one cannot mislead the certificate. Used in float32.
        tol: radians; the solver stops when the angle's bound is below it.
        max_passes: most Krylov steps, each of which reads both matrices once. A check of extreme values may read them
            twice more.
        seed: of the random start. The same seed gives the same bits on any number of threads.

    Returns:
        :class:`Rank1Update`. ``status`` is "ok" (angle_bound <= tol and gap >= 1 %), "zero" (weight equals base),
        "ill_defined" (gap below 1 %: v is any vector near the leading pair) or "not_converged".

    Raises:
        TypeError, ValueError: a wrong dtype, rank, shape, device or setting; entries that are NaN or infinite, or
            whose difference is beyond float32.
    """
    _check_sizes(weight, base)
    start = _float_start("start", start, weight.shape[1], weight.device)
    settings = check_settings(tol, max_passes, seed)
    solve = _SOLVERS[_backend.choose("top1_delta", weight.device, backend)]
    (leading,) = solve([(weight, base)], [start], rank=1, min_passes=1, **settings)
    return leading.update


def top1_deltas(pairs: Pairs, *,
                starts: Mapping[str, torch.Tensor] | None = None, tol: float = 1e-2, max_passes: int = 12,
                seed: int = 0, backend: str = "auto") -> dict[str, Rank1Update]:  # fmt: skip
    """Run :func:`top1_delta` on many modules at once; on a CPU each result equals that of its own call, bit for bit.

    Args:
        pairs: name -> (weight, base), all on one device.
        starts: name -> start, for some or all of the names.
        tol, max_passes, seed: as for :func:`top1_delta`.

    Returns:
        name -> :class:`Rank1Update`, in the order of ``pairs``.

    Raises:
        TypeError, ValueError: as for :func:`top1_delta`, naming the module; a start for an unknown name.
    """
    settings = check_settings(tol, max_passes, seed)
    deltas = _leading(pairs, starts, backend, {**settings, "rank": 1, "min_passes": 1})
    return {name: leading.update for name, leading in deltas.items()}


def solve_deltas(pairs: Pairs, *, rank: int, min_passes: int = 3, starts: Mapping[str, torch.Tensor] | None = None,
                   tol: float = 1e-2, max_passes: int = 12, seed: int = 0, backend: str = "auto"
                   ) -> dict[str, LowRankDelta]:  # fmt: skip
    """Run :func:`top1_deltas`, and return the rank-k approximation of every delta from the same reads.

    Args:
        rank: of the approximation; less if the delta has no more directions.
        min_passes: fewest reads: the first direction may be good enough before the others are. A read adds four
            columns to the basis, so the solver makes at least ``rank / 4``.

    Raises:
        TypeError, ValueError: as for :func:`top1_deltas`; a rank or number of reads below 1.
    """
    settings = check_settings(tol, max_passes, seed)
    rank = _check.integer("rank", rank, 1, _check.MOST)
    min_passes = _check.integer("min_passes", min_passes, 1, _check.MOST)
    min_passes = max(min_passes, -(-rank // reference.KRYLOV_COLUMNS))
    settings["max_passes"] = max(settings["max_passes"], min_passes)
    return _leading(pairs, starts, backend, {**settings, "rank": rank, "min_passes": min_passes})


@public_op("top1_deltas", lambda **_: None)
def _leading(
    pairs: Pairs, starts: Mapping[str, torch.Tensor] | None, backend: str, settings: Mapping[str, Any]
) -> dict[str, LowRankDelta]:
    """Check the matrices and solve; an error names its module."""
    starts = {} if starts is None else starts
    for argument, value, content in (("pairs", pairs, "(weight, base)"), ("starts", starts, "start")):
        if not isinstance(value, Mapping):
            raise TypeError(f"{argument} must be a dictionary, name -> {content}, got {type(value).__name__}")
    if unknown := sorted(set(starts) - set(pairs), key=str):
        raise ValueError(f"starts must be keyed by names of pairs, got {unknown[0]!r}")
    for name, pair in pairs.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"pairs must hold (weight, base) for every name, got {type(pair).__name__} for {name!r}")
    devices = {weight.device for weight, _ in pairs.values() if isinstance(weight, torch.Tensor)}
    if len(devices) > 1:
        raise ValueError(f"pairs must be on one device, got {', '.join(sorted(map(str, devices)))}")
    float_starts = []
    for name, (weight, base) in pairs.items():
        _check_pair(weight, base, label=f" of {name!r}")
        _check_sizes(weight, base, f" of {name!r}")
        float_starts.append(_float_start(f"start of {name!r}", starts.get(name), weight.shape[1], weight.device))
    if not pairs:
        return {}
    solve = _SOLVERS[_backend.choose("top1_deltas", devices.pop(), backend)]
    results = solve(list(pairs.values()), float_starts, **settings)
    out = {}
    for name in pairs:
        try:
            out[name] = next(results)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    return out


@public_op("delta_matvec", _check_product)
def delta_matvec(weight: torch.Tensor, base: torch.Tensor, v: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Compute ``(weight - base) @ v`` in float32; reads both matrices once and never holds the delta.

    Args:
        weight, base: [m, n], bfloat16, float16 or float32 in any mix.
        v: [n], floating point.

    Returns:
        [m] float32.

    Raises:
        TypeError, ValueError: a wrong dtype, rank, shape or device.
    """
    _check_sizes(weight, base)
    _check.shape("v", v, weight.shape[1:])
    chosen = _backend.choose("delta_matvec", weight.device, backend)
    if chosen == "torch":
        return reference.delta_matvec(weight, base, v)
    if chosen == "cpu":
        return torch.ops.rlkernels.delta_matvec(_rows(weight), _rows(base), _vector(v))
    from rlkernels.rank1 import triton_update

    return triton_update.delta_matvec(_rows(weight), _rows(base), _vector(v))


@public_op("add_rank1_", _check_update)
def add_rank1_(weight: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scale: float, *,
               stochastic_rounding: bool = False, seed: int = 0, backend: str = "auto") -> torch.Tensor:  # fmt: skip
    """Add ``scale * outer(u, v)`` to the weight in place, in float32 arithmetic, rounded once to its dtype.

    Args:
        weight: [m, n], bfloat16, float16 or float32; may be a view, but not one whose entries share memory.
        u, v: [m] and [n], floating point; may be views of the weight.
        scale: finite number.
        stochastic_rounding: round up or down at random, so that the expected result is the exact float32 value: an
            update far below the spacing of bfloat16 survives on average. No effect on float32 weights.
        seed: of the rounding, keyed by (seed, row, column).

    Returns:
        ``weight``.

    Raises:
        TypeError, ValueError: a wrong dtype, rank, shape or device; a scale that is not finite; a weight whose entries
            overlap or that autograd has computed.
    """
    contiguous = weight.is_contiguous()
    if not contiguous:
        _check.own_places("weight", weight)
    m, n = weight.shape
    _check.shape("u", u, (m,))
    _check.shape("v", v, (n,))
    if type(scale) is not float:
        _check.number("scale", scale)
        scale = float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale!r}")
    seed = _check.seed(seed)
    if weight.requires_grad and not weight.is_leaf:
        raise ValueError("weight must not be the result of a differentiable computation, got a non-leaf tensor")
    regime = "add_rank1_/large" if weight.numel() > LARGE else "add_rank1_"
    chosen = _backend.choose(regime, weight.device, backend)
    if chosen == "torch" or not weight.numel():
        with torch.no_grad():
            return reference.add_rank1_(weight, u, v, scale, stochastic_rounding=stochastic_rounding, seed=seed)
    target = _rows(weight)
    left = _vector(u)
    right = _vector(v)
    if _backend.may_share(target, left, right):  # they would change during the update
        left = left.clone()
        right = right.clone()
    if chosen == "cpu":
        torch.ops.rlkernels.add_rank1_(target, left * scale, right, stochastic_rounding, seed)
    else:
        from rlkernels.rank1 import triton_update

        triton_update.add_rank1_(target, left, right, scale, stochastic_rounding, seed)
    if not (contiguous or weight.stride(1) == 1):
        with torch.no_grad():
            return weight.copy_(target)
    _backend.mark_written(weight)
    return weight
