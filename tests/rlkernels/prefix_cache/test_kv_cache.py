"""What PagedKVCache promises about sequences, sharing and versions."""

import copy
import gc
import pickle

import numpy as np
import pytest
import torch
from support import take_backend
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernels


@pytest.fixture(autouse=True, params=["cpu", "torch"])
def each_backend(request, monkeypatch):
    take_backend(request.param, monkeypatch)


@pytest.fixture
def cache(each_backend):
    return make()


def make(num_blocks=16):
    return rlkernels.PagedKVCache(2, 2, 8, num_blocks=num_blocks, block_size=4)


def fill(cache, seq):
    """Write keys and values that tell token and position, as a model does, and commit."""
    start = seq.num_computed
    mark = torch.tensor([t * 1000.0 + i for i, t in enumerate(seq.token_ids)][start:])[:, None, None].expand(-1, 2, 8)
    for layer in range(2):
        rlkernels.write_kv(mark + layer, -mark, cache.key_cache[layer], cache.value_cache[layer], seq.slots)
    cache.commit(seq)


def stored(cache, seq):
    blocks = cache.key_cache[0][seq.block_table.long()]
    return blocks.flatten(0, 1)[: seq.length, 0, 0].tolist()


def expected(seq):
    return [t * 1000.0 + i for i, t in enumerate(seq.token_ids)]


def test_a_prefix_is_found_again_and_one_token_is_left(cache):
    first = cache.open(range(8))
    assert (first.num_cached, first.length, len(first.slots)) == (0, 8, 8)
    fill(cache, first)
    second = cache.open(range(8))
    assert second.num_cached == 4 and len(second.slots) == 4
    longer = cache.open([*range(8), 99])
    assert longer.num_cached == 8
    assert longer.block_table[:2].tolist() == first.block_table.tolist()
    assert cache.open([*range(7), 99, 5, 6]).num_cached == 4
    assert cache.open([1, *range(1, 8)]).num_cached == 0
    assert cache.stats["hits"] == 4 + 8 + 4


def test_new_policy_version_hides_everything(cache):
    old_sequence = cache.open(range(9))
    fill(cache, old_sequence)
    running = cache.open([*range(50, 59)])
    cache.advance_version()
    assert cache.open(range(9)).num_cached == 0
    fill(cache, running)  # opened before: shares nothing
    assert cache.open([*range(50, 59)]).num_cached == 0
    fill(cache, new_sequence := cache.open(range(9)))
    assert cache.open(range(9)).num_cached == 8
    assert stored(cache, new_sequence) == expected(new_sequence)


def test_stale_child_is_not_found_under_a_reused_parent():
    cache = make(num_blocks=6)
    fill(cache, seq := cache.open(range(8)))
    keeper = cache.open(range(5))  # pins the first block only
    cache.close(seq)
    cache.advance_version()  # the second block is stale, its parent still in use
    cache.close(keeper)
    fill(cache, cache.open(range(4)))  # may get the old parent, but then not the old child with it
    assert cache.open(range(9)).num_cached == 4


def test_fork_copies_only_when_written(cache):
    fill(cache, parent := cache.open(range(6)))
    a, b = cache.fork(parent, 2)
    assert a.num_cached == 6 and len(a.slots) == 0
    free = cache.stats["blocks_free"]
    fill_slots = [cache.append(seq, [100 + i]) for i, seq in enumerate((a, b))]
    assert cache.stats["blocks_free"] == free - 2
    assert len({int(s) for s in fill_slots}) == 2
    assert stored(cache, a)[:6] == stored(cache, parent) == expected(parent)
    cache.append(parent, [7])  # alone with its block by now
    assert cache.stats["blocks_free"] == free - 2
    assert a.block_table[0] == parent.block_table[0] and a.block_table[1] != parent.block_table[1]


