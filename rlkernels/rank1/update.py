"""The result type of the top-1 solvers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

STATUSES = ("ok", "zero", "ill_defined", "not_converged")
GAP_FLOOR = 0.01  # smallest relative gap at which the leading direction is well defined
MIN_SINGULAR_SHARE = 1e-7  # smallest share of the leading singular value at which a direction is more than rounding
LEAST_SQUARE, MOST_SQUARE = 1e-24, 1e24  # squared norms of a delta beyond which float32 does not hold Z


@dataclass(frozen=True)
class Rank1Update:
    """Leading singular triplet of ``weight - base`` [m, n], with measures of its quality.

    ``sigma * outer(u, v)`` is the best rank-1 approximation of the delta. The entry of ``v`` largest in magnitude
    is positive. Scalars are Python numbers.
    """

    u: torch.Tensor  # [m] float32, unit length; zeros when status is "zero"
    sigma: float
    v: torch.Tensor  # [n] float32, unit length; zeros when status is "zero"
    frobenius: float  # of the whole delta
    gap: float  # 1 - sigma2 / sigma1, from the Ritz values
    residual: float  # |D^T u - sigma v| / sigma
    angle_bound: float  # radians, between v and the true direction; pi / 2: no bound
    passes: int  # Krylov steps, each of which reads both matrices once
    changed: float  # share of entries of weight that differ from base
    status: str  # one of STATUSES

    def __repr__(self) -> str:
        """Return shape and quality on one line, without the vectors."""
        fields = ("sigma", "share", "gap", "residual", "angle_bound", "changed")
        numbers = ", ".join(f"{name}={getattr(self, name):.4g}" for name in fields)
        shape = f"[{len(self.u)}, {len(self.v)}]"
        return f"Rank1Update({shape}, {numbers}, passes={self.passes}, status={self.status!r})"

    @property
    def share(self) -> float:
        """Return the leading direction's share of the Frobenius norm, in [0, 1]."""
        return self.sigma / self.frobenius if self.frobenius else 0.0

    @property
    def alpha(self) -> float:
        """Return the scale that gives the rank-1 update the norm of the whole delta (AlphaRL, arXiv 2510.00553)."""
        return self.frobenius / self.sigma if self.sigma else 0.0


class LowRankDelta(NamedTuple):
    """The result of a solver: the leading triplet, and the rank-k approximation ``left @ right.T`` of the delta."""

    update: Rank1Update
    left: torch.Tensor  # [m, k] float32, (weight - base) @ right
    right: torch.Tensor  # [n, k] float32, orthonormal columns by descending singular value, the first one v


def status_of(gap: float, angle_bound: float, tol: float) -> str:
    """Return the status of the leading triplet of a nonzero delta."""
    if gap < GAP_FLOOR:
        return "ill_defined"
    return "ok" if angle_bound <= tol else "not_converged"


def num_directions(sigma: Sequence[float]) -> int:
    """Return how many of the descending singular values are more than rounding, at least 1."""
    return max(sum(s > MIN_SINGULAR_SHARE * sigma[0] for s in sigma), 1)


def factors(u: torch.Tensor, sigma: Sequence[float], v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return left [m, k] and right [n, k] of the nonzero directions of u [r, m], sigma [r] (descending), v [r, n]."""
    k = num_directions(sigma)
    scale = torch.tensor(sigma[:k], dtype=torch.float32, device=u.device)
    return (u[:k] * scale[:, None]).T, v[:k].T
