"""What decides whether a provider is right, and the rivals it is held against."""

import importlib.util
import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from aot_kernels import grouped
from support import lacks
from triton_aot import compile_for

from bench.gpu import sweeps, worker
from bench.gpu.cases import CASES, attention, logits, rivals, samplers
from bench.gpu.problem import Gate, GpuCase, Problem, Rival, check
from rlkernels.prefix_cache import GroupedLayout, reference

CPU = torch.device("cpu")


def gate(exact, plain=None, floor=1e-6):
    return Gate(Problem(lambda backend: exact if plain is None else plain, lambda: exact, floor=floor))


def passes(result):
    error, allowed = result
    return error <= allowed


def test_rule_is_twice_the_error_of_plain_torch():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain, close, far = (torch.tensor([1.0, 2.0 + e]) for e in (0.01, 0.019, 0.021))
    assert passes(gate(exact, plain).own(close)) and not passes(gate(exact, plain).own(far))


@pytest.mark.parametrize(
    "ours",
    [
        torch.tensor([1.0, math.nan]),
        torch.tensor([1.0, math.inf]),
        torch.ones(3),
        torch.ones(2, dtype=torch.float64),
        (torch.ones(2), torch.ones(2)),
    ],
)
def test_wrong_values_shapes_and_dtypes_fail(ours):
    assert not passes(gate(torch.ones(2)).own(ours))


def test_equal_integers_pass_and_others_fail():
    ids = torch.tensor([1, 2, 3])
    judge = gate((ids, torch.ones(1)), floor=1.0)
    assert judge.own((ids, torch.ones(1))) == (0.0, 0.0) and not passes(judge.own((ids + 1, torch.ones(1))))


def test_large_outputs_are_compared_piece_by_piece(monkeypatch):
    monkeypatch.setattr("bench.gpu.problem.PIECE", 3)
    exact = torch.arange(10.0)
    exact[4], exact[8] = math.nan, math.inf
    assert gate(exact).own(exact.clone()) == (0.0, pytest.approx(9e-6))
    for place in (0, 5, 9):
        wrong = exact.clone()
        wrong[place] += 0.5
        assert gate(exact).own(wrong)[0] == 0.5
    assert gate(exact).own(exact.nan_to_num())[0] == math.inf


def test_a_launcher_that_writes_nothing_fails():
    right = torch.ones(4096)
    for output in (lambda: torch.empty(4096), lambda: torch.empty(4096, dtype=torch.int64)):
        problem = Problem(lambda backend, output=output: right if backend == "torch" else output())
        assert not passes(check(problem, "cuda", CPU))
    state = torch.zeros(4096)
    reset = Problem(
        lambda backend: state.fill_(1) if backend == "torch" else state, reset=lambda: state.fill_(math.nan)
    )
    assert not passes(check(reset, "cuda", CPU))


def contest(problem, case="small"):
    found = []
    worker.run_contest(GpuCase("merge_attention", case, lambda device: problem), CPU, 0.001, [], found.append)
    return {message["row"]["provider"]: message["row"] for message in found if "row" in message}


def test_a_wrong_backend_is_not_timed_and_a_rival_is_judged_by_its_own_rule(monkeypatch):
    monkeypatch.setattr(worker.backends, "unavailable", lambda op, backend, device: None)
    right = torch.ones(3)
    peers = {
        "sorted": Rival(lambda: lambda: right.flip(0).double(), outputs=lambda out: out.flip(0)),
        "noise": Rival(lambda: lambda: 5, judge=lambda out: (float(out), 4.0)),
        "short": Rival(lambda: lambda: torch.ones(2)),
    }
    rows = contest(Problem(lambda backend: right * (1.3 if backend == "cpu" else 1), rivals=peers))
    assert {name: row["ok"] for name, row in rows.items()} == {
        "cpu": False, "triton": True, "torch": True, "sorted": True, "noise": False, "short": False
    }  # fmt: skip
    assert all((row.get("median_s") is not None) == row["ok"] for row in rows.values())
    assert rows["short"]["error"] is None and rows["noise"]["error"] == 5.0


