"""What a policy does at a step, in counts that can be compared across model sizes, families and tokenizers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from python_trainer.data import Rollout

# Bins of each part. Hidden states of different models have no common axes; these have.
PARTS = {
    "ngrams": 256,  # hashed byte trigrams of the answers
    "lengths": 32,  # answers by length in bytes, two bins to an octave
    "surprisals": 24,  # answers by nats per byte: the entropy of the sampler, whatever its tokens
    "successes": 9,  # prompts by share of right answers
}


def sketch_of(groups: "Sequence[Sequence[Rollout]]") -> dict[str, torch.Tensor]:
    """Counts float32 [bins] of each part, of the fresh answers of a step in their groups."""
    rollouts = [rollout for group in groups for rollout in group]
    data = [rollout.text.encode(errors="replace") for rollout in rollouts]
    lengths = torch.tensor([len(text) for text in data], dtype=torch.float64)
    shares = [len(r.logprobs) / max(len(r.response_ids), 1) for r in rollouts]  # the rest was given, not sampled
    sampled_bytes = (lengths * torch.tensor(shares, dtype=torch.float64)).clamp(min=1)
    nats = torch.tensor([-sum(rollout.logprobs) for rollout in rollouts], dtype=torch.float64)
    success = torch.tensor([sum(r.accuracy for r in group) / len(group) for group in groups], dtype=torch.float64)
    return {
        "ngrams": byte_trigrams(b"\0\0".join(data)),
        "lengths": _count(2 * torch.log2(1 + lengths), PARTS["lengths"]),
        "surprisals": _count(2 * torch.log2((nats / sampled_bytes).clamp(min=1e-9)) + 16, PARTS["surprisals"]),
        "successes": _count(8 * success + 0.5, PARTS["successes"]),
    }


def byte_trigrams(data: bytes) -> torch.Tensor:
    """Hashed counts of all byte trigrams, float32 [256]."""
    if len(data) < 3:
        return torch.zeros(PARTS["ngrams"])
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    trigram = (values[:-2] << 16) | (values[1:-1] << 8) | values[2:]
    hashed = ((trigram * 2654435761) & 0xFFFFFFFF) >> 24  # multiplicative hashing: the top byte of 32
    return torch.bincount(hashed, minlength=PARTS["ngrams"]).float()


def _count(values: torch.Tensor, bins: int) -> torch.Tensor:
    return torch.bincount(values.floor().long().clamp(0, bins - 1), minlength=bins).float()


def stack(sketch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One row of counts, float32 [sum of bins]."""
    return torch.cat([sketch[name].float() for name in PARTS])


def histogram(counts: torch.Tensor) -> torch.Tensor:
    """Counts [..., sum of bins] as histograms in which every part weighs the same."""
    parts = counts.split(list(PARTS.values()), -1)
    return torch.cat([part / part.sum(-1, keepdim=True).clamp(min=1e-9) for part in parts], -1)
