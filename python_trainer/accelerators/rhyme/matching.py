"""Execution matching: which stages of earlier runs are like where the current run is now."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from python_trainer.accelerators.rhyme.records import StepRecord
from python_trainer.accelerators.rhyme.sketch import PARTS, histogram, stack
from rlkernels import Trajectories, dtw, rhyme_topk


@dataclass
class Curve:
    """A training trajectory of T steps."""

    run_id: int
    steps: torch.Tensor  # int64 [T]
    rewards: torch.Tensor  # float32 [T], on the task's scale mapped to [0, 1]
    counts: torch.Tensor  # float32 [T, bins], one sketch a step

    def __len__(self) -> int:
        return len(self.steps)

    def first(self, count: int) -> "Curve":
        return Curve(self.run_id, self.steps[:count], self.rewards[:count], self.counts[:count])

    def last(self, count: int) -> "Curve":
        return Curve(self.run_id, self.steps[-count:], self.rewards[-count:], self.counts[-count:])

    def extended(self, record: StepRecord, low: float, high: float) -> "Curve":
        """With one step more."""
        new = curve_of(self.run_id, [record], low, high)
        pairs = ((self.steps, new.steps), (self.rewards, new.rewards), (self.counts, new.counts))
        return Curve(self.run_id, *(torch.cat(pair) for pair in pairs))


@dataclass(frozen=True)
class Stage:
    """A stretch of a historical run, both ends inclusive, and how well the current run rhymes with it."""

    run_id: int
    start: int
    end: int
    score: float


def to_unit(reward: float, low: float, high: float) -> float:
    """A reward on the task's scale [low, high] -> [0, 1]."""
    return min(max((reward - low) / (high - low), 0.0), 1.0)


def curve_of(run_id: int, trajectory: Sequence[StepRecord], low: float = 0.0, high: float = 1.0) -> Curve:
    """A stored trajectory as a curve; rewards are mapped from [low, high], never by their own maximum."""
    rows = [stack(record.sketch) for record in trajectory]
    return Curve(
        run_id,
        torch.tensor([record.step for record in trajectory], dtype=torch.int64),
        torch.tensor([to_unit(record.reward, low, high) for record in trajectory], dtype=torch.float32),
        torch.stack(rows) if rows else torch.zeros(0, sum(PARTS.values())),
    )


def pad(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def align(query: Curve, history: Sequence[Curve], window: int) -> list[tuple[int, int, int]]:
    """The stretches of historical runs that the query's rewards warp onto best.

    Runs are cut into pieces of twice the window, half of which overlap; subsequence DTW finds in each piece the
    stretch that all of the query aligns with.

    Returns:
        (index into history, first, last position), distinct, in order.
    """
    pieces = [
        (index, first, curve.rewards[first : first + 2 * window])
        for index, curve in enumerate(history)
        for first in range(0, max(len(curve) - window, 1), window)
        if len(curve)
    ]
    if not pieces or not len(query):
        return []
    lengths = torch.tensor([len(piece) for _, _, piece in pieces])
    found = dtw(query.rewards[None], pad([piece for _, _, piece in pieces]), y_lengths=lengths, mode="subsequence")
    starts, ends = found[1][0].tolist(), found[2][0].tolist()
    stretches = {(i, first + a, first + b) for (i, first, _), a, b in zip(pieces, starts, ends) if a >= 0}
    return sorted(stretches)


def rhyming_stages(
    query: Curve, history: Sequence[Curve], *, window: int, fraction: float, reward_weight: float, reward_scale: float
) -> list[Stage]:
    """Stage 1: the ``fraction`` of all aligned stages that rhyme best with the query, best first.

    C_rhyme of the aligned rewards and of the states that were visited in between.
    """
    stretches = align(query, history, window)
    if not stretches:
        return []
    rewards = [history[i].rewards[a : b + 1] for i, a, b in stretches]
    states = torch.stack([history[i].counts[a : b + 1].sum(0) for i, a, b in stretches])
    bank = Trajectories(pad(rewards), histogram(states), torch.tensor([len(row) for row in rewards]))
    current = Trajectories(query.rewards[None], histogram(query.counts.sum(0, keepdim=True)))
    score, index = rhyme_topk(
        current,
        bank,
        fraction=fraction,
        reward_weight=reward_weight,
        reward_scale=reward_scale,
        state_metric="hellinger",
    )
    stages = []
    for value, place in zip(score[0].tolist(), index[0].tolist()):
        i, a, b = stretches[place]
        if math.isfinite(value):
            stages.append(Stage(history[i].run_id, int(history[i].steps[a]), int(history[i].steps[b]), value))
    return stages


class Matches:
    """The stages of stage 1 that are trusted, and which stored answers lie in them or just beyond.

    Args:
        stages: as :func:`rhyming_stages` returns them.
        threshold: C_rhyme below which a match is not trusted.
        lookahead: steps beyond a stage that still belong to it: what the historical run did next.
    """

    def __init__(self, stages: Sequence[Stage], *, threshold: float, lookahead: int):
        self.trusted = [stage for stage in stages if stage.score >= threshold]
        self.lookahead = lookahead

    def score(self, run_id: int, step: int) -> float:
        """Of the best trusted stage that a step of a run belongs to; 0 when there is none."""
        return max(
            (s.score for s in self.trusted if s.run_id == run_id and s.start <= step <= s.end + self.lookahead),
            default=0.0,
        )
