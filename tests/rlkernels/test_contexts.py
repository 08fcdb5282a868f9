"""Every op works on the device of its inputs, whatever ``torch.set_default_device`` says.

Plain torch, the default on a GPU without a verdict, gives the same inside autocast as outside.
"""

import pytest
import torch

import rlkernels
from rlkernels.extrapolation import PREDICTORS


def layout():
    made = rlkernels.GroupedLayout([4, 2], [3, 2, 1], [0, 2, 3])
    return [made.position_ids, *made.paged]


def paged_cache(backend):
    cache = rlkernels.PagedKVCache(1, 1, 8, num_blocks=16, block_size=4, backend=backend)
    first = cache.open(range(12))
    cache.commit(first)
    sequences = [first, *cache.open_many([[*range(12), i] for i in range(3)])]
    slots = cache.append_many(sequences, [[7]] * 4)
    return [*cache.group(sequences, min_tokens=4), *cache.tables(sequences), slots, cache.slots(sequences)]


def attention(query, keys, backend):
    tables, lens, starts = (keys.new_tensor(x).int() for x in ([[1, 0], [2, 3]], [6, 5], [0, 2, 3]))
    return rlkernels.paged_attention(query, keys, keys, tables, lens, starts, scale=0.3, backend=backend)


def grouped(query, key, value):
    layout = rlkernels.GroupedLayout([3], [4, 4], [0, 2])
    return [rlkernels.grouped_attention(query, key, value, layout, scale=0.3, backend="torch")]


def rank1(weight, base, v):
    update = rlkernels.top1_delta(weight, base, backend="torch")
    facts = base.new_tensor([update.sigma, update.angle_bound])
    return [update.u, update.v, facts, rlkernels.delta_matvec(weight, base, v, backend="torch")]


def similarity(x, backend):
    metrics = {"sliced_wasserstein": x, "hellinger": x[..., 0], "cosine": x[..., 0]}
    found = [rlkernels.state_similarity(t, t, metric=metric) for metric, t in metrics.items()]
    bank = rlkernels.Trajectories(rewards=x[..., 0], states=x)
    found += [*rlkernels.dtw(x, x, mode="subsequence", backend=backend), rlkernels.dtw(x, x, band=1, backend=backend)]
    return [*found, *rlkernels.dtw_topk(x, x, 2), *rlkernels.rhyme_topk(bank, bank), rlkernels.soft_dtw(x, x)]


def trajectory(base, direction):
    made = rlkernels.RankOneTrajectory({"w": base})
    for step in range(1, 7):
        weights = {"w": base + step * direction}
        made.track(weights, step=step, accuracy=step / 10)
    found = [rlkernels.extrapolate(made, weights, rlkernels.Target(9), predictor=p)["w"] for p in sorted(PREDICTORS)]
    found += made.state_dict().values()
    return found if rlkernels.refusal(made, "secant") is None else None


def tokens(logits, seeds, backend):
    uniforms = rlkernels.keyed_uniform(3, seeds, seeds, backend=backend)
    starts = seeds.new_tensor([0, 3, 6])
    found = rlkernels.verify_drafts(logits, [[1, 2], [3, 4]], starts, uniforms, top_k=5, top_p=0.9, backend=backend)
    drawn = rlkernels.sample_tokens(logits, uniforms, temperature=0.7, backend=backend)
    scored = rlkernels.token_logprobs(logits, seeds, return_entropy=True, backend=backend)
    return [uniforms, *found, *drawn, *scored, rlkernels.linear_token_logprobs(logits, logits, seeds, backend=backend)]


def drafts(backend):
    history = rlkernels.RolloutHistory(backend=backend)
    history.add([1], range(20))
    return [*history.draft_tracked([history.track([1])], max_tokens=4), history.to_bytes()]


def attention_inputs():
    return torch.randn(3, 2, 8), torch.randn(4, 4, 1, 8)


CASES = {  # what runs, and its inputs
    "layout": (layout, tuple),
    "paged cache": (paged_cache, lambda: ("auto",)),
    "paged cache in Python": (paged_cache, lambda: ("torch",)),
    "attention": (attention, lambda: (*attention_inputs(), "auto")),
    "attention in torch": (attention, lambda: (*attention_inputs(), "torch")),
    "grouped attention in torch": (grouped, lambda: (torch.randn(11, 4, 8), *torch.randn(2, 11, 2, 8))),
    "rank 1 in torch": (rank1, lambda: (*torch.randn(2, 20, 16), torch.randn(16))),
    "similarity": (similarity, lambda: (torch.rand(5, 6, 2), "auto")),
    "similarity in torch": (similarity, lambda: (torch.rand(5, 6, 2), "torch")),
    "trajectory": (trajectory, lambda: (torch.randn(20, 30), 1e-3 * torch.outer(torch.randn(20), torch.randn(30)))),
    "tokens": (tokens, lambda: (torch.randn(6, 11), torch.arange(6), "auto")),
    "tokens in torch": (tokens, lambda: (torch.randn(6, 11), torch.arange(6), "torch")),
    "drafts": (drafts, lambda: ("auto",)),
    "drafts in Python": (drafts, lambda: ("torch",)),
}


@pytest.mark.parametrize(("case", "context"), [
    *((case, "default device") for case in CASES),
    *((case, "autocast") for case in ("attention in torch", "grouped attention in torch", "rank 1 in torch")),
])  # fmt: skip
def test_nothing_depends_on_the_context(case, context):
    call, make = CASES[case]
    torch.manual_seed(0)
    inputs = make()
    expected = call(*inputs)
    with torch.device("meta") if context == "default device" else torch.autocast("cpu", torch.bfloat16):
        found = call(*inputs)
    assert [t.device.type for t in found] == ["cpu"] * len(expected)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected))
