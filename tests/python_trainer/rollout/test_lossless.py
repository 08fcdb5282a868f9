"""Tokens come as often as their probability says: the fixed share of ``python -m bench.studies.lossless``."""

from collections import Counter

import pytest
import torch

from bench.studies.lossless import distribution, p_value, p_values, uniform

ERROR = 1e-6  # of all tests here together, were everything right


@pytest.mark.slow
def test_frequencies_of_tokens_are_their_probabilities():
    found = [p_values(seed) for seed in range(20)]
    values = [p for pair, _ in found for p in pair if p is not None]
    assert len(values) > 10 and {drawn["drafts"] for _, drawn in found} == {0, 1}
    assert min(values) > ERROR / (2 * len(values)) and uniform(values) > ERROR / 2


def test_a_token_too_often_is_seen():
    probs = distribution(torch.tensor([1.0, 1.0, 0.0, -20.0]), 1.0, 1.0, 0)
    even = Counter({token: round(10_000 * p) for token, p in enumerate(probs.tolist())})
    assert p_value(even, probs) > 0.9
    assert p_value(even + Counter({0: 800}), probs) < ERROR
    assert p_value(Counter({3: 1}), distribution(torch.tensor([1.0, 1.0, 0.0, -20.0]), 1.0, 0.9, 0)) == 0
    assert p_value(Counter({1: 5}), torch.tensor([0.0, 1.0])) is None