def test_a_provider_that_fails_is_named_and_the_others_are_timed(monkeypatch):
    def fails():
        raise RuntimeError("out of memory")

    def absent():
        import no_such_package.attention as attention

        return attention

    peers = {"peer": fails, "late": lambda: torch.zeros, "absent": absent, "breaks": lambda: absent}
    problem = Problem(lambda backend: torch.ones(3), rivals={name: Rival(make) for name, make in peers.items()})
    rows = contest(problem)
    assert rows["torch"]["ok"] and "out of memory" in rows["peer"]["missing"] and "TypeError" in rows["late"]["missing"]
    assert (rows["absent"]["ok"], rows["absent"]["missing"]) == (None, "no_such_package")
    assert rows["breaks"]["ok"] is False  # not when it is made, but when it is called

    def broken(device):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(worker, "settled", broken)  # the device answers nothing any more: the process has to end
    with pytest.raises(RuntimeError, match="illegal memory access"):
        contest(problem)


# varlen has no kernel for a CPU; FlashInfer and flash-attn are not installed
ON_A_CPU = ("torch SDPA", "torch FlexAttention")


def attend(query, key, value, causal=True):
    """[B, q, Hq, d] over [B, n, Hk, d] -> [B * q, Hq, d]"""
    return torch.cat([reference.attend(q, k, v, 0.3, causal)[0] for q, k, v in zip(query, key, value)])


@pytest.mark.parametrize("queries", [1, 5])
def test_rivals_compute_the_same_attention(queries):
    query = torch.randn(3, queries, 4, 16)
    key, value = torch.randn(2, 3, 24, 2, 16)
    found = rivals.attention(query, key, value, 0.3, compiled=False)
    for name in ON_A_CPU:
        torch.testing.assert_close(found[name].make()(), attend(query, key, value))


@pytest.mark.parametrize("has_gqa", [True, False])
@pytest.mark.parametrize("queries", [1, 5])
def test_varlen_gets_packed_rows_and_the_heads_it_wants(monkeypatch, queries, has_gqa):
    """The kernel has no CPU code: another function takes its place that does what its documentation says."""

    def varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size=(-1, -1), enable_gqa=False):
        assert enable_gqa or q.shape[1] == k.shape[1]
        assert window_size == ((-1, 0) if queries > 1 else (-1, -1)) and (max_q, max_k) == (queries, 24)
        parts = [t.split(s.diff().tolist()) for t, s in ((q, cu_seq_q), (k, cu_seq_k), (v, cu_seq_k))]
        return torch.cat([reference.attend(*rows, scale, window_size == (-1, 0))[0] for rows in zip(*parts)])

    def varlen_of_2_11(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size=(-1, -1)):
        return varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen if has_gqa else varlen_of_2_11)
    query = torch.randn(3, queries, 4, 16)
    key, value = torch.randn(2, 3, 24, 2, 16)
    torch.testing.assert_close(rivals.varlen(query, key, value, 0.3)(), attend(query, key, value))


@pytest.mark.parametrize("queries", [1, 5])
def test_flashinfer_gets_the_pages(monkeypatch, queries):
    class Wrapper:
        def __init__(self, workspace, layout, **options):
            assert layout == "NHD" and workspace.dtype == torch.uint8

        def plan(self, *args, sm_scale, causal=False, **dtypes):
            self.starts = torch.arange(4) if queries == 1 else args[0]
            indptr, self.indices, last, heads, kv_heads, dim, size = args if queries == 1 else args[1:]
            assert (heads, kv_heads, dim, size) == (4, 2, 16, 8) and causal == (queries > 1)
            self.indptr, self.scale = indptr.tolist(), sm_scale
            self.lens = ((indptr.diff() - 1) * size + last).tolist()

        def run(self, q, caches):
            tables = torch.stack([self.indices[a:b] for a, b in zip(self.indptr, self.indptr[1:])])
            return reference.paged_attention(q, *caches, tables, torch.tensor(self.lens), self.starts, self.scale)[0]

    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(rivals, "WORKSPACE_BYTES", 16)
    problem = attention.paged([24] * 3, [queries] * 3, (4, 2, 16), 8, torch.float32, CPU)
    torch.testing.assert_close(problem.rivals["FlashInfer"].make()(), problem.call("torch")[0])
    monkeypatch.delitem(sys.modules, "flashinfer")
    with pytest.raises(ModuleNotFoundError):
        problem.rivals["FlashInfer"].make()


