from collections import Counter

import pytest
from rich.console import Console

from python_trainer.keyed import prompt_order
from python_trainer.prompts import next_prompts
from python_trainer.run import Trainer

LENGTHS = [5, 40, 10, 20, 30, 15, 25, 35]  # tokens of eight prompts; the shorter half: 0, 2, 5, 3


def visits(order, draws=4000, done=1.0):
    """How often each prompt comes, two at a time."""
    return Counter(key for i in range(draws) for key in next_prompts(order, LENGTHS, 3, 2 * i, 2, done))


def test_shuffled_is_every_prompt_once_an_epoch():
    assert next_prompts("shuffled", LENGTHS, 3, 6, 4) == prompt_order(3, 6, 4, 8)


def test_inverse_length_draws_by_it_without_repeats():
    found = visits("inverse_length", draws=20_000)
    weights = [1 / n for n in LENGTHS]
    total = sum(weights)
    for i, w in enumerate(weights):  # chance to be first or, behind any other, second
        chance = w / total + sum(v / total * w / (total - v) for j, v in enumerate(weights) if j != i)
        assert abs(found[i] - 20_000 * chance) < 5 * (20_000 * chance * (1 - chance)) ** 0.5
    assert all(len(set(next_prompts("inverse_length", LENGTHS, 0, 8 * i, 8))) == 8 for i in range(50))
    assert len(next_prompts("inverse_length", LENGTHS, 0, 0, 11)) == 11  # more than there are


@pytest.mark.parametrize(
    ("done", "pool"),
    [
        (0.0, {0, 2}),
        (0.125, {0, 2}),
        (0.2, {0, 2, 5, 3}),
        (0.3, {0, 2, 5, 3, 6}),
        (0.5, set(range(8))),
        (1.0, set(range(8))),
    ],
)
def test_shortest_first_lets_longer_ones_in(done, pool):
    assert set(visits("shortest_first", 200, done)) == pool


def test_the_shorter_half_alone_comes_evenly():
    assert visits("shorter_half", 200) == dict.fromkeys([0, 2, 5, 3], 100)


def test_a_run_trains_on_them(make_config, tmp_path, monkeypatch):
    rollout = {"prompt_order": "shorter_half", "prompts_per_step": 4}
    trainer = Trainer(make_config(max_steps=3, rollout=rollout), tmp_path / "run", console=Console(quiet=True))
    seen, original = set(), trainer.groups_of
    monkeypatch.setattr(trainer, "groups_of", lambda keys: seen.update(keys) or original(keys))
    trainer.run()
    lengths = [len(prompt) for prompt in trainer.prompts["train"]]
    assert len(seen) == 6 and sorted(lengths[key] for key in seen) == sorted(lengths)[:6]
