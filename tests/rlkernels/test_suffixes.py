"""RPO's memory of answers, without a trainer. Tests of the accelerator rpo and of SuffixRollouts go further."""

import pytest

from rlkernels.history.suffixes import SuffixMemory


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({"cut_share": 0}, {9}),  # at least one token is generated
        ({"cut_share": 0.5}, {5, 6, 7, 8}),
        ({"cut_tokens": 3}, {7, 8}),
        ({"cut_tokens": 3, "min_cut_share": 0}, {7, 8, 9}),
        ({"cut_tokens": 1}, {9}),  # below the least share
        ({"whole_share": 1}, {0}),
    ],
    ids=str,
)
def test_prefixes_are_as_long_as_the_cut_leaves_them(settings, lengths):
    memory = SuffixMemory(**{"whole_share": 0} | settings)
    memory.answers = {"p": list(range(10))}
    prefixes = [memory.draw_prefix("p", seed, 10) for seed in range(200)]
    assert {len(prefix) for prefix in prefixes} == lengths
    assert all(prefix == list(range(len(prefix))) for prefix in prefixes)
    assert memory.draw_prefix("p", 0, 9) == memory.draw_prefix("new", 0, 10) == []


def test_a_step_may_be_watched_in_parts():
    memory = SuffixMemory()
    for step in range(12):
        memory.watch(step, [0.0, 1.0])
        memory.watch(step, [float(step)])
    assert memory.whole_scores == [[0.0, 1.0, float(step)] for step in range(4, 12)]


@pytest.mark.parametrize("settings", [{"cut_share": 1.5}, {"min_cut_share": -1}, {"whole_share": 2}, {"cut_tokens": 0}],
                         ids=str)  # fmt: skip
def test_bad_settings_are_named(settings):
    (name,) = settings
    for bad, error in ((settings, ValueError), ({name: "1"}, TypeError)):
        with pytest.raises(error, match=f"{name} must be"):
            SuffixMemory(**bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_or_score_that_is_not_finite_is_named(bad):
    memory = SuffixMemory()
    with pytest.raises(ValueError, match=rf"rewards\[1\] must be finite, got {bad}"):
        memory.remember("p", 0, [[1], [2]], [0.0, bad])
    with pytest.raises(ValueError, match=rf"scores\[0\] must be finite, got {bad}"):
        memory.watch(0, [bad, 1.0])
    assert memory.answers == {} and memory.whole_scores == []
