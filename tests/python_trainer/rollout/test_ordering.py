"""Lengths from history, and who generates what: properties of the plans, and cases that can be worked out by hand."""

from hypothesis import given
from hypothesis import strategies as st

from python_trainer.data import Request, Rollout
from python_trainer.rollout.ordering import (
    LengthHistory,
    Work,
    balance,
    divide,
    expectations,
    expected_lengths,
    longest_first,
    remember,
)

works = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 16)).map(lambda pair: Work(pair[0], pair[0] * pair[1])), max_size=40
)


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
    assert copy.predict([[1, 2]]) == [8]


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


@given(works, st.integers(1, 9))
def test_every_work_is_done_once_and_no_part_has_much_more_than_the_mean(items, count):
    plan = balance(items, count)
    assert len(plan) == count and sorted(i for part in plan for i in part) == list(range(len(items)))
    loads = [sum(items[i].tokens for i in part) for part in plan]
    assert max(loads) <= sum(loads) / count + max((work.tokens for work in items), default=0)


def test_longest_first_keeps_ties_in_order():
    assert longest_first([group(3), group(9), group(3), group(9, 2)]) == [1, 3, 0, 2]


def test_balance_by_hand():
    items = [Work(n, n) for n in (6, 7, 8, 9)]  # 9 + 6 and 8 + 7
    assert balance(items, 2) == [[3, 0], [2, 1]]
    assert balance([], 3) == [[], [], []] and balance([group(5)], 3) == [[0], [], []]


def test_requests_are_divided_in_turn_or_by_expected_work():
    requests = [Request([i], num_samples=2, max_new_tokens=100) for i in range(4)]
    assert divide(None, requests, 3) == [[0, 3], [1], [2]] and divide(None, requests, 1) == [[0, 1, 2, 3]]
    history = LengthHistory()
    remember(history, requests, [Rollout([], [0] * n) for n in (5, 5, 40, 40, 6, 6, 35, 35)])
    assert divide(history, requests, 2) == [[0, 1], [2, 3]]
