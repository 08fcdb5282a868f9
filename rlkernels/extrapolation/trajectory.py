"""The path of every module's weight update along its leading direction while a model trains.

AlphaRL (arXiv 2510.00553) follows x_t = sigma_t u_t over checkpoints, whose sign and order are ambiguous. Here
x_t = (W_t - W_0) v_T, with the direction v_T of the latest step, is neither. Training keeps no old weights, so each
tracked step leaves factors of low rank; from saved checkpoints x_t is exact.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rlkernels import _check
from rlkernels._precision import without_autocast
from rlkernels.rank1 import reference
from rlkernels.rank1.ops import delta_matvec, solve_deltas
from rlkernels.rank1.update import STATUSES

MAX_POINTS = 64  # most tracked steps; each holds factors of every projection of a model
FACTS = ("sigma", "frobenius", "gap", "angle_bound", "changed", "noise", "status")


@dataclass(frozen=True)
class Points:
    """The trajectory of one module [m, n] at T tracked steps, oldest first, along the direction of the last of them."""

    steps: torch.Tensor  # float64 [T]
    accuracy: torch.Tensor  # float64 [T]
    x: torch.Tensor  # float32 [T, m], (W_t - W_0) v_T
    v: torch.Tensor  # float32 [n], v_T
    cosine: torch.Tensor  # float64 [T], |cos(v_t, v_T)|
    frobenius: torch.Tensor  # float64 [T], |W_t - W_0|

    def until(self, count: int) -> "Points":
        """Return the first ``count`` steps, with the same ``v``."""
        rows = {name: getattr(self, name)[:count] for name in ("steps", "accuracy", "x", "cosine", "frobenius")}
        return replace(self, **rows)


class Tracked(NamedTuple):
    """What a tracked step leaves of one module [m, n]: factors of its update, and facts about it."""

    left: torch.Tensor  # [m, k]
    right: torch.Tensor  # [n, k], column 0 is v_t
    facts: list[float]  # FACTS


def storage_noise(weight: torch.Tensor, base: torch.Tensor, frobenius: float) -> float:
    """Estimate the spectral norm that rounding ``weight`` to its dtype adds to a delta of norm ``frobenius``.

    An entry that changed has an error of up to half its spacing (variance spacing^2 / 12). An unchanged one lost its
    change: its error is the same, or the root mean square of the delta if that is less. A random [m, n] matrix with
    root mean square r has a spectral norm near r (sqrt(m) + sqrt(n)).
    """
    count = weight.numel()
    eps = torch.finfo(weight.dtype).eps
    mean_square = frobenius**2 / count / (eps**2 / 12)  # of the delta, in the unit of the squares below
    total = 0.0
    for w, b in zip(weight.split(reference.DELTA_ROWS), base.split(reference.DELTA_ROWS)):
        # 2^exponent: a float32 without sign and mantissa; its square is exact, and 0 where it would be below 2^-149
        power = (w.float().view(torch.int32) & 0x7F800000).view(torch.float32).square_()
        total += float(torch.where(w != b, power, power.clamp_max(mean_square)).sum(dtype=torch.float64))
    total *= eps**2 / 12
    return math.sqrt(total / count) * (math.sqrt(weight.shape[0]) + math.sqrt(weight.shape[1]))


def check_weights(argument: str, weights: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> None:
    """Raise unless every module has a floating point tensor of the shape and on the device of its base."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"{argument} must be a dictionary, name -> weights, got {type(weights).__name__}")
    if missing := sorted(set(base) - set(weights)):
        raise ValueError(f"{argument} must hold every tracked module, but {missing[0]!r} is missing")
    for name, matrix in base.items():
        _check.tensor(f"{argument} of {name!r}", weights[name], ndim=2, floating=True, device=matrix.device)
        _check.shape(f"{argument} of {name!r}", weights[name], matrix.shape)


