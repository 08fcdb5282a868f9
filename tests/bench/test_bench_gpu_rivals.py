"""The rivals that our kernels are timed beside compute the same."""

import math
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch

import rlkernels
from bench.gpu import rivals, samplers
from bench.gpu.cases import LARGE, RIVALS, cross_entropy, rivals_of
from bench.gpu.rivals import Rival
from bench.sampling import heated
from rlkernels.prefix_cache import GroupedLayout, reference
from rlkernels.proof.cases import attention, logits, rank1
from rlkernels.proof.problem import Case, Problem, Tolerance

CPU = torch.device("cpu")
# FlashInfer and flash-attn are not installed
ON_A_CPU = ("torch SDPA", "torch varlen", "torch FlexAttention")


def varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size=(-1, -1), enable_gqa=False):
    """Stand in for torch's kernel, which has no CPU code: do what its documentation says."""
    assert enable_gqa or q.shape[1] == k.shape[1]
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert window_size == ((-1, 0) if max_q > 1 else (-1, -1))
    sequences = (t.split(starts.diff().tolist()) for t, starts in ((q, cu_seq_q), (k, cu_seq_k), (v, cu_seq_k)))
    return torch.cat([reference.attend(*rows, scale, window_size == (-1, 0))[0] for rows in zip(*sequences)])


def varlen_of_2_11(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size=(-1, -1)):
    return varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.mark.parametrize("has_gqa", [True, False])
