"""C_rhyme: the similarity of two trajectories in reward over time and in the states they visit."""

import math
from dataclasses import dataclass

import torch

from rlkernels import _check, _contexts
from rlkernels import backend as _backend
from rlkernels.similarity import arguments, reference
from rlkernels.similarity.alignment import dtw
from rlkernels.similarity.states import METRICS, state_similarity


@dataclass(frozen=True)
class Trajectories:
    """A batch of N trajectories, as :func:`rhyme_similarity` takes them.

    Args:
        rewards: floating point [N, T], mapped linearly from the task's range to [0, 1]. Never divide a curve by its own
            maximum: a run at 30 % accuracy would match a finished one.
        states: samples [N, S, E], or histograms [N, B] >= 0; None when only rewards count.
        lengths: integers [N] in 0..T, steps of each reward curve; None for T everywhere. What lies beyond is never
            read.

    Raises:
        TypeError, ValueError: a wrong type, dtype, rank, shape, device, length or histogram, or a tensor that requires
            gradients, named in the message.
    """

    rewards: torch.Tensor
    states: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def __post_init__(self):
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        for name, tensor in _contexts.dense_tensors("Trajectories", tensors).items():
            object.__setattr__(self, name, tensor)  # frozen
        _check.tensor("rewards", self.rewards, ndim=2, dtype=arguments.FLOATS)
        if self.states is not None:
            _check.tensor("states", self.states, ndim=(2, 3), dtype=arguments.FLOATS, device=self.rewards.device)
            _check.shape("states", self.states, (len(self), *[None] * (self.states.ndim - 1)))
            if self.states.ndim == 2:
                arguments.histograms("states", self.states)
        arguments.length_types(self.rewards.device, lengths=self.lengths)
        arguments.lengths("lengths", self.lengths, self.rewards)
        _check.no_gradient(arguments.DETACH, rewards=self.rewards, states=self.states)

    def __len__(self) -> int:
        return self.rewards.shape[0]

    def _rows(self, rows: slice) -> "Trajectories":
        states = None if self.states is None else self.states[rows]
        lengths = None if self.lengths is None else self.lengths[rows]
        return Trajectories(self.rewards[rows], states, lengths)


def _check_trajectories(query: Trajectories, bank: Trajectories) -> None:
    for name, value in (("query", query), ("bank", bank)):
        if not isinstance(value, Trajectories):
            raise TypeError(f"{name} must be Trajectories, got {type(value).__name__}")


def _similarity_of_states(query: Trajectories, bank: Trajectories, metric: str | None, **settings) -> torch.Tensor:
    """Return the [N, M] similarity of the states, by ``metric`` or the one that their rank suggests."""
    if query.states is None or bank.states is None:
        raise ValueError("query.states and bank.states must be given unless reward_weight is 1, got None")
    if metric is None:
        metric = "sliced_wasserstein" if query.states.ndim == 3 else "hellinger"
    ndim = 3 if metric == "sliced_wasserstein" else 2
    _check.tensor("query.states", query.states, ndim=ndim)
    _check.tensor("bank.states", bank.states, ndim=ndim)
    _check.shape("bank.states", bank.states, (None, *query.states.shape[1:]))
    return state_similarity(query.states, bank.states, metric=metric, **settings)


@torch.no_grad()
def rhyme_similarity(
    query: Trajectories,
    bank: Trajectories,
    *,
    reward_weight: float = 0.5,
    reward_scale: float = 0.25,
    band: int | None = None,
    state_metric: str | None = None,
    state_scale: float = 1.0,
    projections: int = 64,
    seed: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute C_rhyme of all N x M pairs of trajectories.

    ``reward_weight * exp(-cost / (mean length * reward_scale**2)) + (1 - reward_weight) * state similarity``, where
    cost is the full :func:`dtw` cost of the reward curves: ``cost / mean length`` is the mean squared difference of
    rewards after alignment, and two curves apart by ``reward_scale`` throughout score 1/e.

    Args:
        query: N trajectories.
        bank: M trajectories, with states of the same kind.
        reward_weight: share of the rewards, 0..1. With 1 the states are not looked at.
        reward_scale: reward difference that counts as far, > 0, on the rewards' own scale.
        band: Sakoe-Chiba radius of the alignment, or None.
        state_metric: metric of :func:`state_similarity`; None takes "sliced_wasserstein" for samples [N, S, E] and
            "hellinger" for histograms [N, B].
        state_scale, projections, seed: ``scale``, ``projections`` and ``seed`` of :func:`state_similarity`.

    Returns:
        float32 [N, M] in [0, 1]; 1 for a trajectory with itself. Empty reward curves: 1 with each other, 0 with
        others. NaN where rewards or states hold NaN.

    Raises:
        TypeError, ValueError: a wrong type, dtype, rank, shape, device or value, named in the message.
    """
    _check_trajectories(query, bank)
    _check.tensor("bank.rewards", bank.rewards, device=query.rewards.device)
    _check.in_range("reward_weight", reward_weight, 0, 1)
    _check.positive("reward_scale", reward_scale)
    reward_weight = float(reward_weight)
    reward_scale = float(reward_scale)
    if state_metric is not None:
        _check.one_of("state_metric", state_metric, METRICS)
    _backend.choose("rhyme_similarity", query.rewards.device, backend)
    out = query.rewards.new_empty(len(query), len(bank), dtype=torch.float32)
    for rows, columns in reference.blocks(len(query), len(bank), reference.BLOCK_PAIRS):
        x = query._rows(rows)
        y = bank._rows(columns)
        state = None
        if reward_weight < 1:
            state = _similarity_of_states(x, y, state_metric, scale=state_scale, projections=projections, seed=seed)
        cost = dtw(x.rewards, y.rewards, x_lengths=x.lengths, y_lengths=y.lengths, band=band, backend=backend)
        lengths = [reference.full_lengths(t.rewards, t.lengths) for t in (x, y)]
        out[rows, columns] = reference.rhyme_similarity(
            cost, *lengths, reward_weight=reward_weight, reward_scale=reward_scale, state=state
        )
    return out


@torch.no_grad()
def rhyme_topk(
    query: Trajectories,
    bank: Trajectories,
    *,
    fraction: float = 0.2,
    k: int | None = None,
    backend: str = "auto",
    **settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the trajectories of the bank that rhyme best with each query.

    Args:
        query: N trajectories.
        bank: M trajectories.
        fraction: share of the bank to return, 0 < fraction <= 1: k = ceil(fraction * M).
        k: how many to return, 0..M, instead of a fraction.
        settings: the settings of :func:`rhyme_similarity`.

    Returns:
        float32 score [N, k] and int64 index [N, k] into the bank, in descending order, ties by lower index, NaN last.

    Raises:
        TypeError, ValueError: as :func:`rhyme_similarity`, or a bad ``fraction`` or ``k``.
    """
    _check_trajectories(query, bank)
    if k is None:
        _check.in_range("fraction", fraction, 0, 1)
        _check.positive("fraction", fraction)
        k = math.ceil(round(fraction * len(bank), 9))  # 0.07 * 100 is 7.000000000000001
        k = max(k, min(1, len(bank)))
    else:
        k = _check.integer("k", k, 0, len(bank))

    def negative_score(rows: slice, columns: slice) -> torch.Tensor:
        return -rhyme_similarity(query._rows(rows), bank._rows(columns), backend=backend, **settings)

    negative, index = reference.smallest_by_blocks(len(query), len(bank), k, negative_score)
    return -negative, index
