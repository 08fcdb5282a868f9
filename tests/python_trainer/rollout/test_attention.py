"""How the engine reads the cache: shared prefixes once per group."""

import pytest
from paged import assert_same, engine_for, make, prompts

from python_trainer.model import attention
from python_trainer.rollout import Request, SamplingParams
from python_trainer.rollout.paged import engine as engine_module


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
    apart, engine = engine_for(model, **options | {"share_reads": False}), engine_for(model, **options)
    calls.clear()  # of the checks of the model
    expected = apart.generate(requests, sampling)
    assert not calls
    got = engine.generate(requests, sampling)
    assert_same(got, expected)
    assert calls and max(int(lens.max()) for lens in calls) >= 128
    assert (engine.stats["preemptions"] > 0) == (options["blocks"] == 75)
    calls.clear()
    engine.generate(requests[1:2], sampling)
    assert not calls  # nothing long enough to share