def test_truncate_into_a_shared_block_leaves_it_as_it_was(cache):
    fill(cache, seq := cache.open(range(8)))
    keeper = cache.open(range(9))
    cache.truncate(seq, 6)
    cache.append(seq, [70])
    fill(cache, seq)
    assert stored(cache, keeper)[:8] == [t * 1001.0 for t in range(8)]
    cache.truncate(seq, 0)
    assert seq.length == 0 and len(seq.block_table) == 0


def test_equal_blocks_become_one_on_commit(cache):
    a = cache.open(range(9))
    b = cache.open(range(9))
    assert a.num_cached == b.num_cached == 0  # nothing is shared before
    fill(cache, a)
    fill(cache, b)
    assert a.block_table[:2].tolist() == b.block_table[:2].tolist()
    assert cache.stats["blocks_pinned"] == 4


def test_open_many_takes_a_common_beginning_once(cache):
    a, b, c = cache.open_many([range(12), [*range(8), 50, 51], [*range(4), 60]])
    assert [s.num_cached for s in (a, b, c)] == [0, 8, 4]
    assert cache.stats["blocks_pinned"] == 5
    assert cache.group([a, b], min_tokens=4)[1].tolist() == [0, 0]  # a part that is still to compute is not shared
    fill(cache, a), fill(cache, b), fill(cache, c)
    assert all(stored(cache, s) == expected(s) for s in (a, b, c))


def test_out_of_blocks_changes_nothing():
    cache = make(num_blocks=4)
    fill(cache, cached := cache.open(range(9)))
    cache.close(cached)
    stats = cache.stats
    with pytest.raises(rlkernels.OutOfBlocks, match="5 blocks are needed"):
        cache.open(range(20, 37))
    with pytest.raises(rlkernels.OutOfBlocks):
        cache.open_many([range(9), range(30, 40)])
    assert cache.stats == stats
    seq = cache.open(range(9))
    assert seq.num_cached == 8
    with pytest.raises(rlkernels.OutOfBlocks):
        cache.append(seq, range(8))  # its blocks are pinned
    assert seq.length == 9 and len(cache.append(seq, range(7))) == 7
    with pytest.raises(rlkernels.OutOfBlocks):
        cache.append_many([seq, *cache.fork(seq, 1)], [[], [1]])


def test_what_nothing_refers_to_gives_its_blocks_back():
    cache = make(num_blocks=7)
    fill(cache, seq := cache.open(range(9)))
    remaining, *forks = cache.fork(seq, 3)
    for fork in forks:
        cache.append(fork, range(5))
    assert cache.stats["blocks_free"] == 0
    match = "1 blocks are needed, 0 of 7 are free or evictable: close what has ended of the 4 open sequences, or make a"
    with pytest.raises(rlkernels.OutOfBlocks, match=match):
        cache.open([7])
    del seq, forks, fork
    assert cache.stats["blocks_free"] == 4 and cache.open(range(40, 52)).num_cached == 0
    circle = [remaining]
    circle.append(circle)
    del remaining, circle
    gc.collect()
    assert [cache.stats[name] for name in ("blocks_free", "blocks_cached", "blocks_pinned")] == [5, 2, 0]
    assert cache.open(range(9)).num_cached == 8  # what was committed is found until its space is needed


class LittleMemory(TorchDispatchMode):
    """Have memory for so many new tensors on a device (that of "meta"), and none for the next one."""

    def __init__(self, tensors):
        super().__init__()
        self.left = tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if getattr(out, "is_meta", False) and func._schema.returns[0].alias_info is None:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError
        return out


def test_append_without_memory_changes_nothing(each_backend):
    cache = rlkernels.PagedKVCache(2, 2, 8, num_blocks=16, block_size=4, device="meta")
    parent = cache.open(range(6))
    forks = cache.fork(parent, 2)
    state = cache.stats, [seq.length for seq in forks]
    for tensors in range(20):
        try:
            with LittleMemory(tensors):
                cache.append_many(forks, [[1], [2, 3, 4]])
            break
        except torch.OutOfMemoryError:
            assert (cache.stats, [seq.length for seq in forks]) == state
    assert tensors > 0 and [seq.length for seq in forks] == [7, 9]


