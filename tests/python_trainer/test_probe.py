"""What a sample of answers tells: chances of a spread, bounds, the command."""

import json
from itertools import combinations
from math import comb
from types import SimpleNamespace

import numpy
import pytest
import scipy.stats
import yaml
from conftest import merged

from python_trainer.__main__ import main
from python_trainer.bounds import all_bounds, sample_gain, suffix_gain
from python_trainer.config import check_config
from python_trainer.errors import UserError
from python_trainer.probe import histogram, lines, probe, reward_spread, spearman, spread_chance


def test_spread_is_the_share_of_mixed_subsets():
    for right in range(7):
        answers = [True] * right + [False] * (6 - right)
        mixed = [len(set(part)) > 1 for part in combinations(answers, 4)]
        assert spread_chance(right, 6, 4) == pytest.approx(sum(mixed) / len(mixed))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_spread_is_unbiased_where_there_are_enough_tries(p):
    tries, group = 6, 4
    chances = [comb(tries, c) * p**c * (1 - p) ** (tries - c) for c in range(tries + 1)]
    mean = sum(chance * spread_chance(c, tries, group) for c, chance in enumerate(chances))
    assert mean == pytest.approx(1 - p**group - (1 - p) ** group)
    assert spread_chance(1, 2, 4) == pytest.approx(1 - 2 * 0.5**4)  # too few: at p = 1/2


def test_rank_correlation_is_scipys():
    rng = numpy.random.default_rng(0)
    x, y = rng.integers(0, 5, 40), rng.integers(0, 9, 40)  # many ties
    assert spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_groups_of_different_rewards():
    groups = [[SimpleNamespace(reward=r) for r in rewards] for rewards in ([0, 0, 1, 0, 9], [2, 2, 2, 2, 9])]
    assert reward_spread(groups, 2) == 1 / 4
    assert reward_spread(groups, 6) is None


def test_suffixes_are_worth_what_integration_says():
    for p, value in ((0.9, 0.69), (0.5, 0.88), (0.2, 1.30), (0.1, 1.8), (0.01, 6.6)):
        assert suffix_gain(p) == pytest.approx(value, rel=0.02)
        x = (numpy.arange(20000) + 0.5) / 20000
        assert suffix_gain(p) == pytest.approx(numpy.mean(x * p**x * (1 - p**x)) / 0.5 / (p * (1 - p)), rel=1e-4)
    assert sample_gain([0, 1]) == 1 and sample_gain([0, 0.2]) == suffix_gain(0.2)


def found(**changes):
    seconds = {"generation": 6.0, "rewards": 0.0, "update": 2.0}
    shares = {"spread": 0.5, "all_wrong": 0.25, "judged": True}
    return {"p": [0.5] * 8, "seconds": seconds, "epochs": 2.0} | shares | changes


def test_bounds_by_hand():
    bounds = {b.name: b.at_most for b in all_bounds(found(), answers_of_step=128)}
    expected = {"selection": 8 / 5, "dynamic_sampling": 1, "stored_answers": 1.5, "earlier_answers": None,
                "rhyme": 1.25, "rpo": 1, "drafts": 8 / 5, "alpha": None}  # fmt: skip
    assert bounds == expected
    bounds = {b.name: b.at_most for b in all_bounds(found(epochs=0.5), answers_of_step=128)}
    assert bounds == expected | {"rhyme": 1, "drafts": 1}
    bounds = {b.name: b for b in all_bounds(found(p=[0.0] * 8, spread=0.0, all_wrong=1.0), answers_of_step=128)}
    assert bounds["selection"].at_most is None and bounds["selection"].why == "no group taught anything"
    assert bounds["stored_answers"].at_most is None is bounds["rhyme"].at_most
    for share, at_most in ((0.25, 1.5), (0.26, 1.0)):
        (stored,) = (
            b for b in all_bounds(found(), answers_of_step=128, rare_share=share) if b.name == "stored_answers"
        )
        assert stored.at_most == at_most
    assert "25% of groups are all wrong: below accelerators.curriculum.rare_share 0.26" in stored.why
    assert "those of 4.0 steps" in bounds["alpha"].why and "100% of groups" in bounds["earlier_answers"].why


