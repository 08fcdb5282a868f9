"""How the engine reads the cache: shared prefixes once per group, padded rows on GPUs without a proven kernel."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from paged import assert_same, engine_for, make, prompts

from python_trainer.model import paged_attention as attention
from python_trainer.rollout import Request, SamplingParams
from python_trainer.rollout.paged import engine as engine_module
from rlkernels import backend


@pytest.mark.parametrize(
    "options", [{}, {"fused": False}, {"max_batch_tokens": 40, "max_sequences": 12}, {"blocks": 75}]
)
def test_long_prefixes_are_read_once_per_group(monkeypatch, options):
    """The same tokens as without; in chunks, when preempted, and with short neighbours in between."""
    options = {"blocks": 512} | options
    calls = []
    plain = attention.shared_prefix_attention
    monkeypatch.setattr(attention, "shared_prefix_attention", lambda *a, **k: calls.append(a[4]) or plain(*a, **k))
    model = make()
    monkeypatch.setattr(engine_module, "MIN_SHARED_TOKENS", 128)
    a, b, c = prompts([132, 9, 128])
    requests = [
        Request(a, num_samples=4, max_new_tokens=20, sample_id=0),
        Request(b, num_samples=3, max_new_tokens=25, sample_id=10),
        Request(c[:100], prefix_ids=c[100:], num_samples=2, max_new_tokens=30, sample_id=20),
        Request(a, num_samples=1, max_new_tokens=12, sample_id=30),
    ]
    sampling = SamplingParams(seed=3)
    expected = engine_for(model, **options | {"share_reads": False}).generate(requests, sampling)
    assert not calls
    engine = engine_for(model, **options)
    got = engine.generate(requests, sampling)
    assert_same(got, expected)
    assert calls and max(int(lens.max()) for lens in calls) >= 128
    assert (engine.stats["preemptions"] > 0) == (options["blocks"] == 75)
    calls.clear()
    engine.generate(requests[1:2], sampling)
    assert not calls  # nothing long enough to share


def test_padded_rows_give_the_same_answers(monkeypatch):
    """What a GPU without a proven attention kernel does: prompts in chunks, decoding and drafts, all in one pass."""
    requests = [Request(ids, num_samples=n, max_new_tokens=12) for ids, n in zip(prompts([3, 17, 1, 40]), [2, 1, 3, 2])]
    sampling = SamplingParams(temperature=0.8, seed=3)

    def answers(padded):
        used = []

        def is_padded(self, query):
            used.append(padded)
            return padded

        monkeypatch.setattr(attention.Paging, "is_padded", is_padded)
        engine = engine_for(make(), fused=False, max_sequences=6, max_batch_tokens=16)
        out = engine.generate(requests, sampling)
        assert used and any(used) == padded
        return out

    for plain, padded in zip(answers(False), answers(True), strict=True):
        assert plain.ids == padded.ids
        torch.testing.assert_close(torch.tensor(plain.logprobs), torch.tensor(padded.logprobs), atol=1e-5, rtol=1e-4)


def test_padded_rows_are_for_gpus_without_a_kernel(monkeypatch):
    lens = torch.tensor([5, 7], dtype=torch.int32)
    paging = attention.Paging(None, None, None, lens, torch.tensor([0, 1, 4], dtype=torch.int32), 3, 7)
    there = [SimpleNamespace(device=torch.device(name), shape=(4, 2, 8)) for name in ("cpu", "cuda")]
    assert [paging.is_padded(query) for query in there] == [False, True]
    monkeypatch.setattr(attention, "LARGEST_SCORES", 2 * 3 * 7 * 2 - 1)
    assert not paging.is_padded(there[1])
    monkeypatch.undo()
    monkeypatch.setitem(backend.OPS, "paged_attention", replace(backend.OPS["paged_attention"], proven=("triton",)))
    assert not paging.is_padded(there[1])
