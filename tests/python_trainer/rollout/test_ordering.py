"""Lengths from history, and who generates what: properties of the plans, and cases that can be worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_trainer.data import Rollout
from python_trainer.rollout.engine import Request
from python_trainer.rollout.ordering import (
    NOTHING,
    LengthHistory,
    Work,
    alternate,
    balance,
    expectations,
    expected_lengths,
    in_turn,
    left,
    longest_first,
    makespan,
    remember,
    share,
)

works = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 16)).map(lambda pair: Work(pair[0], pair[0] * pair[1])), max_size=40
)
workers, overheads = st.integers(1, 9), st.sampled_from([0.0, 1.0, 30.0, 1e4])


def group(length: float, samples: int = 8) -> Work:
    return Work(length, length * samples)


def test_newer_visits_weigh_more_and_unknown_prompts_get_the_mean_of_the_batch():
    history = LengthHistory()
    assert history.predict([[1], [2]]) == [None, None]
    history.observe([1], [10, 20])
    history.observe([1], [40])
    history.observe([2, 3], [5])
    history.observe([4], [])  # no answer, no news
    assert history.predict([[1], [2, 3]]) == [27.5, 5]
    assert history.predict([[1], [4], [2, 3], [9]]) == [27.5, 16.25, 5, 16.25]
    assert history.predict([[9]]) == [None] and history.predict([]) == []


def test_lengths_survive_a_checkpoint():
    history, copy = LengthHistory(), LengthHistory()
    history.observe([1, 2], [7, 9])
    copy.load_state_dict(history.state_dict())
    history.observe([1, 2], [100])  # the copy is one of its own
    assert copy.predict([[1, 2]]) == [8] and copy.spread != history.spread


def test_given_prefixes_count_in_what_is_seen_and_not_in_what_is_left():
    history = LengthHistory()
    requests = [Request([1, 2], prefix_ids=[5] * 4, num_samples=2, max_new_tokens=50), Request([3], max_new_tokens=8)]
    assert expected_lengths(history, requests) == [50, 8]
    remember(history, requests, [Rollout([], [5] * 4 + [0] * n, 4) for n in (10, 20)] + [Rollout([], [0] * 6)])
    assert history.predict([[1, 2], [3]]) == [19, 6]
    assert expectations(history, requests) == [Work(15, 6 + 2 * 15), Work(6, 7)]
    assert expected_lengths(history, [Request([1, 2], max_new_tokens=9)]) == [9]
    assert expected_lengths(history, [Request([1, 2], prefix_ids=[5] * 30)]) == [1], "something always remains"


def test_one_prompt_in_several_requests_is_one_visit():
    history = LengthHistory()
    remember(history, [Request([1]), Request([1])], [Rollout([], [0] * n) for n in (10, 30)])
    assert history.predict([[1]]) == [20]


def test_what_an_answer_still_needs():
    assert left(100, 0, 256) == 100 and left(100, 60, 256) == 40
    assert left(100, 99, 256) == 25 and left(100, 300, 305) == 5 and left(0.5, 3, 100) == 1
    assert left(100, 50, 50) == 0 and left(100, 99, 256, spread=0.1) == 10


def test_the_spread_is_that_of_single_answers_about_what_was_expected():
    history = LengthHistory()
    history.observe([9], [500])  # alone, and the first: nothing was expected
    assert history.spread == 0.25
    for _ in range(300):
        history.observe([1], [80, 120])
    assert history.spread == pytest.approx(0.2, abs=0.01)
    for _ in range(300):
        history.observe([2], [50, 50])
    assert history.spread < 0.01


@given(works, workers, overheads)
def test_every_work_is_done_once_and_the_expected_end_is_no_later_than_in_turn(items, count, overhead):
    fifo = in_turn(len(items), count)
    assert [i for part in fifo for i in part] == list(range(len(items)))
    assert max(map(len, fifo)) - min(map(len, fifo)) <= 1
    for plan in (balance(items, count, overhead), alternate(items, count, overhead, 0)):
        assert len(plan) == count and sorted(i for part in plan for i in part) == list(range(len(items)))
        for part in plan:
            lengths = [items[i].longest for i in part]
            assert lengths == sorted(lengths, reverse=True)
    best = makespan(items, balance(items, count, overhead), overhead)
    assert best <= makespan(items, fifo, overhead)
    total = sum(items, NOTHING)
    assert best >= max(total.tokens / count, overhead * total.longest)


def test_longest_first_keeps_ties_in_order():
    assert longest_first([group(3), group(9), group(3), group(9, 2)]) == [1, 3, 0, 2]


def test_balance_by_hand():
    # without overhead only tokens count: 9 + 6 and 8 + 7
    items = [Work(n, n) for n in (6, 7, 8, 9)]
    assert sorted(map(sorted, balance(items, 2, 0))) == [[0, 3], [1, 2]]
    # the long one alone takes 5 * 100 + 100; the others together, on the other worker, 5 * 10 + 80
    items = [Work(n, n) for n in (10, 10, 10, 10, 100, 10, 10, 10, 10)]
    plan = balance(items, 2, 5.0)
    assert [4] in plan and makespan(items, plan, 5.0) == 600 < makespan(items, in_turn(9, 2), 5.0) == 640
    assert balance([], 3, 30.0) == [[], [], []] and balance([group(5)], 3, 30.0).count([]) == 2


def test_passes_are_planned_only_where_lengths_can_be_told():
    items = [Work(n, n) for n in (100, *[10] * 12)]  # by tokens alone a short one goes along with the long one
    sure, tokens = balance(items, 2, 5.0), balance(items, 2, 0.0)
    assert balance(items, 2, 5.0, spread=0.05) == sure != tokens == balance(items, 2, 5.0, spread=0.3)


def test_long_answers_get_more_workers_than_short_ones():
    items = [group(500)] * 6 + [group(50)] * 6
    plan = alternate(items, 3, 1.0, step=0)
    assert plan[0] and all(i < 6 for part in plan[:2] for i in part)
    assert {i for i in plan[2] if i >= 6} == set(range(6, 12))


def test_steps_alternate():
    items = [group(n) for n in (10, 20, 40, 80, 160, 320)]
    even, odd = (alternate(items, 3, 1.0, step) for step in (4, 5))
    assert even == odd[::-1] and even[0] == [5]


@given(works, overheads, st.integers(0, 400), st.integers(0, 300))
def test_moving_pays_or_nothing_moves(items, overhead, kept, again):
    before, extra = Work(kept, kept), Work(0, again)
    given_away = share(items, before, overhead, [float(again)] * len(items))
    mine = sum((items[i] for i in range(len(items)) if i not in given_away), before)
    theirs = sum((items[i] + extra for i in given_away), NOTHING)
    if given_away:
        assert max(mine.duration(overhead), theirs.duration(overhead)) < sum(items, before).duration(overhead)
    assert len(set(given_away)) == len(given_away)


def test_half_of_what_waits_moves_and_one_answer_never_does():
    assert len(share([group(10)] * 6, NOTHING, 1.0)) == 3
    assert share([group(10)], NOTHING, 30.0) == []
    assert share([], group(10), 30.0) == []


@pytest.mark.parametrize(("overhead", "again", "moved"), [(0.0, 10, True), (0.0, 200, False), (1e4, 10, False)])
def test_running_answers_move_where_that_saves_more_than_computing_them_again(overhead, again, moved):
    running = [Work(100, 100)] * 16
    assert bool(share(running, NOTHING, overhead, [again * 8.0] * 16)) == moved