def test_rivals_of_training(monkeypatch):
    layout = GroupedLayout([6, 6], [3, 3, 3, 3], [0, 2, 4])
    query, grad = torch.randn(2, layout.num_tokens, 4, 16)
    key, value = torch.randn(2, layout.num_tokens, 2, 16)
    at = torch.arange(layout.num_tokens)
    mask = rivals.sees(layout, CPU)(0, 0, at[:, None], at)
    heads = rivals.repeated(4, key, value)
    parts = (t.transpose(0, 1) for t in (query, *heads))
    masked = torch.nn.functional.scaled_dot_product_attention(*parts, mask, scale=0.3).transpose(0, 1)
    torch.testing.assert_close(masked, reference.grouped_attention(query, key, value, layout, 0.3))

    def varlen(q, k, v, starts, starts_k, longest, longest_k, *, scale, window_size):
        assert window_size == (-1, 0) and starts is starts_k and longest == longest_k == 9
        rows = (t.split(starts.diff().tolist()) for t in (q, k, v))
        return torch.cat([reference.attend(*r, scale, True)[0] for r in zip(*rows)])

    # copies of a prefix are added up again: output and gradients are those of the packed tokens
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    out = reference.grouped_attention(*leaves, layout, 0.3)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for name, rival in rivals.grouped(query, key, value, grad, layout, 0.3).items():
        if "repeated" in name:
            torch.testing.assert_close(rival.outputs(rival.make()()), exact)


def test_float64_of_grouped_attention_group_by_group():
    problem = attention.grouped(([3, 0, 5], [2, 4, 1, 3], [0, 2, 3, 4]), (4, 2, 16), torch.float32, CPU)
    for mine, exact in zip(problem.call("torch"), problem.exact()):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


def test_timed_attention_has_rivals():
    problem = attention.shared([16] * 2, 3, [8], 1, (4, 2, 16), 8, torch.float32, CPU)
    assert problem.rivals.keys() == {"triton, not shared", "torch SDPA", "torch varlen", "torch FlexAttention",
                                     "FlashInfer", "flash-attn"}  # fmt: skip
    torch.testing.assert_close(problem.rivals["torch SDPA"].make()(), problem.call("torch")[0])


def test_tokens_of_others_must_be_possible():
    rows = torch.tensor([[5.0, 4.0, 3.0, -math.inf], [0.0, 0.0, 0.0, 9.0]])
    assert samplers.possible(rows, 1.0, 1.0, 0).tolist() == [[True, True, True, False], [True] * 4]
    assert samplers.possible(rows, 1.0, 1.0, 2).tolist()[0] == [True, True, False, False]
    assert samplers.possible(rows, 1.0, 0.5, 0).tolist() == [[True, False, False, False], [False] * 3 + [True]]
    logits = torch.randn(400, 50)
    for name, rival in samplers.rivals(logits, 1.0, 1.0, 0).items():
        if name == "torch multinomial":
            assert rival.judge(rival.make()()) == (0.0, 0.0)
    ids, logprobs = samplers.race(logits, torch.empty_like(logits).exponential_(), 1.0)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])
    judge = next(iter(samplers.rivals(logits, 1.0, 0.9, 5).values())).judge
    assert judge(logits.argmax(-1)) == (0.0, 0.0) and judge(logits.argmin(-1)) == (1.0, 0.0)
    assert judge(torch.full((400,), 50)) == (math.inf, 0.0)
    drawn = torch.stack([samplers.race(logits[:1], torch.empty(1, 50).exponential_(), 1.0)[0] for _ in range(4000)])
    counts, expected = torch.bincount(drawn[:, 0], minlength=50), 4000 * logits[0].softmax(-1)
    assert ((counts - expected).square() / expected).sum() < 110  # chi-square of 49 degrees: below with 1 - 1e-6


def test_cross_entropy_from_states_is_the_loss_that_others_compute():
    problem = logits.cross_entropy(5, 33, 8, torch.float32, CPU)
    for mine, exact in zip(problem.call("torch"), problem.exact()):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


def test_every_grid_belongs_to_a_timed_case():
    for op, beginning in sweeps.GRIDS:
        assert sum(case.timed and case.op == op and case.label.startswith(beginning) for case in CASES) == 1


def test_largest_settings_of_grouped_attention_fit_into_shared_memory():
    """And into registers, nearly."""
    if importlib.util.find_spec("triton") is None:
        lacks("triton")
    (values,) = (grid for (op, _), grid in sweeps.GRIDS.items() if op == "grouped_attention")
    block, warps, stages = (max(values[name]) for name in ("block", "num_warps", "num_stages"))
    kernel = grouped("query", 128)
    tile = {**kernel.constexprs, "BLOCK_M": block, "BLOCK_N": block}
    (built,) = compile_for([replace(kernel, constexprs=tile, num_warps=warps, num_stages=stages)], [90])
    assert built.shared_bytes <= 227 * 1024 and built.stack_bytes <= 16, built
