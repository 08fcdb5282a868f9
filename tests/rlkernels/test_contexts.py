"""Every op works on the device of its inputs, whatever ``torch.set_default_device`` says.

Plain torch, the default on a GPU without a verdict, gives the same inside autocast as outside.
"""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import rlkernels
from rlkernels.extrapolation import PREDICTORS
from rlkernels.proof.cases import SMALL


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


def proven(problem, backend):
    """A case of the proof, which may return what it has changed."""
    if problem.reset:
        problem.reset()
    return [t.clone() for t in tree_leaves(problem.call(backend))]


def grouped(query, key, value):
    layout = rlkernels.GroupedLayout([3], [4, 4], [0, 2])
    return [rlkernels.grouped_attention(query, key, value, layout, scale=0.3, backend="torch")]


def rank1(weight, base, v):
    update = rlkernels.top1_delta(weight, base, backend="torch")
    facts = base.new_tensor([update.sigma, update.angle_bound])
    return [update.u, update.v, facts, rlkernels.delta_matvec(weight, base, v, backend="torch")]


def similarity(x):
    metrics = {"sliced_wasserstein": x, "hellinger": x[..., 0], "cosine": x[..., 0]}
    found = [rlkernels.state_similarity(t, t, metric=metric) for metric, t in metrics.items()]
    bank = rlkernels.Trajectories(rewards=x[..., 0], states=x)
    return [*found, *rlkernels.rhyme_topk(bank, bank), rlkernels.soft_dtw(x, x)]


def trajectory(base, direction):
    made = rlkernels.RankOneTrajectory({"w": base})
    for step in range(1, 7):
        weights = {"w": base + step * direction}
        made.track(weights, step=step, accuracy=step / 10)
    found = [rlkernels.extrapolate(made, weights, rlkernels.Target(9), predictor=p)["w"] for p in sorted(PREDICTORS)]
    found += made.state_dict().values()
    return found if rlkernels.refusal(made, "secant") is None else None


def random_numbers(ids):
    return [rlkernels.keyed_uniform(3, ids, ids, backend=backend) for backend in ("auto", "torch")]


def drafts(backend):
    history = rlkernels.RolloutHistory(backend=backend)
    history.add([1], range(20))
    return [*history.draft_tracked([history.track([1])], max_tokens=4), history.to_bytes()]


CASES = {  # what runs, and its inputs
    "layout": (layout, tuple),
    "paged cache": (paged_cache, lambda: ("auto",)),
    "paged cache in Python": (paged_cache, lambda: ("torch",)),
    "grouped attention in torch": (grouped, lambda: (torch.randn(11, 4, 8), *torch.randn(2, 11, 2, 8))),
    "rank 1 in torch": (rank1, lambda: (*torch.randn(2, 20, 16), torch.randn(16))),
    "similarity": (similarity, lambda: (torch.rand(5, 6, 2),)),
    "trajectory": (trajectory, lambda: (torch.randn(20, 30), 1e-3 * torch.outer(torch.randn(20), torch.randn(30)))),
    "random numbers": (random_numbers, lambda: (torch.arange(6),)),
    "drafts": (drafts, lambda: ("auto",)),
    "drafts in Python": (drafts, lambda: ("torch",)),
    **{f"{case.op}, {case.label}, in {b}": (proven, lambda case=case, b=b: (case.make(torch.device("cpu")), b))
       for case in SMALL for b in ("auto", "torch") if not case.op.startswith("top1")},  # which make tensors of numbers
}  # fmt: skip


@pytest.mark.parametrize(("case", "context"), [
    *((case, "default device") for case in CASES),
    # the gradients of grouped_attention are not for autocast
    *((case, "autocast") for case in CASES if case.endswith("in torch") and not case.startswith("grouped_attention")),
])  # fmt: skip
def test_nothing_depends_on_the_context(case, context):
    call, make = CASES[case]
    torch.manual_seed(0)
    inputs = make()
    expected = call(*inputs)
    with torch.device("meta") if context == "default device" else torch.autocast("cpu", torch.bfloat16):
        found = call(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
