"""Execution matching: which stages of earlier runs rhyme with the last steps of this one.

A stage is a stretch of steps of an earlier run. Rewards are compared on the task's own scale, the behaviour of the
policy in counts that all models share: hidden states of different models have no common axes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from python_trainer.accelerators.rhyme.database import StepRecord
from python_trainer.accelerators.rhyme.replay import last_shares
from python_trainer.data import Rollout
from python_trainer.errors import UserError, on_one_line
from rlkernels import Trajectories, dtw_topk, rhyme_topk

WINDOW = 8  # steps of this run that are compared
LOOKAHEAD = 4  # steps beyond a stage that still belong to it: what the earlier run did next
NEAREST = 512  # stages whose rewards are nearest, for which C_rhyme is computed
# bins of each part of a sketch
PARTS = {
    "ngrams": 256,  # hashed byte trigrams of the answers
    "lengths": 32,  # answers by length in bytes, two bins to an octave
    "surprisals": 24,  # answers by nats per byte: the entropy of the sampler, whatever its tokens
    "successes": 9,  # prompts by share of right answers
}


def sketch_of(groups: Sequence[Sequence[Rollout]]) -> dict[str, torch.Tensor]:
    """Count what a policy does at a step, from the fresh answers in their groups: float32 [bins] of each part."""
    rollouts = [rollout for group in groups for rollout in group]
    texts = [rollout.text.encode(errors="replace") for rollout in rollouts]
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.float64)
    shares = [len(r.logprobs) / max(len(r.response_ids), 1) for r in rollouts]  # sampled; the rest was given
    sampled_bytes = (lengths * torch.tensor(shares, dtype=torch.float64)).clamp(min=1)
    nats = torch.tensor([-sum(rollout.logprobs) for rollout in rollouts], dtype=torch.float64)
    success = torch.tensor([sum(r.accuracy for r in group) / len(group) for group in groups], dtype=torch.float64)
    return {
        "ngrams": byte_trigrams(b"\0\0".join(texts)),
        "lengths": count_bins(2 * torch.log2(1 + lengths), "lengths"),
        "surprisals": count_bins(2 * torch.log2((nats / sampled_bytes).clamp(min=1e-9)) + 16, "surprisals"),
        "successes": count_bins(8 * success + 0.5, "successes"),
    }


def byte_trigrams(data: bytes) -> torch.Tensor:
    """Return hashed counts of all byte trigrams, float32 [256]."""
    if len(data) < 3:
        return torch.zeros(PARTS["ngrams"])
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    trigram = (values[:-2] << 16) | (values[1:-1] << 8) | values[2:]
    hashed = ((trigram * 2654435761) & 0xFFFFFFFF) >> 24  # multiplicative hashing: the top byte of 32
    return torch.bincount(hashed, minlength=PARTS["ngrams"]).float()


def count_bins(values: torch.Tensor, part: str) -> torch.Tensor:
    bins = PARTS[part]
    return torch.bincount(values.floor().long().clamp(0, bins - 1), minlength=bins).float()


def histogram(counts: torch.Tensor) -> torch.Tensor:
    """Return counts [..., sum of bins] as histograms in which every part weighs the same."""
    parts = counts.split(list(PARTS.values()), -1)
    return torch.cat([part / part.sum(-1, keepdim=True).clamp(min=1e-9) for part in parts], -1)


@dataclass
class Curve:
    """A training trajectory of T steps."""

    run_id: int
    steps: torch.Tensor  # int64 [T]
    rewards: torch.Tensor  # float32 [T], on the task's scale, cut to [0, 1]
    counts: torch.Tensor  # float32 [T, bins], one sketch a step
    shares: dict[str, float] = field(default_factory=dict)  # right at the last visit to each prompt, by its key
    tokens: int = 0  # that the run generated
    seconds: float = 0.0  # that it trained; 0: unknown

    def __len__(self) -> int:
        return len(self.steps)


def curve_of(run_id: int, trajectory: Sequence[StepRecord]) -> Curve:
    """Return the curve of a stored trajectory; rewards are cut to [0, 1], never divided by their own maximum."""
    rewards = torch.tensor([record.reward for record in trajectory], dtype=torch.float32)
    steps = torch.tensor([record.step for record in trajectory], dtype=torch.int64)
    try:
        rows = [torch.cat([record.sketch[name].float() for name in PARTS]) for record in trajectory]
        counts = torch.stack(rows) if rows else torch.zeros(0, sum(PARTS.values()))
        if counts.shape[1:] != (sum(PARTS.values()),) or not (counts >= 0).all():
            raise ValueError(f"they must be {sum(PARTS.values())} counts >= 0")
        shares = last_shares(record.outcomes for record in trajectory)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = on_one_line(error)
        raise UserError(f"steps of run {run_id} in the retrospective database are damaged ({reason})") from error
    tokens = sum(record.generated_tokens for record in trajectory)
    seconds = trajectory[-1].seconds if trajectory else 0.0
    return Curve(run_id, steps, rewards.clamp(0, 1), counts, shares, tokens, seconds)


def trajectories_of(stages: Sequence[tuple[Curve, int, int]]) -> Trajectories:
    """Return stages in the form that the similarity functions take."""
    rewards = [curve.rewards[a:b] for curve, a, b in stages]
    states = torch.stack([curve.counts[a:b].sum(0) for curve, a, b in stages])
    padded = torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True)
    return Trajectories(padded, histogram(states), torch.tensor([len(row) for row in rewards]))


@dataclass(frozen=True)
class Stage:
    """A stretch of a historical run, both ends inclusive, and how well the current run rhymes with it."""

    run_id: int
    start: int
    end: int
    score: float


def find_rhyming_stages(query: Curve, history: Sequence[Curve], fraction: float) -> list[Stage]:
    """Return (stage 1) the ``fraction`` of all stages that rhyme best with the query, best first.

    Stages are as long as the window or twice as long, for runs that learn at half the speed.
    """
    stages, rewards = [], []
    for curve in history if len(query) else ():
        for width in {min(width, len(curve)) for width in (WINDOW, 2 * WINDOW)} - {0}:
            stages += [(curve, first, first + width) for first in range(len(curve) - width + 1)]
            rewards.append(functional.pad(curve.rewards.unfold(0, width, 1), (0, 2 * WINDOW - width)))
    if not stages:
        return []
    lengths = torch.tensor([last - first for _, first, last in stages])
    nearest = min(NEAREST, len(stages))
    _, near = dtw_topk(query.rewards[None], torch.cat(rewards), nearest, y_lengths=lengths)
    chosen = [stages[place] for place in near[0].sort().values.tolist()]
    count = min(math.ceil(round(fraction * len(stages), 9)), nearest)
    current = trajectories_of([(query, 0, len(query))])
    score, index = rhyme_topk(current, trajectories_of(chosen), k=count, state_metric="hellinger")
    rhyming = []
    for value, place in zip(score[0].tolist(), index[0].tolist()):
        curve, first, last = chosen[place]
        if math.isfinite(value):
            rhyming.append(Stage(curve.run_id, int(curve.steps[first]), int(curve.steps[last - 1]), value))
    return rhyming


def match_score(stages: Sequence[Stage], run_id: int, step: int) -> float:
    """Return C_rhyme of the best of these stages that a step of a run belongs to; 0 if there is none."""
    return max((s.score for s in stages if s.run_id == run_id and s.start <= step <= s.end + LOOKAHEAD), default=0.0)
