"""The fused pass of generation in bfloat16, whose weights are laid out once, until they change."""

import pytest
import torch
from paged import GREEDY, engine_for, make, mixed_requests, prompts
from torch import nn

from python_trainer.data import Request
from python_trainer.model.fused import FusedDecoder, Product, packs_bfloat16
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.paged import engine as engine_module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("width", "outputs"), [(1, [1]), (32, [32, 16, 16]), (47, [61]), (96, [48, 48]), (576, [1001])]
)
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@torch.no_grad()
def test_packed_products_are_as_exact_as_linear(bias, width, outputs, rows):
    layers = [nn.Linear(width, n, bias=bias).bfloat16() for n in outputs]
    product, x = Product(*layers, pack=True), torch.randn(rows, width).bfloat16()
    assert product.packed == packs_bfloat16()
    found, plain = product(x), torch.cat([layer(x) for layer in layers], 1)
    exact = torch.cat([layer.double()(x.double()) for layer in layers], 1)
    assert found.dtype == torch.bfloat16
    error, allowed = ((out.double() - exact).abs().max().item() for out in (found, plain))
    assert error <= 2 * allowed


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])  # with biases, and with norms of heads
def test_answers_in_bfloat16_have_the_logprobs_of_the_model(name):
    """The error against float64 is at most twice that of the model's own layers, in the mean."""
    model, sampling = make(name).bfloat16(), SamplingParams(seed=3)
    exact = make(name).bfloat16().double()
    errors = []
    for fused in (True, False):
        engine = engine_for(model, fused=fused)
        assert engine.fused == fused
        error = []
        for answer in engine.generate(mixed_requests(), sampling):
            ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
            start = len(answer.prompt_ids) + answer.prefix_len  # of what was drawn
            with torch.no_grad():
                logprobs = exact(input_ids=ids).logits[0].log_softmax(-1)
            gold = logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
            error.append((torch.tensor(answer.logprobs).double() - gold).abs())
        errors.append(torch.cat(error).mean().item())
    assert errors[0] <= 2 * errors[1] < 0.2


def test_one_snapshot_until_the_weights_change(monkeypatch):
    """Polls in between take none."""
    taken = []
    monkeypatch.setattr(engine_module, "FusedDecoder", lambda *a, **k: taken.append(1) or FusedDecoder(*a, **k))
    engine, short = engine_for(make().bfloat16(), max_sequences=2), prompts([4, 6, 9, 12])
    engine.submit([Request(ids, max_new_tokens=20 + i) for i, ids in enumerate(short[:3])], GREEDY)
    engine.poll(1)
    engine.submit([Request(short[3], max_new_tokens=60)], GREEDY)  # longer than any so far
    assert len(engine.poll(4)) == 4 - 1 and len(taken) == 1
    assert engine._decoder is None, "held while there is nothing to generate"
    engine.policy_updated()
    engine.generate([Request(short[0])], GREEDY)
    assert len(taken) == 2
