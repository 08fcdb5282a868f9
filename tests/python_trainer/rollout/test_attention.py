"""How the engine reads the cache: shared prefixes once per group, padded rows on GPUs without a proven kernel."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from paged import assert_same, engine_for, make, prompts
from support import Launches
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from python_trainer.model import attention
from python_trainer.model.attention import attend_rows, flash_rows
from python_trainer.rollout import Request, SamplingParams
from python_trainer.rollout.paged import engine as engine_module
from rlkernels import backend


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors made within it, beside those that are known, and the most at a time."""

    def __init__(self, known):
        super().__init__()
        self.now = self.most = 0
        self.seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self.seen:
                self.seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def gone(self, size):
        self.now -= size


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


@pytest.mark.parametrize("kind", ["padded_rows", "varlen_rows"])
def test_stand_ins_give_the_same_answers(monkeypatch, kind):
    """What a GPU without a proven attention kernel does: prompts in chunks, decoding and drafts, all in one pass."""
    requests = [Request(ids, num_samples=n, max_new_tokens=12) for ids, n in zip(prompts([3, 17, 1, 40]), [2, 1, 3, 2])]
    sampling = SamplingParams(temperature=0.8, seed=3)

    def answers(name):
        used = []
        make_rows = getattr(attention.PagedBatch, name or "", None)

        def counted(self):
            used.append(self.longest_query)
            return make_rows(self)

        monkeypatch.setattr(attention.PagedBatch, "rows_for", lambda self, query: name and (lambda: counted(self)))
        engine = engine_for(make(), fused=False, max_sequences=6, max_batch_tokens=16)
        out = engine.generate(requests, sampling)
        assert len(used) == (engine.stats["forward_passes"] if name else 0), "once in a pass, not in a layer"
        assert not name or min(used) == 1 < max(used), "decoding alone, and prompts beside it"
        return out

    for plain, other in zip(answers(None), answers(kind), strict=True):
        assert plain.ids == other.ids
        torch.testing.assert_close(torch.tensor(plain.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=1e-4)


def test_stand_ins_are_for_gpus_without_a_kernel(monkeypatch):
    lens = torch.tensor([5, 7], dtype=torch.int32)
    paging = attention.PagedBatch(None, None, None, lens, torch.tensor([0, 1, 4], dtype=torch.int32), 3, 7, 12)
    host, gpu = (SimpleNamespace(device=torch.device(name), shape=(4, 2, 8)) for name in ("cpu", "cuda"))
    runs, options, fits = {"flash": False}, {"enable_gqa"}, 2 * 3 * 7 * 2
    monkeypatch.setattr(attention, "kernel_for", lambda query: flash_rows if runs["flash"] else attend_rows)
    monkeypatch.setattr(attention, "varlen_options", lambda: options)

    def chosen(most=fits, **changes):
        runs.update(changes)
        monkeypatch.setattr(attention, "FEW_SCORES", most)
        found = paging.rows_for(gpu)
        return found and found.__name__

    assert paging.rows_for(host) is None
    assert chosen() == chosen(fits - 1) == "padded_rows"
    assert chosen(flash=True) == chosen(fits - 1) == "varlen_rows"
    options.clear()  # keys would be repeated for every head
    assert chosen() == "padded_rows" and chosen(fits - 1) == "varlen_rows"
    monkeypatch.setitem(backend._run, "paged_attention", "triton")
    backend.forget()
    assert chosen() is None


@pytest.mark.parametrize("largest", [1 << 28, 2048, 700, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_rows_in_pieces(monkeypatch, largest, dtype):
    """The same as each sequence alone, with its gradients."""
    monkeypatch.setattr(attention, "LARGEST_PIECE", largest)
    query_lens, key_lens, heads, kv_heads, dim = [3, 1, 5, 2, 1], [9, 1, 5, 17, 12], 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    cache = [torch.randn(8 * 4, kv_heads, dim, generator=generator, dtype=dtype) for _ in range(2)]  # 8 blocks of 4
    tables = torch.tensor([[0, 1, 2, 0, 0], [3, 0, 0, 0, 0], [4, 5, 0, 0, 0], [6, 7, 0, 2, 1], [2, 4, 6, 0, 0]])
    starts = pad(torch.tensor(query_lens).cumsum(0), (1, 0)).int()
    paging = attention.PagedBatch(
        SimpleNamespace(block_size=4), torch.zeros(sum(query_lens)), tables.int(), torch.tensor(key_lens).int(), starts,
        max(query_lens), max(key_lens), sum(key_lens),
    )  # fmt: skip
    query = torch.randn(sum(query_lens), heads, dim, generator=generator, dtype=dtype)
    inputs = [x.requires_grad_() for x in (query, *cache)]
    rows = paging.padded_rows()
    out = rows.attend(*inputs, 0.3)
    twin = [x.detach().double().requires_grad_() for x in inputs]
    expected = []
    for row, (first, last) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
        slots = [int(tables[row, place // 4]) * 4 + place % 4 for place in range(key_lens[row])]
        k, v = (x[slots].repeat_interleave(heads // kv_heads, 1) for x in twin[1:])  # [K, Hq, d]
        score = 0.3 * torch.einsum("qhd,khd->hqk", twin[0][first:last], k)
        late = torch.ones_like(score[0], dtype=torch.bool).triu(key_lens[row] - query_lens[row] + 1)
        expected.append(torch.einsum("hqk,khd->qhd", score.masked_fill(late, -torch.inf).softmax(-1), v))
    weight = torch.randn(out.shape, generator=generator, dtype=dtype)
    got = [out, *torch.autograd.grad((out * weight).sum(), inputs)]
    wanted = [torch.cat(expected), *torch.autograd.grad((torch.cat(expected) * weight).sum(), twin)]
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.03}
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **tolerance)


def test_padded_rows_hold_no_scores(monkeypatch):
    """What is alive at once are gathered keys and values of a piece and its mask, whatever the number of sequences."""
    rows, keys, heads, dim = 24, 1024, 16, 8
    index, places = torch.arange(rows)[:, None], torch.arange(keys).repeat(rows, 1)
    query, key, value = torch.randn(rows, heads, dim), torch.randn(keys, 1, dim), torch.randn(keys, 1, dim)

    def taken(pieces):
        largest = rows // pieces * keys * max(heads, 2 * dim)
        monkeypatch.setattr(attention, "LARGEST_PIECE", largest)
        padded = attention.PaddedRows(index, places, torch.full_like(index, keys - 1), index.flatten())
        with torch.no_grad(), Launches() as launches:
            padded.attend(query, key, value, 1.0)
        assert not {"bmm", "_softmax"} & launches.counts.keys()
        assert launches.counts["_scaled_dot_product_flash_attention_for_cpu"] == pieces
        with torch.no_grad(), Alive([index, places, query, key, value]) as alive:
            padded.attend(query, key, value, 1.0)
        return alive.most

    scores = 4 * rows * heads * keys
    assert taken(1) <= 2.3 * scores, "keys, values, and a mask: what scores would come on top of"
    assert taken(8) <= taken(1) / 3
