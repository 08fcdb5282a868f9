"""Lengths from history, and who generates what: properties of the plans, and cases that can be worked out by hand."""

from hypothesis import given
from hypothesis import strategies as st

from python_trainer.data import Request, Rollout
from python_trainer.rollout.ordering import LengthHistory, balance, divide, longest_first

works = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 16)), max_size=40)


def observe(history, prompt, lengths):
    history.observe([Request(prompt, num_generations=len(lengths))], [Rollout(prompt, [0] * n) for n in lengths])


def predict(history, *prompts):
    return history.predict([Request(prompt, max_new_tokens=100) for prompt in prompts])


def test_newer_visits_weigh_more_and_unknown_prompts_get_the_mean_of_the_batch():
    history = LengthHistory()
    assert predict(history, [1], [2]) == [100, 100], "nothing is known"
    history.observe([Request([1]), Request([1])], [Rollout([], [0] * n) for n in (10, 20)])  # one visit
    observe(history, [1], [40])
    observe(history, [2, 3], [5])
    observe(history, [4], [])  # no answer, no news
    assert predict(history, [1], [4], [2, 3], [9]) == [27.5, 16.25, 5, 16.25]
    assert predict(history, [9]) == [100] and predict(history) == []


def test_given_prefixes_count_in_what_is_seen_and_not_in_what_is_left():
    history = LengthHistory()
    requests = [
        Request([1, 2], prefix_ids=[5] * 4, num_generations=2, max_new_tokens=50),
        Request([3], max_new_tokens=8),
    ]
    assert history.predict(requests) == [50, 8]
    history.observe(requests, [Rollout([], [5] * 4 + [0] * n, 4) for n in (10, 20)] + [Rollout([], [0] * 6)])
    assert predict(history, [1, 2], [3]) == [19, 6] and history.predict(requests) == [15, 6]
    assert history.predict([Request([1, 2], max_new_tokens=9)]) == [9]
    assert history.predict([Request([1, 2], prefix_ids=[5] * 30)]) == [1], "something always remains"


@given(works, st.integers(1, 9))
def test_every_work_is_done_once_and_no_part_has_much_more_than_the_mean(items, count):
    tokens = [length * samples for length, samples in items]
    plan = balance([length for length, _ in items], tokens, count)
    assert len(plan) == count and sorted(i for share in plan for i in share) == list(range(len(items)))
    loads = [sum(tokens[i] for i in share) for share in plan]
    assert max(loads) <= sum(loads) / count + max(tokens, default=0)


def test_plans_by_hand():
    assert longest_first([3, 9, 3, 9]) == [1, 3, 0, 2], "ties stay in order"
    items = [6, 7, 8, 9]  # 9 + 6 and 8 + 7
    assert balance(items, items, 2) == [[3, 0], [2, 1]]
    assert balance([], [], 3) == [[], [], []] and balance([5], [5], 3) == [[0], [], []]


def test_requests_are_divided_in_turn_or_by_expected_work():
    requests = [Request([i], num_generations=2, max_new_tokens=100) for i in range(4)]
    assert divide(None, requests, 3) == [[0, 3], [1], [2]] and divide(None, requests, 1) == [[0, 1, 2, 3]]
    history = LengthHistory()
    history.observe(requests, [Rollout([], [0] * n) for n in (5, 5, 40, 40, 6, 6, 35, 35)])
    assert divide(history, requests, 2) == [[0, 1], [2, 3]]
