"""Attention under models of Transformers: sinks, windows, soft caps, and keys wider than values."""

import pytest
import torch
from accuracy import assert_as_plain, with_gradients

pytest.importorskip("rlkernels.integrations.transformers", reason="this machine lacks transformers")
import rlkernels
from rlkernels import TreeLayout
from rlkernels.integrations.transformers_attention import add_sinks
from tools.architectures import build, check_packed, check_paged

LAYOUT = TreeLayout.from_sequences([[*range(70)], [*range(70), 1, 2], [*range(20), *range(9)], [7]])
BOTH = (check_packed, check_paged)
PACKED = (check_packed,)


@pytest.mark.parametrize(("kind", "checks"), [
    ("gpt_oss", BOTH), ("granite_swa", BOTH), ("granitemoe_swa", BOTH),
    ("mimo_v2_flash", PACKED),  # more heads of keys in layers with a window: not for one cache
    ("mistral", BOTH), ("gemma3_text", BOTH), ("phimoe", BOTH),  # windows, as an argument or in the mask
    ("gemma2", BOTH), ("vaultgemma", BOTH),
    ("deepseek_v2", BOTH), ("deepseek_v3", BOTH), ("glm4_moe_lite", BOTH), ("minicpm3", BOTH), ("youtu", BOTH),
    ("longcat_flash", BOTH),
])  # fmt: skip
def test_models_compute_what_they_do_by_eager_attention(kind, checks):
    for check in checks:
        check(build(kind))


def attend_with_sink_score(query, key, value, sinks, window):
    """Attend with a softmax over the scores of the keys and of the sink, every step rounded."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1).transpose(0, 1) for t in (key, value))
    position = torch.arange(LAYOUT.num_tokens)
    depth = LAYOUT.position_ids
    seen = (position <= position[:, None]) & (position[:, None] < LAYOUT.end) & (depth[:, None] - depth < window)
    score = ((query.transpose(0, 1) * 0.3) @ key.transpose(1, 2)).masked_fill(~seen, -torch.inf)
    sink = sinks.view(-1, 1, 1).expand(*score.shape[:2], 1)
    weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    return (weight @ value).transpose(0, 1)


@pytest.mark.parametrize("sink", [0.0, 3.0, -40.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_sink_is_one_more_score(compiled, dtype, sink):
    shapes = [(LAYOUT.num_tokens, 4, 16), (LAYOUT.num_tokens, 2, 16), (LAYOUT.num_tokens, 2, 16), (4,)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    tensors[3] += sink
    grad = torch.randn(shapes[0]).to(dtype)
    for window in (5, 1000):

        def ours(query, key, value, sinks, window=window):
            out_and_lse = rlkernels.tree_attention(query, key, value, LAYOUT, scale=0.3, window=window, return_lse=True)
            return add_sinks(*out_and_lse, sinks)

        plain, exact = (
            with_gradients(lambda *arguments, window=window: attend_with_sink_score(*arguments, window), inputs, grad)
            for inputs in (tensors, [t.double() for t in tensors])
        )
        assert_as_plain(with_gradients(ours, tensors, grad), plain, exact, 1e-6, 2e-6)