@pytest.mark.parametrize("queries", [1, 5])
def test_rivals_compute_the_same_attention(monkeypatch, queries, has_gqa):
    """Check that varlen_attn gets packed rows, and the heads that its version takes."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen if has_gqa else varlen_of_2_11)
    query = torch.randn(3, queries, 4, 16)
    key, value = torch.randn(2, 3, 24, 2, 16)
    expected = torch.cat([reference.attend(q, k, v, 0.3, True)[0] for q, k, v in zip(query, key, value)])
    named_rivals = rivals.attention(query, key, value, 0.3)
    for name in ON_A_CPU:
        torch.testing.assert_close(named_rivals[name].make()(), expected)


@pytest.mark.parametrize("queries", [1, 5])
def test_flashinfer_gets_the_pages(monkeypatch, queries):
    class Wrapper:
        def __init__(self, workspace, layout, **options):
            assert layout == "NHD" and workspace.dtype == torch.uint8

        def plan(self, *args, sm_scale, causal=False, **dtypes):
            self.starts = torch.arange(4) if queries == 1 else args[0]
            indptr, self.indices, last_page_lens, heads, kv_heads, dim, size = args if queries == 1 else args[1:]
            assert (heads, kv_heads, dim, size) == (4, 2, 16, 8) and causal == (queries > 1)
            self.indptr = indptr.tolist()
            self.scale = sm_scale
            self.lens = ((indptr.diff() - 1) * size + last_page_lens).tolist()

        def run(self, q, caches):
            tables = torch.stack([self.indices[a:b] for a, b in zip(self.indptr, self.indptr[1:])])
            return reference.paged_attention(q, *caches, tables, torch.tensor(self.lens), self.starts, self.scale)[0]

    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(rivals, "WORKSPACE_BYTES", 16)
    problem = attention.paged([24] * 3, [queries] * 3, (4, 2, 16), 8, torch.float32, CPU)
    rival = rivals.paged(**problem.inputs)["FlashInfer"]
    torch.testing.assert_close(rival.make()(), problem.call("torch")[0])
    monkeypatch.delitem(sys.modules, "flashinfer")
    with pytest.raises(ModuleNotFoundError):
        rival.make()


LAYOUTS = {  # with the tokens of the longest sequence
    "even": (GroupedLayout([6, 6], [3, 3, 3, 3], [0, 2, 4]), 9),
    "ragged": (GroupedLayout([2, 0, 6], [3, 1, 5, 4, 0, 2], [0, 3, 4, 6]), 8),
}


@pytest.mark.parametrize("has_gqa", [True, False])
@pytest.mark.parametrize(("layout", "longest"), LAYOUTS.values(), ids=LAYOUTS)
def test_rivals_of_training(monkeypatch, layout, longest, has_gqa):
    scale = 0.25
    query, grad = torch.randn(2, layout.num_tokens, 4, 16)
    key, value = torch.randn(2, layout.num_tokens, 2, 16)
    positions = torch.arange(layout.num_tokens)
    mask = rivals.sees(layout, CPU)(0, 0, positions[:, None], positions)
    heads = rivals.repeated(4, key, value)
    qkv = (t.transpose(0, 1) for t in (query, *heads))
    masked_output = torch.nn.functional.scaled_dot_product_attention(*qkv, mask, scale=scale).transpose(0, 1)
    torch.testing.assert_close(masked_output, reference.tree_attention(query, key, value, layout, scale)[0])
    # the gradients of the copies of a prefix are summed: output and gradients are those of the packed tokens
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen if has_gqa else varlen_of_2_11)
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    out, _ = reference.tree_attention(*leaves, layout, scale)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    named_rivals = rivals.grouped((query, key, value), grad, layout)
    for name in ("SDPA", "varlen"):
        rival = named_rivals[f"torch {name}, every prefix repeated"]
        torch.testing.assert_close(rival.outputs(rival.make()()), exact)
    torch.testing.assert_close([t.detach() for t in named_rivals["torch FlexAttention"].make()()], exact)
    copies = named_rivals["torch SDPA, every prefix repeated"].copy()
    assert [tuple(t.shape) for t in copies] == [(len(layout.suffix_lens), heads, longest, 16) for heads in (4, 2, 2)]


def test_copies_that_contiguous_attention_reads():
    """Keys [B, Hk, n, d] of a cache whose pages are shuffled."""
    problem = attention.paged([20] * 3, [1] * 3, (4, 2, 16), 8, torch.float32, CPU)
    key, value = rivals.gather(problem.inputs["caches"], problem.inputs["tables"], 20)
    query = problem.inputs["query"].unflatten(0, (3, 1)).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(rivals.packed(out), problem.call("torch")[0])
    named_rivals = rivals.paged(**problem.inputs)
    assert {name for name, rival in named_rivals.items() if rival.copy} == {*ON_A_CPU, "flash-attn"}
    torch.testing.assert_close(named_rivals["flash-attn"].copy(), [key.transpose(1, 2), value.transpose(1, 2)])


def test_timed_cases_have_rivals():
    case = Case("shared_prefix_attention", "two prefixes", None)
    problem = attention.shared([16] * 2, 3, [8], 1, (4, 2, 16), 8, torch.float32, CPU)
    named_rivals = rivals_of(case, problem)
    libraries = {"torch SDPA", "torch varlen", "torch FlexAttention", "FlashInfer", "flash-attn"}
    assert named_rivals.keys() == {*libraries, "triton, not shared"}
    torch.testing.assert_close(named_rivals["torch SDPA"].make()(), problem.call("torch")[0])
    ragged = attention.paged(*attention.ODD, (4, 2, 16), 8, torch.float32, CPU)
    assert rivals_of(replace(case, op="paged_attention"), ragged) == {}
    problems = {
        "sample_tokens": logits.sample(2, 9, torch.float32, [(1.0, 1.0, 0)], CPU),
        "token_logprobs": logits.logprobs(2, 9, torch.float32, True, CPU),
        "linear_token_logprobs": cross_entropy(5, 33, 8, torch.float32, CPU),
        "grouped_attention": attention.grouped(attention.groups(2, 2, 4, 3), (4, 2, 16), torch.float32, CPU),
        "tree_attention": attention.tree([(1, 4), (2, 3), (2, 2)], (4, 2, 16), torch.float32, CPU),
    }
    for op, problem in problems.items():
        assert any("torch" in name for name in rivals_of(replace(case, op=op), problem)), op
    tree = problems["tree_attention"]
    masked = rivals_of(replace(case, op="tree_attention"), tree)["torch FlexAttention"].make()()
    torch.testing.assert_close([t.detach() for t in masked], tree.exact(), check_dtype=False)
    assert {case.op for case in LARGE} - RIVALS.keys() == {"dtw", "dtw_topk"}


def test_every_op_is_timed_in_three_sizes():
    """Regimes and settings with verdicts of their own, too."""
    kinds = Counter(
        (case.op, "16 dimensions" in case.label, "prefill" in case.label, "top-p" in case.label) for case in LARGE
    )
    assert kinds["sample_tokens", False, False, True] == kinds["dtw", True, False, False] == 3
    assert kinds["paged_attention", False, True, False] == 3 and min(kinds.values()) == 3


F32, BF16 = torch.float32, torch.bfloat16
PROBLEMS = {
    "shared_prefix_attention": partial(attention.shared, [16] * 2, 3, [8], 1, (4, 2, 16), 8, F32),
    "write_kv": partial(attention.write, 37, (2, 16), 8, BF16),
    "merge_attention": partial(attention.merge, 5, 2, 16, BF16),
    "sample_tokens": partial(logits.sample, 5, 33, F32, [(0.7, 0.9, 8)]),
    "verify_drafts": partial(logits.verify, [3, 0, 2], 33, F32, [(1.0, 1.0, 0)]),
    "token_logprobs": partial(logits.logprobs, 5, 33, F32, True),
    "linear_token_logprobs": partial(logits.linear_logprobs, 5, 33, 8, F32),
    "top1_delta": partial(rank1.top1, 65, 33, BF16),
    "top1_deltas": partial(rank1.top1_many, [(65, 33), (40, 57)], BF16),
    "delta_matvec": partial(rank1.matvec, 65, 33, BF16),
    "add_rank1_": partial(rank1.add, 65, 33, BF16, False),
}
RUN_HERE = {
    "shared_prefix_attention": {"torch SDPA", "torch FlexAttention", "triton, not shared"},
    "write_kv": {"torch index_copy_", "torch index_put_"},
    "merge_attention": {"torch.compile"},
    "sample_tokens": {"Transformers"},
    "verify_drafts": {"torch multinomial", "torch.compile, exponential race"},
    "token_logprobs": {"torch.compile", "TRL"},
    "linear_token_logprobs": {"torch.compile", "TRL"},
    "top1_delta": {"torch svd_lowrank"},
    "top1_deltas": {"torch svd_lowrank"},
    "delta_matvec": {"torch.compile"},
    "add_rank1_": {"torch addcmul_", "torch addr_"},
}


@pytest.mark.parametrize("op", PROBLEMS)
def test_rivals_keep_the_rule_of_the_op(trl_integration, monkeypatch, op):
    """Twice, as timed calls repeat: what a call changes is restored before. Compilers and Triton stand aside."""
    attend = rlkernels.paged_attention

    def without_triton(*args, backend, **options):
        assert backend == "triton"
        return attend(*args, backend="torch", **options)

    monkeypatch.setattr(rlkernels, "paged_attention", without_triton)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    torch.manual_seed(0)
    problem = PROBLEMS[op](CPU)
    gate = Tolerance(problem)
    named_rivals = rivals_of(Case(op, "", None), problem)
    for name in RUN_HERE[op]:
        call = named_rivals[name].make()
        for _ in range(2):
            if problem.reset:
                problem.reset()
            error, allowed = named_rivals[name].verdict(gate, call())
            assert error <= allowed, name


def test_a_draft_is_judged_by_its_new_tokens():
    """Possible tokens, as many as were accepted and one more of each sequence."""
    rows = torch.tensor([[0.0, -math.inf], [0.0, 0.0], [-math.inf, 0.0]])
    rival = samplers.verifiers(rows, [[0], []], torch.tensor([0, 2, 3]), 1.0)["torch multinomial"]
    accepted, ids, _ = rival.make()()
    assert accepted.tolist() == [1, 0] and ids[0] == 0 and ids[2] == 1
    assert rival.judge((accepted, ids, None)) == (0.0, 0.0)
    assert rival.judge((accepted, torch.tensor([1, 0, 1]), None))[0] == pytest.approx(1 / 3)
    assert rival.judge((accepted, torch.tensor([0, -1, 1]), None)) == (math.inf, 0.0)


def test_a_rival_is_judged_by_its_own_rule():
    output = torch.ones(3)
    gate = Tolerance(Problem(lambda backend: output))
    assert Rival(None, outputs=lambda out: out.flip(0)).verdict(gate, output.flip(0).double()) == (0.0, 2e-6)
    assert Rival(None, judge=lambda out: (float(out), 4.0)).verdict(gate, 5) == (5.0, 4.0)
    assert Rival(None).verdict(gate, torch.ones(2))[0] == math.inf
    assert Rival(None).verdict(gate, [output, output, output]) == (math.inf, 0.0)
    two_outputs = Tolerance(Problem(lambda backend: (output, output)))
    assert Rival(None).verdict(two_outputs, output)[0] == 0.0, "the first output alone"


def test_no_sampler_divides_by_a_temperature_of_one():
    rows = torch.randn(2, 5)
    assert heated(rows, 1.0) is rows
    torch.testing.assert_close(heated(rows.bfloat16(), 0.5), rows.bfloat16().float() * 2)


def test_tokens_of_others_must_be_possible():
    rows = torch.tensor([[5.0, 4.0, 3.0, -math.inf], [0.0, 0.0, 0.0, 9.0]])
    assert samplers.possible(rows, 1.0, 1.0, 0).tolist() == [[True, True, True, False], [True] * 4]
    assert samplers.possible(rows, 1.0, 1.0, 2).tolist()[0] == [True, True, False, False]
    assert samplers.possible(rows, 1.0, 0.5, 0).tolist() == [[True, False, False, False], [False] * 3 + [True]]
    logits = torch.randn(400, 50)
    rival = samplers.rivals(logits, 1.0, 1.0, 0)["torch multinomial"]
    assert rival.judge(rival.make()()) == (0.0, 0.0)
    ids, logprobs = samplers.race(logits, torch.empty_like(logits).exponential_(), 1.0)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])
    judge = next(iter(samplers.rivals(logits, 1.0, 0.9, 5).values())).judge
    assert judge(logits.argmax(-1)) == (0.0, 0.0) and judge(logits.argmin(-1)) == (1.0, 0.0)
    assert judge(torch.full((400,), 50)) == (math.inf, 0.0)
    drawn_ids = torch.stack([samplers.race(logits[:1], torch.empty(1, 50).exponential_(), 1.0)[0] for _ in range(4000)])
    counts = torch.bincount(drawn_ids[:, 0], minlength=50)
    expected = 4000 * logits[0].softmax(-1)
    chi_square = ((counts - expected).square() / expected).sum()
    assert chi_square < 110  # 49 degrees of freedom: below 110 with probability 1 - 1e-6


def test_cross_entropy_from_states_is_the_loss_that_others_compute():
    problem = cross_entropy(5, 33, 8, torch.float32, CPU)
    for result, exact in zip(problem.call("torch"), problem.exact()):
        torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-5)
