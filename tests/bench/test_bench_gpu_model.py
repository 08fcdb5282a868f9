"""The decode pass and the micro-batch of a whole model, at small size."""

from contextlib import nullcontext
from pkgutil import resolve_name

import pytest
import torch

from bench.gpu import model

CPU = torch.device("cpu")


def row_of(part, without=()):
    found = []
    assert model.run(part, "auto", CPU, list(without), found.append) == {"ok": True}
    return found[-1]["row"] if found else None


@pytest.mark.slow
@pytest.mark.parametrize("part", model.PARTS)
def test_a_part_of_the_model_is_judged_timed_and_profiled(part):
    row = row_of(part)
    assert row["ok"] and 0 < row["error"] <= row["allowed"]
    # of decoding the difference of two timings, which noise may turn around at this size
    assert row["median_s"] * row["tokens_per_s"] > 0 and (part == "decode" or row["median_s"] > 0)
    assert any(line["name"].startswith("aten::") and line["calls"] > 0 for line in row["profile"])
    assert row_of(part, without=["auto"]) is None


@pytest.mark.slow
@pytest.mark.parametrize(("part", "attention"), [
    ("decode", "rlkernels.prefix_cache.reference.paged_attention"),
    ("train", "rlkernels.prefix_cache.reference.grouped_attention"),
])  # fmt: skip
def test_attention_that_is_off_by_a_third_does_not_pass(monkeypatch, part, attention):
    whole = resolve_name(attention)

    def wrong(*args, **kwargs):
        out = whole(*args, **kwargs)
        return (out[0] * 0.7, out[1]) if isinstance(out, tuple) else out * 0.7

    monkeypatch.setattr(model, "backend", lambda who: nullcontext())
    monkeypatch.setenv("RLKERNELS_BACKEND", "torch")
    assert row_of(part)["ok"]
    monkeypatch.setattr(attention, wrong)
    monkeypatch.setattr("python_trainer.model.traits._agree", lambda *_: True)  # else it is refused at load
    row = row_of(part)
    assert not row["ok"] and row["error"] > row["allowed"] and "median_s" not in row
