"""The compiled block pool does step by step what the plain model does."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.soak.operations import PoolPair

pytestmark = pytest.mark.usefixtures("compiled")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(4, 30), st.data())
def test_equals_the_model(block_size, num_blocks, data):
    pair = PoolPair(num_blocks, block_size)
    for _ in range(data.draw(st.integers(1, 40), label="steps")):
        pair.step(lambda n: data.draw(st.integers(0, n - 1)))
        pair.compare()


@pytest.mark.parametrize("run", range(4))
def test_blocks_never_hold_other_tokens_than_their_users_think(run):
    """Follow for long what would be written where: a shared block must hold the same tokens for every sequence."""
    source = random.Random(run)
    size = 1 + run
    pair = PoolPair(12 + 20 * run, size)
    for step in range(500):
        pair.step(source.randrange)
        if step < 200 or step % 10 == 0:
            pair.compare()
        contents: dict[int, list[int]] = {}
        model = pair.pools[0]
        handles = [h[0] for h in pair.open]
        for handle, table in zip(handles, model.tables(handles)[0].tolist()):
            tokens = model.token_ids(handle)
            for i, block in enumerate(b for b in table if b >= 0):
                block_tokens = tokens[i * size : (i + 1) * size]
                shorter, longer = sorted([block_tokens, contents.get(block, block_tokens)], key=len)
                assert longer[: len(shorter)] == shorter
                contents[block] = longer
    assert pair.refused and pair.pools[0].evictions and pair.pools[0].hits


def test_wrong_tokens():
    _, pool = PoolPair(4, 2).pools
    with pytest.raises(ValueError, match="token_ids must be between 0 and 2147483647, got 2147483648"):
        pool.open_many([[2**31]])
    with pytest.raises(ValueError, match="token_ids must be between 0 and 2147483647, got -1"):
        pool.open_many([[-1]])
    with pytest.raises(ValueError, match="no open sequence has the handle 7"):
        pool.close(7)