@pytest.mark.parametrize("as_given", [list, np.array, torch.tensor])
def test_tokens_of_several_sequences_may_be_given_one_after_the_other(each_backend, as_given):
    caches = make(), make()
    sequences = [cache.open_many([[1, 2], [3], [4, 5, 6]]) for cache in caches]
    by_counts = caches[0].append_many(sequences[0], as_given([7, 8, 9, 10, 11, 12]), as_given([1, 0, 5]))
    by_lists = caches[1].append_many(sequences[1], [[7], [], [8, 9, 10, 11, 12]])
    assert by_counts.tolist() == by_lists.tolist()
    assert [seq.token_ids for seq in sequences[0]] == [[1, 2, 7], [3], [4, 5, 6, 8, 9, 10, 11, 12]]
    for counts in (
        as_given([1, 1]),
        as_given([1, 1, 1]),
        as_given([-1, 2, 1]),
        2,
        [[1, 0, 1]],
        [1.0, 0.0, 1.0],
        [True, False, True],
    ):
        with pytest.raises(ValueError, match=r"counts must be 3 integers >= 0 that add up to 2 tokens, got (\[|2)"):
            caches[0].append_many(sequences[0], [1, 2], counts)
    assert [seq.length for seq in sequences[0]] == [3, 1, 8]


def test_eviction_takes_the_least_recently_used_tail_first():
    cache = make(num_blocks=7)
    for start in (0, 100):
        fill(cache, seq := cache.open(range(start, start + 12)))
        cache.close(seq)
    cache.close(cache.open(range(9)))  # touches the first two blocks of the older one
    third = cache.open(range(200, 208))
    assert cache.stats["evictions"] == 1
    seq = cache.open([*range(12), 1])
    assert seq.num_cached == 8  # the block that was not touched went first
    cache.close(seq)
    assert cache.open([*range(100, 112), 1]).num_cached == 4  # then the tail of the other one
    cache.close(third)


def test_group_describes_neighbours():
    cache = make(num_blocks=64)
    fill(cache, parent := cache.open(range(10)))
    forks = cache.fork(parent, 3)
    fill(cache, single := cache.open(range(50, 56)))
    sequences = [*forks, single]
    cache.append_many(sequences, [[1], [2], [3], [4]])
    tables, lens, starts, suffix_tables, suffix_lens = cache.group(sequences, min_tokens=4)
    assert lens.tolist() == [8, 0] and starts.tolist() == [0, 3, 4]
    assert tables[0].tolist() == parent.block_table[:2].tolist() and tables[1].tolist() == [-1, -1]
    assert suffix_lens.tolist() == [3, 3, 3, 7]
    assert [int(suffix_tables[i, 0]) for i in range(3)] == [int(s.block_table[2]) for s in forks]
    assert suffix_tables[3].tolist() == single.block_table.tolist()
    assert all(t.dtype == torch.int32 for t in (tables, lens, starts, suffix_tables, suffix_lens))
    tables, lens, *_ = cache.group(sequences, min_tokens=9)
    assert lens.tolist() == [0, 0, 0, 0] and tables.shape == (4, 0)
    assert cache.group([])[2].tolist() == [0]


def test_memory_bytes_and_wrong_sizes():
    cache = rlkernels.PagedKVCache(2, 2, 8, memory_bytes=10_000, block_size=4, dtype=torch.bfloat16)
    assert cache.num_blocks == 10_000 // (2 * 2 * 4 * 2 * 8 * 2)
    assert cache.key_cache[1].shape == (cache.num_blocks, 4, 2, 8)
    with pytest.raises(ValueError, match="memory_bytes must be at least 512"):
        rlkernels.PagedKVCache(2, 2, 8, memory_bytes=100, block_size=4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="exactly one of num_blocks and memory_bytes"):
        rlkernels.PagedKVCache(2, 2, 8)
    with pytest.raises(ValueError, match="head_dim must be between 1 and 2147483647, got 0"):
        rlkernels.PagedKVCache(2, 2, 0, num_blocks=1)
    for name, bad in (("num_blocks", 2.5), ("block_size", "4"), ("memory_bytes", 1e9)):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got {bad!r}"):
            rlkernels.PagedKVCache(2, 2, 8, **({"num_blocks": 1} if name == "block_size" else {}) | {name: bad})


