"""The compiled block pool does step by step what the plain model does; under sanitizers it touches nothing else."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import lacks

from rlkernels import backend
from rlkernels.prefix_cache.block_pool import BlockPool, OutOfBlocks, compiled_pool

ROOT = Path(__file__).parents[3]


class Pair:
    """Runs every operation on both pools and compares everything that can be seen."""

    def __init__(self, num_blocks, block_size):
        if backend.extension_error():
            lacks("the compiled extension")
        self.pools = BlockPool(num_blocks, block_size), compiled_pool(num_blocks, block_size)
        self.open: list[tuple[int, int]] = []
        self.refused = 0

    def both(self, *calls):
        results = []
        for pool, call in zip(self.pools, calls):
            try:
                results.append(call(pool))
            except OutOfBlocks as error:
                results.append(str(error))
        assert isinstance(results[0], str) == isinstance(results[1], str), results
        if isinstance(results[0], str):
            assert results[0] == results[1]
            self.refused += 1
            return None
        return results

    def step(self, draw):
        """One operation; ``draw(n)`` gives a number below n."""
        size = self.pools[0].block_size

        def tokens(most):  # few different ones, so that there are beginnings in common
            return [1 if draw(6) else draw(3) for _ in range(draw(most + 1))]

        kind = draw(16)
        if kind < 4 or not self.open:
            prompts = [tokens(7 * size) for _ in range(1 + draw(3))]
            found = self.both(*2 * [lambda pool: pool.open_many(prompts)])
            self.open += zip(*found) if found else []
            return
        pick = draw(len(self.open))
        handles = self.open[pick]
        if kind < 8:
            several = list(dict.fromkeys([handles, self.open[draw(len(self.open))]]))
            more = [tokens(2 * size) for _ in several]
            copies = self.both(*(lambda pool, i=i: pool.append([h[i] for h in several], more) for i in (0, 1)))
            assert copies is None or copies[0] == copies[1]
        elif kind < 9:
            length = draw(self.pools[0].length(handles[0]) + 1)
            self.both(*(lambda pool, i=i: pool.truncate(handles[i], length) for i in (0, 1)))
        elif kind < 10:
            n = draw(3)
            self.open += zip(*self.both(*(lambda pool, i=i: pool.fork(handles[i], n) for i in (0, 1))))
        elif kind < 12:
            self.both(*(lambda pool, i=i: pool.commit(handles[i]) for i in (0, 1)))
        elif kind < 15:
            self.both(*(lambda pool, i=i: pool.close(handles[i]) for i in (0, 1)))
            del self.open[pick]
        elif draw(3) == 0:
            self.both(*2 * [lambda pool: pool.advance_version()])

    def compare(self):
        model, ours = self.pools
        ours.check()
        for name in ("version", "hits", "misses", "evictions"):
            assert getattr(model, name) == getattr(ours, name), name
        assert model.counts() == ours.counts()
        mine, theirs = ([h[i] for h in self.open] for i in (0, 1))
        for a, b in zip(model.tables(mine), ours.tables(theirs)):
            assert a.tolist() == b.tolist()
        for a, b in self.open:
            assert model.token_ids(a) == ours.token_ids(b)
            assert (model.num_cached(a), model.computed(a)) == (ours.num_cached(b), ours.computed(b))
        starts = [model.computed(h) for h in mine]
        assert torch.equal(model.slots(mine, starts), torch.as_tensor(ours.slots(theirs, starts)))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(4, 30), st.data())
def test_equals_the_model(block_size, num_blocks, data):
    pair = Pair(num_blocks, block_size)
    for _ in range(data.draw(st.integers(1, 40), label="steps")):
        pair.step(lambda n: data.draw(st.integers(0, n - 1)))
        pair.compare()


@pytest.mark.parametrize("run", range(4))
def test_equals_the_model_for_long(run):
    """RLKERNELS_POOL_STEPS=1000000 for a nightly run."""
    source = random.Random(run)
    pair = Pair(12 + 20 * run, 1 + run)
    for step in range(int(os.environ.get("RLKERNELS_POOL_STEPS", "2000")) // 4):
        pair.step(source.randrange)
        if step < 200 or step % 10 == 0:
            pair.compare()
    assert pair.refused and pair.pools[0].evictions and pair.pools[0].hits


def test_blocks_never_hold_other_tokens_than_their_users_think():
    """Follows what would be written where: a shared block must hold the same tokens for every sequence."""
    source = random.Random(0)
    pair = Pair(30, 3)
    for _ in range(600):
        pair.step(source.randrange)
        contents: dict[int, list[int]] = {}
        model = pair.pools[0]
        handles = [h[0] for h in pair.open]
        for handle, table in zip(handles, model.tables(handles)[0].tolist()):
            tokens = model.token_ids(handle)
            for i, block in enumerate(b for b in table if b >= 0):
                mine = tokens[i * 3 : (i + 1) * 3]
                shorter, longer = sorted([mine, contents.get(block, mine)], key=len)
                assert longer[: len(shorter)] == shorter
                contents[block] = longer


def test_wrong_tokens():
    model, pool = Pair(4, 2).pools
    with pytest.raises(ValueError, match="token_ids must fit into 32 bits, got 2147483648"):
        pool.open_many([[2**31]])
    with pytest.raises(ValueError, match="token_ids must be between 0 and 2147483647, got 2147483648"):
        model.open_many([[2**31]])
    with pytest.raises(TypeError, match="an entry of token_ids must be an integer, got 'a'"):
        model.append(model.open_many([[1]]), [["a"]])
    with pytest.raises(ValueError, match="no open sequence has the handle 7"):
        pool.close(7)


def test_under_sanitizers(tmp_path):
    compiler = shutil.which("g++") or lacks("g++")
    program = tmp_path / "fuzz"
    sources = [ROOT / "tests/cpp/block_pool_fuzz.cpp", *sorted((ROOT / "csrc/runtime").glob("block_*.cpp"))]
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    built = subprocess.run(
        [compiler, *flags, f"-I{ROOT / 'csrc/runtime'}", *map(str, sources), "-o", str(program)],
        capture_output=True, text=True,
    )  # fmt: skip
    if "cannot find" in built.stderr and "san" in built.stderr:
        lacks("the sanitizer libraries")
    assert built.returncode == 0, built.stderr
    operations = os.environ.get("RLKERNELS_POOL_STEPS", "8000")
    for seed in ("1", "2", "3"):
        done = subprocess.run([str(program), operations, seed], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
