import random
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import text

from python_trainer.tasks.lattice_paths import (
    ROWS,
    STRATA,
    WIDTH,
    LatticePathsSettings,
    accuracy,
    chances,
    correct,
    draw_grids,
)
from tools.policies.lattice_paths import KNOWING, walk

GRID = """\
##o#
.#.#
..#.
#..#
"""
PATH = ".#o#\n.o#.\n#o.#"


@pytest.fixture(scope="module")
def task():
    return LatticePathsSettings().load()


def blind_chance(rows, row, column):
    """Return the chance of a walker who takes any open cell below to reach the last row, by recursion."""
    if row == len(rows) - 1:
        return Fraction(1)
    columns = [c for c in (column - 1, column, column + 1) if 0 <= c < len(rows[0]) and rows[row + 1][c] == "."]
    return sum((blind_chance(rows, row + 1, c) for c in columns), Fraction(0)) / max(len(columns), 1)


@pytest.mark.parametrize(("answer", "right"), [
    (PATH, 1.0),
    (".#o#\n.o#.", 0.0),  # a row too few
    (".#o#\n.o#.\n#o.#\n#o.#", 0.0),
    ("##o#\n.#o#\n.o#.\n#o.#", 0.0),  # the first row again
    ("", 0.0),
    ("o\no\no", 0.0),
    (".#.#o\n.o#.\n#o.#", 0.0),  # beyond the last column
])  # fmt: skip
def test_reward_takes_nothing_but_a_path(answer, right):
    assert accuracy([GRID], [answer], [[]], chance=[0.5]) == [right]


def test_no_character_of_a_path_can_be_another_one_too_many_or_missing():
    for i in range(len(PATH) + 1):
        for inserted in ("", *"#.oO \n\r"):
            for num_removed in (0, 1):
                changed = PATH[:i] + inserted + PATH[i + num_removed :]
                assert correct(GRID, changed) == (changed == PATH), changed


def test_reward_takes_just_the_paths_that_a_search_finds():
    rng = random.Random(0)
    for _ in range(20):
        rows = ["".join(rng.choices("#.", (1, 2), k=4)) for _ in range(4)]
        start = rng.randrange(4)
        prompt = "\n".join(["#" * start + "o" + "#" * (3 - start), *rows]) + "\n"
        paths = [(start,)]
        for row in rows:
            paths = [(*path, c) for path in paths for c in range(4) if row[c] == "." and abs(path[-1] - c) < 2]
        for columns in product(range(4), repeat=4):
            drawn = "\n".join(row[:c] + "o" + row[c + 1 :] for row, c in zip(rows, columns))
            assert correct(prompt, drawn) == ((start, *columns) in paths)


@given(text(alphabet="#.o\n", max_size=20))
def test_any_text_gets_a_verdict(answer):
    """Judge texts on a grid with two paths."""
    assert correct("#o#\n.#.\n", answer) == (answer in ("o#.", ".#o"))


def test_prompts_are_disjoint_and_all_alike_in_length(task):
    examples = [*task.train, *task.gate, *task.test]
    assert (len(task.train), len(task.gate), len(task.test)) == (192, 512, 4096)
    assert len({example.prompt for example in examples}) == len(examples)
    for example in examples:
        first, *rows = example.prompt.splitlines()
        assert len(rows) == ROWS - 1 and example.prompt.endswith("\n")
        assert sorted(first) == ["#"] * (WIDTH - 1) + ["o"]
        assert all(len(row) == WIDTH and row.count("#") == row.count(".") == WIDTH // 2 for row in rows)


def test_prompts_are_always_the_same_whatever_the_sizes(task):
    assert task.fingerprint == "c4c460af2d07c1a7088712e4b89a61cb"
    smaller = LatticePathsSettings(train_size=100, gate_size=0, test_size=1000).load()
    assert smaller.train == task.train[:100] and smaller.test == task.test[:1000]


def test_chances_are_those_of_a_blind_walker_and_spread_as_promised(task):
    for example in task.train:
        rows = example.prompt.splitlines()
        exact = blind_chance(rows, 0, rows[0].index("o"))
        assert exact > 0 and example.columns["chance"] == pytest.approx(float(exact))
    for split in (task.train, task.gate, task.test):
        recorded = np.array([example.columns["chance"] for example in split])
        shares = [np.mean((low <= recorded) & (recorded <= high)) for _, low, high in STRATA]
        assert shares == pytest.approx([share for share, *_ in STRATA], abs=0.1) and sum(shares) == 1


def test_walkers_get_through_as_often_as_what_they_know_allows():
    rng = random.Random(0)
    grids = draw_grids(np.random.default_rng(0), 400)
    blind_chances = chances(grids)
    # one look at which ways lead on, in KNOWING of the steps
    expected = grids.astype(float)
    for row in range(ROWS - 2, -1, -1):
        for number, grid in enumerate(grids):
            for c in np.flatnonzero(grid[row]):
                columns = [w for w in range(max(c - 1, 0), min(c + 2, WIDTH)) if grid[row + 1, w]]
                open_columns = [w for w in columns if blind_chances[number, row + 1, w]] or columns
                means = [
                    np.mean(expected[number, row + 1, subset]) if subset else 0.0 for subset in (columns, open_columns)
                ]
                expected[number, row, c] = (1 - KNOWING) * means[0] + KNOWING * means[1]
    paths = [walk(grid, chance, KNOWING, rng) for grid, chance in zip(grids, blind_chances) for _ in range(10)]
    through = [all(grid[row, c] for row, c in enumerate(path)) for grid, path in zip(grids.repeat(10, 0), paths)]
    assert np.mean(through) == pytest.approx(expected[:, 0].max(-1).mean(), abs=0.02)
    for path in paths:
        assert len(path) == ROWS and all(abs(a - b) <= 1 for a, b in pairwise(path))
