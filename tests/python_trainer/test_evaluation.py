"""Evaluation with several answers to a prompt, and several test sets."""

import json
from itertools import combinations

import pytest
from rich.console import Console

from python_trainer.compare import train_once
from python_trainer.config import describe_settings
from python_trainer.errors import UserError
from python_trainer.evaluation import EvaluationSampling, by_prompt, metrics_of, pass_at_k
from python_trainer.report.runs import find_runs
from python_trainer.report.tables import summary_columns
from python_trainer.run import Trainer
from python_trainer.run_directory import load_evaluations, read_metrics
from python_trainer.tasks.rewards import Scores

QUIET = Console(quiet=True)


@pytest.mark.parametrize(("samples", "right"), [(4, 0), (4, 1), (5, 2), (5, 5), (6, 4)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(samples, right):
    answers = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        chosen = [any(some) for some in combinations(answers, k)]
        assert pass_at_k(samples, right, k) == pytest.approx(sum(chosen) / len(chosen))


def test_metrics_known_values():
    scores = Scores({}, [1.0, 0.5, 0.0, 0.0, 2.0, 0.0, 0.0, 0.5], [1, 0, 0, 0, 1, 1, 0, 0])
    found = metrics_of(scores, EvaluationSampling(samples=4, pass_at=[1, 2, 4]))
    # of 1 right in 4: 1/4, 1/2, 1; of 2 right in 4: 1/2, 5/6, 1
    expected = {"accuracy": 0.375, "reward": 0.5, "pass@1": 0.375, "pass@2": (1 / 2 + 5 / 6) / 2, "pass@4": 1.0}
    assert found == pytest.approx(expected) and by_prompt(scores.accuracy, 4) == [0.25, 0.5]


def test_several_answers_and_several_sets(make_config, jsonl_files, tmp_path):
    sets = {
        "greedy": {"task": {"test_path": str(jsonl_files[0])}, "temperature": 0, "max_new_tokens": 5},
        "sums": {"task": {"name": "arithmetic", "train_size": 1, "gate_size": 0, "test_size": 3}, "samples": 2},
    }
    evaluation = {"samples": 3, "pass_at": [1, 3], "eval_limit": 4, "sets": sets}
    config = make_config(max_steps=1, evaluation=evaluation)
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    asked, generate = [], trainer.engine.generate

    def spy(requests, sampling):
        asked.append((requests, sampling))
        return generate(requests, sampling)

    trainer.engine.generate = spy
    trainer.run()
    own, greedy, sums = asked[:3]
    assert [r.num_samples for r in own[0]] == [3] * 4 and [r.sample_id for r in own[0]] == [0, 3, 6, 9]
    assert len(greedy[0]) == 4 and greedy[0][0].max_new_tokens == 5 and greedy[1].temperature == 0
    assert len(sums[0]) == 3 and {own[1].seed, greedy[1].seed, sums[1].seed} == {o[1].seed for o in asked[-3:]}
    rows, summary = read_metrics(tmp_path / "run"), json.loads((tmp_path / "run" / "summary.json").read_text())
    names = {"accuracy", "reward", "pass@1", "pass@3", "greedy/accuracy", "greedy/reward", "sums/accuracy"}
    for row, name in ((rows[0], "start"), (rows[1], "final")):
        assert {f"eval/{key}" for key in names} <= row.keys()
        assert row["eval/pass@1"] == pytest.approx(row["eval/accuracy"]) and row["eval/pass@3"] >= row["eval/pass@1"]
        assert summary["evaluation"][name] == {key: row[key] for key in summary["evaluation"][name]}
        shares = load_evaluations(tmp_path / "run")[name]
        assert len(shares) == 4 and shares.mean() == pytest.approx(row["eval/accuracy"])
    table = summary_columns(find_runs([tmp_path]))["run"]
    assert table["pass@3 after"] == f"{rows[1]['eval/pass@3']:.3f}" and table["greedy/accuracy after"]


def test_a_start_known_from_a_sibling_is_not_enough_for_several_answers(make_config, tmp_path):
    plain, several = make_config(max_steps=1), make_config(max_steps=1, evaluation={"samples": 2, "pass_at": [2]})
    Trainer(plain, tmp_path / "plain", console=QUIET).run()
    for name, config in (("same", plain), ("several", several)):
        train_once(config, tmp_path / name, [tmp_path / "plain"], label=name, console=QUIET)
    first = {name: read_metrics(tmp_path / name)[0] for name in ("plain", "same", "several")}
    assert first["same"]["eval/accuracy"] == first["plain"]["eval/accuracy"] and "eval/reward" not in first["same"]
    assert "eval/pass@2" in first["several"]


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"samples": 2, "pass_at": [1, 4]}, r"samples must be >= 4 with pass_at \[1, 4\], got 2"),
        ({"sets": {"a": {"task": {"test_size": 0}}}}, "evaluation.sets.a.task.test_size: .*greater than or equal to 1"),
        ({"sets": {"a": {"task": {"name": "gsm8k"}}}}, "evaluation.sets.a.task: task gsm8k needs train_path"),
        ({"sets": {"a": {"tempurature": 1}}}, "evaluation.sets.a.tempurature: unknown setting"),
    ],
)
def test_wrong_settings_are_named(make_config, evaluation, message):
    with pytest.raises(UserError, match=message):
        make_config(evaluation=evaluation)
    assert "evaluation.sets.NAME.top_p" in {key for key, *_ in describe_settings()}