def test_what_helps_where_no_prompt_comes_back():
    """A database is rhyme's alone, and rpo can be given answers to begin with."""
    p, told = [0.1] * 8, {}
    for judged in (True, False):
        for b in all_bounds(found(epochs=1.0, p=p, judged=judged), answers_of_step=128):
            told[b.name, judged] = b.why
            assert b.at_most == 1 or b.name not in ("rhyme", "rpo", "drafts")
    assert [name for name, why in told.items() if "only a database" in why] == [("rhyme", True), ("rhyme", False)]
    assert "fill or cache_path gives first visits an answer" in told["rpo", True]
    assert told["rpo", True].endswith(f"it is at most {suffix_gain(0.1):.2f} then")
    assert "nothing here bounds it then" in told["rpo", False] and "other prompts" in told["drafts", True]


def test_histogram_has_everyone():
    bins = {"0": 2, "0.0 to 0.2": 1, "0.2 to 0.4": 0, "0.4 to 0.6": 1, "0.6 to 0.8": 0, "0.8 to 1.0": 1, "1": 1}
    assert histogram([0, 0, 0.125, 0.5, 0.875, 1]) == list(bins.items())


def test_the_command(settings, tmp_path, capsys):
    changes = {"task": {"reward": "conftest:even"}, "accelerators": {"enabled": ["drafts"]}}
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(merged(settings, changes)))
    files = ["--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "found.png")]
    assert main(["probe", "--config", str(path), "--seconds", "5", "--tries", "6", *files]) == 0
    said, seen = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    count = len(seen["p"])
    assert 4 <= count <= 12 and len(seen["lengths"]) == count and seen["tries"] == 6 and seen["group_size"] == 4
    assert all(x * 6 == pytest.approx(round(x * 6)) for x in seen["p"])
    assert seen["spread"] == pytest.approx(sum(spread_chance(round(x * 6), 6, 4) for x in seen["p"]) / count)
    assert seen["mean_length"] == pytest.approx(sum(seen["lengths"]) / count) and seen["mean_length"] <= 12
    assert seen["epochs"] == 4 * 4 / 12 and min(seen["seconds"].values()) > 0 and seen["memory_bytes"] > 1 << 20
    assert 0 <= seen["truncated"] <= 1 and seen["tokens_per_second"] > 0
    names = {"selection", "dynamic_sampling", "stored_answers", "earlier_answers", "rhyme", "rpo", "drafts", "alpha"}
    assert set(seen["bounds"]) == names
    assert f"{count} prompts, 6 answers each" in said and "what could pay" in said
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def test_p_does_not_depend_on_how_prompts_are_parted(settings):
    config = check_config(merged(settings, {"task": {"reward": "conftest:even"}}), source="test")
    few, many = (probe(config, prompts=n, tries=2, seconds=1e-3 if n == 4 else 60) for n in (4, 12))
    assert len(few["p"]) == 4 and len(many["p"]) == 12 and many["p"][:4] == few["p"]


@pytest.mark.parametrize(
    ("limits", "words"), [({"tries": 0}, "--tries must be above 0 and finite, got 0"), ({"seconds": -1}, "-1")]
)
def test_bad_limits(settings, limits, words):
    with pytest.raises(UserError, match=words):
        probe(check_config(settings, source="test"), **limits)


def test_where_nothing_is_right_or_wrong_groups_go_by_rewards(settings):
    found = probe(check_config(settings, source="test"), prompts=8, seconds=30)  # the share of digits
    assert not found["judged"] and found["spread"] == found["reward_spread"] > 0.5 and found["all_wrong"] == 0
    assert "nothing is right or wrong in this task" in "\n".join(lines(found))
    assert found["bounds"]["rhyme"]["at_most"] is None and found["bounds"]["rpo"]["at_most"] is None
    assert found["bounds"]["drafts"]["at_most"] >= 1
    for name in ("stored_answers", "earlier_answers"):
        assert found["bounds"][name]["at_most"] == 1, "none of them are right ones"


def test_it_tells_how_far_it_is(settings, monkeypatch, capsys):
    monkeypatch.setattr("python_trainer.logger.LINE_SECONDS", 0.0)
    config = check_config(merged(settings, {"task": {"reward": "conftest:even"}}), source="test")
    probe(config, seconds=0.1, prompts=4, tries=2)
    said = capsys.readouterr().err
    assert "probe 0/1  answers 8/8" in said and said.index("answers 8/8") < said.index("probe 0/1  update 0/1")