@pytest.mark.parametrize(("bad", "error", "message"), [
    (["a"], TypeError, "an entry of token_ids must be an integer, got 'a'"),
    (torch.ones(2), TypeError, "an entry of token_ids must be an integer, got 1.0"),
    ([[1, 2]], TypeError, r"an entry of token_ids must be an integer, got \[1, 2\]"),
    ([2**70], ValueError, f"an entry of token_ids must be between 0 and 2147483647, got {2**70}"),
    ([3, -1], ValueError, "an entry of token_ids must be between 0 and 2147483647, got -1"),
    (5, TypeError, r"token_ids must be a list or a tensor \[L\] of integers, got 5"),
    (torch.tensor(5), TypeError, r"token_ids must be a list .* got tensor\(5\)"),
])  # fmt: skip
def test_wrong_tokens(cache, bad, error, message):
    seq = cache.open([1])
    for call in (lambda: cache.open(bad), lambda: cache.open_many([[1], bad]), lambda: cache.append(seq, bad)):
        with pytest.raises(error, match=message):
            call()
    assert cache.stats["blocks_pinned"] == 1 and seq.token_ids == [1]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_sequence_is_not_copied(cache, duplicate):
    """Closing the copy would leave the other with blocks, in the end with the tokens, of somebody else."""
    with pytest.raises(TypeError, match="a Sequence cannot be copied or pickled"):
        duplicate(cache.open([1, 2]))


def test_sequences_may_come_one_by_one(cache):
    sequences = cache.open_many([[1, 2], [3, 4, 5]])
    for call in (cache.slots, lambda batch: cache.tables(batch)[0], lambda batch: cache.group(batch)[3]):
        assert torch.equal(call(seq for seq in sequences), call(sequences))


def test_wrong_sequences(cache):
    seq = cache.open([1, 2])
    second = cache.open([7])
    for call, error, message in (
        (lambda: cache.truncate(seq, 3), ValueError, "length must be between 0 and 2, got 3"),
        (lambda: make().append(seq, [1]), ValueError, "one of another cache"),
        (lambda: cache.append_many([second, seq, seq], [[0], [1], [2]]), ValueError,
         "got one of them twice, as number 1 and 2"),
        (lambda: cache.group([seq], min_tokens=0.5), TypeError, "min_tokens must be an integer, got 0.5"),
        (lambda: cache.commit(None), TypeError, "seq must be a Sequence of this cache, got None"),
        (lambda: cache.tables([seq, 3]), TypeError, r"sequences\[1\] must be a Sequence of this cache, got 3"),
        (lambda: cache.tables(seq), TypeError, r"sequences must be a list of Sequences, got Sequence\(length=2"),
        (lambda: cache.open_many(None), TypeError, "prompts must be a list of token lists, got None"),
        (lambda: cache.append_many([seq], None), TypeError, "token_ids must be a list of token lists, got None"),
        (lambda: cache.fork(seq, 2**70), ValueError, "n must be between 0 and 2147483647, got 1180591620717411303424"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    cache.close(seq)
    closed = "must be an open sequence of this cache, got a closed one"
    for call in (cache.close, lambda seq: cache.truncate(seq, 1), lambda seq: seq.length, lambda seq: seq.token_ids):
        with pytest.raises(ValueError, match=f"seq {closed}"):
            call(seq)
    with pytest.raises(ValueError, match=rf"sequences\[0\] {closed}"):
        cache.slots([seq])
