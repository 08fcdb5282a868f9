"""Packing: every scored token's predictor and target, each pair once, in tries and in groups of two levels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernels import backend
from rlkernels.prefix_cache import GroupedLayout, TreeLayout, pack, packs_tries

SEQUENCES = st.lists(st.lists(st.integers(-2, 2), max_size=7), max_size=6)


def seen_by(layout, place):
    """The tokens that a packed token sees, in order."""
    end = layout.end
    return [int(layout.ids[j]) for j in range(place + 1) if end[j] > place]


@pytest.mark.parametrize("levels", ["trie", "two"])
@settings(max_examples=150, deadline=None)
@given(sequences=SEQUENCES, data=st.data())
def test_each_scored_token_is_predicted_from_all_before_it(levels, sequences, data):
    flags = [[False, *data.draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))] if n else []
             for n in map(len, sequences)]  # fmt: skip
    lens = [data.draw(st.integers(0, len(row) + 1)) for row in sequences]
    packed = pack(sequences, flags, prefix_lens=lens if levels == "two" else None)
    scored = [(row, t) for row, row_flags in zip(sequences, flags) for t, flag in enumerate(row_flags) if flag]
    assert len(packed.pairs) == len(scored)
    for (row, t), pair in zip(scored, packed.pairs.tolist()):
        assert packed.targets[pair] == row[t] and seen_by(packed.layout, int(packed.rows[pair])) == row[:t]
        assert packed.position_ids[packed.rows[pair]] == t - 1
    pairs = list(zip(packed.rows.tolist(), packed.targets.tolist()))
    assert len(set(pairs)) == len(pairs) and {*packed.pairs.tolist()} == {*range(len(pairs))}


def test_a_trie_shares_more_than_two_levels():
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7]]
    trie, two = pack(sequences), pack(sequences, prefix_lens=[2, 2, 2])
    assert (len(trie.ids), len(two.ids)) == (4, 6)  # 1 2 3 4, and 1 2, 3 4, 3 4
    assert len(trie.targets) == 6 and len(two.targets) == 7 and len(two.pairs) == 10
    assert type(trie.layout) is TreeLayout and type(two.layout) is GroupedLayout
    assert pack(sequences, prefix_lens=[0, 0, 0]).layout.num_tokens == 10, "nothing is shared"


def test_answers_without_tokens_and_groups_apart():
    sequences = [[1, 2, 9], [5, 9], [1, 2], [1, 2, 8]]
    packed = pack(sequences, [[0, 0, 1], [0, 1], [0, 0], [0, 0, 1]], prefix_lens=[2, 1, 2, 2])
    assert packed.layout.prefix_lens.tolist() == [2, 1, 1], "the third lacks the last token of the prompt"
    assert packed.targets[packed.pairs].tolist() == [9, 9, 8]


def test_kinds_of_rows():
    rows = [torch.tensor([1, 2, 3]), np.array([1, 2, 4]), [1, 2, 3]]
    packed = pack(rows)
    assert packed.ids.tolist() == [1, 2] and packed.pairs.tolist() == [0, 1, 0, 2, 0, 1]
    assert pack([]).ids.tolist() == pack([[], [7]]).ids.tolist() == []


def test_tries_are_packed_on_a_gpu_where_a_proof_says_so(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(backend, "unavailable", lambda op, name, device: None)
    try:
        for chosen, tries in (("triton/crossing", True), ("triton", True), ("torch", False)):
            backend.set_run_backends({"tree_attention": chosen})
            assert packs_tries(torch.device("cpu")) and packs_tries(gpu) == tries
            assert backend.choose("tree_attention", gpu) == chosen
    finally:
        backend.set_run_backends({})
    assert not packs_tries(gpu)


@pytest.mark.parametrize(("arguments", "options", "message"), [
    (([[1, 2]], [[True, True]]), {}, r"scored\[0\] must be False for the first token"),
    (([[1, 2]], [[False, True], [False]]), {}, r"scored must have 1 lists of flags, one for each sequence, got 2"),
    (([[1, 2], [3]], [[False, True]]), {}, r"scored must have 2 lists of flags, one for each sequence, got 1"),
    (([[1, 2]], [[False]]), {}, r"scored\[0\] must have 2 flags, one for each token, got \(1,\)"),
    (([[1, 2]],), {"prefix_lens": [1, 1]}, "prefix_lens must have 1 lengths, one for each sequence, got 2"),
    (([[[1]]],), {}, r"sequences\[0\] must have 1 dimension"),
])  # fmt: skip
def test_bad_input(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        pack(*arguments, **options)