class RankOneTrajectory:
    """Factors of the tracked updates of some modules, and their trajectories along the latest direction.

    It holds 64 steps. Beyond that it drops the one whose neighbours lie closest together, never the first or the
    latest, so that the steps stay spread over all of training.

    Args:
        base: name -> W_0 [m, n], bfloat16, float16 or float32; held by reference, so it must not change.
        rank: of the factors of every tracked step.

    Raises:
        TypeError, ValueError: a base that is empty or no dictionary of floating point matrices; a rank below 1.

    Attributes:
        steps, accuracy: of the tracked steps, oldest first.
    """

    def __init__(self, base: Mapping[str, torch.Tensor], *, rank: int = 4) -> None:
        check_weights("base", base, base)
        if not base:
            raise ValueError("base must hold at least one module, got none")
        self.base = {name: tensor.detach() for name, tensor in base.items()}  # the same memory
        self.rank = _check.integer("rank", rank, 1, _check.MOST)
        self.steps: list[int] = []
        self.accuracy: list[float] = []
        self._tracked: dict[str, list[Tracked]] = {name: [] for name in base}  # T of each module

    def __len__(self) -> int:
        return len(self.steps)

    def track(self, weights: Mapping[str, torch.Tensor], *, step: int, accuracy: float) -> None:
        """Store the factors of ``weights[name] - base[name]`` of all modules, or of none if it raises.

        Args:
            weights: name -> W_t, at least the names of ``base``.
            step: an integer above all earlier ones.
            accuracy: estimate for the policy with these weights.

        Raises:
            TypeError: a step that is no integer, an accuracy that is no number, weights that are no tensors.
            ValueError: a step that is not later, a missing module, NaN or infinite weights.
        """
        step = _check.integer("step", step, -(2**63), 2**63 - 1)
        _check.number("accuracy", accuracy)
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step must be above {self.steps[-1]}, the last one tracked, got {step}")
        check_weights("weights", weights, self.base)
        starts = {name: self.direction(name) for name in self.base} if self.steps else {}
        pairs = {name: (weights[name].detach(), base) for name, base in self.base.items()}
        deltas = solve_deltas(pairs, rank=self.rank, starts=starts)
        noise = {name: storage_noise(*pairs[name], update.frobenius) for name, (update, _, _) in deltas.items()}
        for name, (update, left, right) in deltas.items():
            facts = [update.sigma, update.frobenius, update.gap, update.angle_bound, update.changed, noise[name]]
            self._tracked[name].append(Tracked(left, right, [*facts, STATUSES.index(update.status)]))
        self.steps.append(step)
        self.accuracy.append(float(accuracy))
        if len(self) > MAX_POINTS:
            self._drop_point()

    def _drop_point(self) -> None:
        """Drop the point whose neighbours lie closest together, the oldest of equals."""
        index = min(range(1, len(self) - 1), key=lambda i: self.steps[i + 1] - self.steps[i - 1])
        all_records: list[list[Any]] = [self.steps, self.accuracy, *self._tracked.values()]
        for records in all_records:
            del records[index]

    def facts(self, name: str) -> dict[str, float]:
        """Return sigma, frobenius, gap, angle_bound, changed and noise (``storage_noise``) of the latest step."""
        return dict(zip(FACTS[:-1], self._tracked[name][-1].facts))

    def status(self, name: str) -> str:
        """Return the status of the solver at the latest step, as in :class:`Rank1Update`."""
        return STATUSES[int(self._tracked[name][-1].facts[-1])]

    def direction(self, name: str, index: int = -1) -> torch.Tensor:
        """Return v_t [n] of one tracked step."""
        return self._tracked[name][index].right[:, 0]

    def points(self, name: str, *, at: int = -1) -> Points:
        """Project the tracked steps, from their factors, on the direction of step ``at`` (default: the latest)."""
        v = self.direction(name, at)
        tracked = self._tracked[name]
        with without_autocast(v.device):
            projections = [step.right.T @ v for step in tracked]  # [k]
            x = torch.stack([step.left @ projection for step, projection in zip(tracked, projections)])
        return Points(
            steps=torch.tensor(self.steps, dtype=torch.float64, device="cpu"),
            accuracy=torch.tensor(self.accuracy, dtype=torch.float64, device="cpu"),
            x=x,
            v=v,
            cosine=torch.tensor([float(p[0].abs()) for p in projections], dtype=torch.float64, device="cpu"),
            frobenius=torch.tensor([step.facts[1] for step in tracked], dtype=torch.float64, device="cpu"),
        )

    def exact_points(self, checkpoints: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, Points]:
        """Return :meth:`points` of every module, with x_t from the weights of the tracked steps.

        Args:
            checkpoints: the weights of all of ``steps``, oldest first; one of them is in memory at a time.
        """
        x: dict[str, list[torch.Tensor]] = {name: [] for name in self.base}
        count = 0
        for weights in checkpoints:
            check_weights(f"checkpoints[{count}]", weights, self.base)
            for name, base in self.base.items():
                x[name].append(delta_matvec(weights[name].detach(), base, self.direction(name)))
            count += 1
        if count != len(self):
            raise ValueError(f"checkpoints must be the {len(self)} tracked steps, got {count}")
        return {name: replace(self.points(name), x=torch.stack(rows)) for name, rows in x.items()}

    def to(self, device: torch.device) -> None:
        """Move base and factors to a device."""
        for name, base in self.base.items():
            self.base[name] = base.to(device)
            tracked = self._tracked[name]
            self._tracked[name] = [Tracked(left.to(device), right.to(device), facts) for left, right, facts in tracked]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return everything that was tracked, but not ``base``, as tensors."""
        state = {
            "steps": torch.tensor(self.steps, dtype=torch.int64, device="cpu"),
            "accuracy": torch.tensor(self.accuracy, dtype=torch.float64, device="cpu"),
        }
        for name, tracked in self._tracked.items() if self.steps else ():
            lefts, rights, facts = zip(*tracked)
            ranks = [left.shape[1] for left in lefts]
            state[f"{name}/ranks"] = torch.tensor(ranks, dtype=torch.int64, device="cpu")
            state[f"{name}/left"] = torch.cat(lefts, 1)
            state[f"{name}/right"] = torch.cat(rights, 1)
            state[f"{name}/facts"] = torch.tensor(facts, dtype=torch.float64, device="cpu")
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Undo :meth:`state_dict`, for a trajectory with the same modules.

        Raises:
            KeyError, ValueError: the state is of other modules; nothing has changed then.
        """
        names = {key.rpartition("/")[0] for key in state if "/" in key}
        if names not in (set(), set(self.base)):
            raise ValueError(f"state must be of the modules {sorted(self.base)}, got {sorted(names)}")
        steps = state["steps"].tolist()
        accuracy = state["accuracy"].tolist()
        tracked: dict[str, list[Tracked]] = {name: [] for name in self.base}
        for name, base in self.base.items() if steps else ():
            ranks = state[f"{name}/ranks"].tolist()
            factors = []
            for side, size in zip(("left", "right"), base.shape):
                stored = state[f"{name}/{side}"]
                _check.shape(f"{name}/{side} of state", stored, (size, sum(ranks)))
                factors.append(stored.to(base.device).split(ranks, 1))
            tracked[name] = [Tracked(*step) for step in zip(*factors, state[f"{name}/facts"].tolist(), strict=True)]
        self.steps = steps
        self.accuracy = accuracy
        self._tracked = tracked
