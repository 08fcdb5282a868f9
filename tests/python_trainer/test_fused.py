"""The fused pass of generation in bfloat16, whose weights are laid out once, until they change."""

import pytest
import torch
from paged import GREEDY, engine_for, make, mixed_requests, prompts
from torch import nn

from python_trainer.model.fused import FusedDecoder, Product, packs_bfloat16
from python_trainer.rollout import Request, SamplingParams
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


def test_float32_is_not_packed():
    layer = nn.Linear(8, 8)
    assert Product(layer, pack=True).kept == (layer.weight, layer.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_packing_nothing_is_copied_before_it_is_needed(dtype):
    layers = [nn.Linear(8, n, dtype=dtype) for n in (4, 12)]
    product, x = Product(*layers, pack=False), torch.randn(3, 8, dtype=dtype)
    assert product.kept is None
    with torch.no_grad():
        layers[0].weight.add_(1)  # weights are those of the call
    torch.testing.assert_close(product(x)[:, :4], layers[0](x))


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])  # with biases, and with norms of heads
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
    """Polls in between take none; what comes after ``policy_updated`` is of the new weights."""
    taken = []
    monkeypatch.setattr(engine_module, "FusedDecoder", lambda *a, **k: taken.append(1) or FusedDecoder(*a, **k))
    model = make().bfloat16()
    engine, short = engine_for(model, max_sequences=2), prompts([4, 6, 9, 12])
    requests = [Request(ids, max_new_tokens=20 + i) for i, ids in enumerate(short)]
    engine.submit(requests[:3], GREEDY)
    found = engine.poll(1)
    engine.submit([Request(short[3], max_new_tokens=60)], GREEDY)  # longer than any so far
    found += engine.poll(1)
    assert len(taken) == 1
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.0 if p.ndim > 1 else 1.0)
    engine.policy_updated()
    last = engine.poll(4)[-1]
    assert len(taken) == 2 and last.prompt_ids == short[3]
    fresh = engine_for(model).generate([Request([*last.prompt_ids, *last.response_ids[:-5]], max_new_tokens=5)], GREEDY)
    assert fresh[0].ids == last.ids[-5:]
    assert engine._decoder is None, "held while there is nothing to generate"
