"""What the current policy says about answers: log-probabilities, entropies, and a sketch of their gradients.

The gradient of an answer is estimated from the last layer alone: the gradient of sum_t w_t log pi(y_t) with respect to
the output matrix is sum_t w_t (e_y - p_t) h_t^T, which a forward pass has all of. Both sides are multiplied by random
signs, which keeps inner products in expectation (Johnson and Lindenstrauss), down to ``SIZE`` x ``SIZE`` numbers; a
side that is no longer than that stays as it is.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from python_trainer.algorithms.losses import importance_weights
from python_trainer.data import Rollout
from python_trainer.model.packing import micro_batches, pack

if TYPE_CHECKING:
    from python_trainer.model.policy import Policy

SIZE = 64


@dataclass
class Evidence:
    """Of N answers, by the current policy."""

    logprobs: list[torch.Tensor]  # float32 [length] each
    entropy: torch.Tensor  # [N] mean over tokens
    weights: torch.Tensor  # [N] mean truncated importance weight; 1 where no log-probabilities are known
    gradients: torch.Tensor | None  # [N, SIZE * SIZE]

    def of(self, chosen: Sequence[int]) -> "Evidence":
        """Of these answers alone."""
        rows = torch.tensor(chosen, dtype=torch.int64)
        gradients = None if self.gradients is None else self.gradients[rows]
        return Evidence([self.logprobs[i] for i in chosen], self.entropy[rows], self.weights[rows], gradients)


def signs(rows: int, seed: int, device: torch.device) -> torch.Tensor:
    """[rows, SIZE] random signs / sqrt(SIZE), the same on every device; the identity for ``rows`` up to SIZE."""
    if rows <= SIZE:
        return torch.eye(rows, SIZE, device=device)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (rows, SIZE), generator=generator)
    return ((2 * bits - 1) / math.sqrt(SIZE)).to(device)


@torch.no_grad()
def examine(
    policy: "Policy",
    answers: Sequence[Rollout],
    behaviour: Sequence[Sequence[float]],
    *,
    temperature: float,
    cap: float,
    max_tokens: int,
    gradients: bool = True,
) -> Evidence:
    """One forward pass over the answers.

    Args:
        behaviour: log-probabilities of the tokens by the policy that wrote them; NaN where unknown.
        cap: of the importance weights w_t = min(pi / behaviour, cap); 1 where unknown.
        max_tokens: of a micro-batch.
        gradients: also make the gradient sketches.
    """
    count = len(answers)
    logprobs: list[torch.Tensor] = [torch.empty(0)] * count
    entropy, weights = torch.zeros(count), torch.zeros(count)
    sketches = torch.zeros(count, SIZE * SIZE) if gradients else None
    policy = copy.copy(policy)
    policy.fused = False  # the fused pass rounds differently, which could change the ranking and so a repeated run
    vocab, width = policy.model.get_output_embeddings().weight.shape
    with policy.packed_attention():
        for part in micro_batches(answers, range(count), max_tokens):
            packed = pack(answers, part).to(policy.device)
            values, entropies, states = policy.score_with_states(packed, temperature)  # [B, L] twice, [R, H]
            rows = [torch.tensor(behaviour[i], dtype=torch.float32) for i in packed.samples]
            known = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(values)
            ratio = importance_weights(values, known, packed.mask & ~known.isnan(), mode="truncate", cap=cap)
            ratio = ratio * packed.mask
            lengths = packed.mask.sum(1).clamp(min=1)
            for row, i in enumerate(packed.samples):
                logprobs[i] = values[row][packed.mask[row]].cpu()
            entropy[packed.samples] = (entropies.sum(1) / lengths).float().cpu()
            weights[packed.samples] = (ratio.sum(1) / lengths).float().cpu()
            if sketches is not None:
                h = states.float() @ signs(width, 1, states.device)  # [R, SIZE]
                s = signs(vocab, 2, states.device)
                r = s[packed.targets] - policy.mean_prediction(states, s, temperature)  # [R, SIZE]
                left, right = (x[packed.place] for x in (h, r))  # [B, L, SIZE]
                sketch = torch.einsum("bl,blj,blk->bjk", ratio, left, right)
                sketches[packed.samples] = sketch.flatten(1).cpu()
    return Evidence(logprobs, entropy, weights, sketches)
