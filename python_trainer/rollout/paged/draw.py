"""Drawing the next tokens of all samples of a pass: one launch of each op, one wait for the device."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from python_trainer.errors import NotFinite
from python_trainer.rollout.drafting import Decoding
from python_trainer.rollout.engine import SamplingParams
from rlkernels import keyed_uniform, sample_tokens, verify_drafts


def draw_tokens(
    samples: Sequence[Decoding], logits: torch.Tensor, sampling: SamplingParams
) -> tuple[list[int], list[float], list[int], list[int]]:
    """Draws after every token of a sample's draft and after what comes before it.

    Args:
        samples: S samples.
        logits: [R, V], a row for each token of a draft and one more a sample.

    Returns:
        R tokens, R log-probabilities; the first row of each sample, and how many tokens of its draft were drawn again.

    Raises:
        NotFinite: a row has no distribution.
    """
    lengths = [1 + len(sample.draft) for sample in samples]
    starts = [0, *itertools.accumulate(lengths)]
    # on the host, where the numbers are: of a GPU each would be a hundred launches
    uniforms = keyed_uniform(
        sampling.seed,
        torch.tensor([s.sample_id for s, n in zip(samples, lengths) for _ in range(n)], device="cpu"),
        torch.tensor([s.length + i for s, n in zip(samples, lengths) for i in range(n)], device="cpu"),
    ).to(logits.device)
    settings: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
    rows = starts[-1]
    if len(samples) == rows:
        ids, logprobs = sample_tokens(logits, uniforms, validate=False, **settings)
        counted = ids.new_zeros(rows)
    else:
        drafts = [sample.draft for sample in samples]
        counted, ids, logprobs = verify_drafts(logits, drafts, starts, uniforms, validate=False, **settings)
    # one wait for the device; float64 holds all three exactly
    read = torch.cat([ids.double(), counted.double(), logprobs.double()]).tolist()
    drawn, accepted = ([int(x) for x in part] for part in (read[:rows], read[rows:-rows]))
    weights = read[-rows:]
    if any(map(math.isnan, weights)):
        try:
            sample_tokens(logits, uniforms, **settings)  # raises, and says of which row
        except ValueError as error:
            raise NotFinite(f"the policy cannot be sampled from: {error}") from error
    return drawn, weights, starts[:-1], accepted
