"""Evaluation with several answers to a prompt, and several test sets."""

import io
import json
from itertools import combinations
from statistics import fmean
from unittest.mock import Mock

import pytest
from conftest import QUIET, train
from rich.console import Console
from support import write_jsonl
from tiny import digits

from python_trainer.command_line.report import draw_curves, find_runs, summary_rows
from python_trainer.config import EvaluationConfig
from python_trainer.loop.evaluation import by_prompt, metrics_of, pass_at_k
from python_trainer.run.directory import EVALUATIONS, read_evaluations, read_metrics
from python_trainer.tasks import Example, Task, TaskSettings, files
from python_trainer.tasks.rewards import Scores
from python_trainer.trainer import Trainer


@pytest.mark.parametrize(("samples", "right"), [(4, 0), (4, 1), (5, 2), (5, 5), (6, 4)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(samples, right):
    answers = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        successes = [any(choice) for choice in combinations(answers, k)]
        assert pass_at_k(samples, right, k) == pytest.approx(sum(successes) / len(successes))


def test_metrics_known_values():
    scores = Scores({}, [1.0, 0.5, 0.0, 0.0, 2.0, 0.0, 0.0, 0.5], [1, 0, 0, 0, 1, 1, 0, 0])
    metrics = metrics_of(scores, EvaluationConfig(samples=4))
    # of 1 right in 4: 1/4, 1/2, 1; of 2 right in 4: 1/2, 5/6, 1
    expected = {"accuracy": 0.375, "reward": 0.5, "pass@1": 0.375, "pass@2": (1 / 2 + 5 / 6) / 2, "pass@4": 1.0}
    assert metrics == pytest.approx(expected) and by_prompt(scores.accuracy, 4) == [0.25, 0.5]


def test_several_answers_and_several_sets(make_config, jsonl_files, tmp_path):
    evaluation = {"samples": 3, "eval_limit_during": 3, "sets": {"train": str(jsonl_files[0])}}
    config = make_config(max_steps=1, evaluation=evaluation, task={"test_size": 4})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    trainer.engine.generate = generate = Mock(wraps=trainer.engine.generate)
    trainer.evaluator.evaluate()
    assert [len(call.args[0]) for call in generate.call_args_list] == [3, 3], "as during the run"
    generate.reset_mock()
    trainer.run()
    calls = [call.args for call in generate.call_args_list]
    test_call, train_call = calls[:2]
    assert [r.num_generations for r in test_call[0]] == [3] * 4 and [r.sample_id for r in test_call[0]] == [0, 3, 6, 9]
    assert len(train_call[0]) == 4 and {test_call[1].seed, train_call[1].seed} == {o[1].seed for o in calls[-2:]}
    assert [r.prompt_ids for r in train_call[0]] == trainer.prompts.ids["train"][:4] and test_call[
        1
    ].seed != train_call[1].seed
    rows = read_metrics(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    names = {"accuracy", "reward", "pass@1", "pass@2", "train/accuracy", "train/reward"}
    for row, name in ((rows[0], "start"), (rows[1], "final")):
        assert {f"eval/{key}" for key in names} <= row.keys()
        assert row["eval/pass@1"] == pytest.approx(row["eval/accuracy"]) and row["eval/pass@2"] >= row["eval/pass@1"]
        assert summary["evaluation"][name] == {key: row[key] for key in summary["evaluation"][name]}
        shares = read_evaluations(tmp_path / "run")[name]
        assert len(shares) == 4 and fmean(shares) == pytest.approx(row["eval_all/accuracy"])
        assert fmean(shares[:3]) == pytest.approx(row["eval/accuracy"])
    table = dict(summary_rows(find_runs([tmp_path])))
    assert table["pass@2 after"] == f"{rows[1]['eval_all/pass@2']:.3f}" and table["train/accuracy after"]


def test_a_set_may_be_smaller_than_test_size(make_config, jsonl_files, tmp_path):
    """It is cut where it is larger."""
    (tmp_path / "few.jsonl").write_text('{"prompt": "A"}\n{"prompt": "B"}\n')
    sets = {"few": str(tmp_path / "few.jsonl"), "many": str(jsonl_files[0])}
    trainer = Trainer(make_config(task={"test_size": 4}, evaluation={"sets": sets}), tmp_path / "run", console=QUIET)
    assert [len(prompt_set.ids) for prompt_set in trainer.prompts.sets] == [2, 4]
    assert len(trainer.prompts.ids["test"]) == 4


def test_each_file_is_read_once(make_config, jsonl_files, tmp_path, monkeypatch):
    """Further test sets share the training examples of the task."""
    for name in ("easy", "hard"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": "A"}])
    sets = {name: str(tmp_path / f"{name}.jsonl") for name in ("easy", "hard")}
    read = Mock(side_effect=files.read_lines)
    monkeypatch.setattr(files, "read_lines", read)
    Trainer(make_config(evaluation={"sets": sets}), tmp_path / "run", console=QUIET)
    assert [str(path) for ((path,), _) in read.call_args_list] == [*map(str, jsonl_files), *sets.values()]


class NamedSettings(TaskSettings):
    """A task of its own that has a ``test_path``."""

    name: str = "test_evaluation:NamedSettings"
    test_path: str = "AB"

    def load(self):
        return Task("named", [Example("C")], [Example(prompt) for prompt in self.test_path], {"digits": digits})


def test_any_task_with_a_test_path_has_further_sets():
    settings = NamedSettings(test_size=2)
    task = settings.load_test_set(settings.load(), "DEF")
    assert [example.prompt for example in (*task.train, *task.test)] == ["C", "D", "E"]


def test_a_column_that_a_whole_set_lacks_is_told(make_config, tmp_path):
    """The reward compares answers with None there, and every answer is wrong."""
    for name, column in (("train", "right"), ("test", "gold"), ("hard", "right"), ("few", "other")):
        rows = [{"prompt": "A", column: 1.0}, {"prompt": "B"}]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "test", "hard", "few")}
    task = {"train_path": paths["train"], "test_path": paths["test"], "reward": "test_evaluation:known"}
    config = make_config(task=task, evaluation={"sets": {name: paths[name] for name in ("hard", "few")}})
    shown = Console(file=io.StringIO(), width=200)
    Trainer(config, tmp_path / "run", console=shown)
    notes = [line for line in shown.file.getvalue().splitlines() if "reward function" in line]
    told = "note: reward function known gets None for column 'right', which {} prompts lack"
    assert notes == [told.format(name) for name in ("test", "evaluation.sets.few")]


def known(prompts, completions, completion_ids, right, **columns):
    """Return what the file says of each prompt: the accuracy of a policy that never changes."""
    return right


def known_rows(folder, right):
    """Write a file of as many prompts as there are verdicts."""
    path = folder / f"{len(right)}-{sum(right):g}.jsonl"
    rows = [{"prompt": "ABCDEFGH"[: 1 + i], "right": value} for i, value in enumerate(right)]
    write_jsonl(path, rows)
    return str(path)


@pytest.fixture
def known_config(make_config, tmp_path):
    """Return the config of a run that evaluates after step 2 on two of eight test prompts, the only right ones."""
    rows = known_rows(tmp_path, [1.0, 1.0] + [0.0] * 6)
    task = {"train_path": rows, "test_path": rows, "reward": "test_evaluation:known"}
    evaluation = {"eval_steps": 2, "eval_limit_during": 2, "target_accuracy": 0.9, "sets": {"mirror": rows}}
    save = {"save_steps": 1, "save_total_limit": 1}

    def make(max_steps=4, **changes):
        return make_config(max_steps=max_steps, task=task, evaluation=evaluation | changes, save=save)

    return make


def test_evaluations_are_compared_on_the_same_prompts(known_config, tmp_path):
    summary = Trainer(known_config(), tmp_path / "run", console=QUIET).run()
    rows = [row for row in read_metrics(tmp_path / "run") if "eval/accuracy" in row]
    for prefix in ("", "mirror/"):
        assert [row[f"eval/{prefix}accuracy"] for row in rows] == [1.0, 1.0, 1.0]
        assert [row.get(f"eval_all/{prefix}accuracy") for row in rows] == [0.25, None, 0.25]
    assert (summary["eval_accuracy_start"], summary["eval_accuracy_final"]) == (0.25, 0.25)
    assert summary["tokens_to_target"] == 0, "the first two prompts were right before the first step"
    assert not (tmp_path / "run" / "best").exists()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000004"]
    curve, _ = draw_curves(find_runs([tmp_path])).axes[0].lines
    assert list(curve.get_ydata()) == [1.0, 1.0, 1.0]
    table = dict(summary_rows(find_runs([tmp_path])))
    assert (table["accuracy after"], table["mirror/accuracy after"]) == ("0.250", "0.250")
    (tmp_path / "run" / "summary.json").unlink()
    table = dict(summary_rows(find_runs([tmp_path])))
    assert (table["accuracy before"], table["accuracy after"]) == ("1.000", "1.000"), "as of an unfinished run"


def test_a_run_that_ends_where_it_was_evaluated_is_evaluated_on_all_prompts(known_config, tmp_path, monkeypatch):
    """The end of a run that went on is none of this one."""
    train(known_config(max_steps=2), tmp_path / "run")
    trainer = Trainer(known_config(max_steps=8), tmp_path / "run", resume=True, console=QUIET)
    step = trainer.step
    monkeypatch.setattr(trainer, "step", lambda number: step(number) if number < 5 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert "final" not in trainer.state.results
    train(known_config(max_steps=4), tmp_path / "run", resume=True)
    rows = map(json.loads, (tmp_path / "run" / EVALUATIONS).read_text().splitlines())
    assert [(row["step"], row["name"]) for row in rows] == [(0, "start"), (2, "final"), (4, "final")]


@pytest.mark.parametrize("changes", [{"reward_weights": [2.0]}, {"test_path": [1.0, 0.0]}])
def test_a_resumed_run_compares_only_evaluations_with_the_same_rewards(make_config, tmp_path, changes):
    rows = known_rows(tmp_path, [1.0, 1.0])
    if "test_path" in changes:  # an answer in the file was mended
        changes = {"test_path": known_rows(tmp_path, changes["test_path"])}
    task = {"train_path": rows, "test_path": rows, "reward": "test_evaluation:known"}
    train(make_config(max_steps=2, task=task), tmp_path / "run")
    config = make_config(max_steps=4, task=task | changes)
    trainer = Trainer(config, tmp_path / "run", resume=True, console=QUIET)
    trainer.run()
    assert [row[0] for row in trainer.state.evaluations] == [4] and trainer.state.results.keys() == {"final"}


def test_a_resumed_run_compares_only_evaluations_of_the_same_sets(make_config, tmp_path):
    sets = {name: known_rows(tmp_path, [1.0, 0.0]) for name in ("mended", "kept")}
    sets["mended"] = str(tmp_path / "mended.jsonl")
    rows = known_rows(tmp_path, [1.0, 1.0])
    task = {"train_path": rows, "test_path": rows, "reward": "test_evaluation:known"}
    shown = io.StringIO()
    for steps in (1, 2, 3):
        if steps < 3:  # the same path, another file
            (tmp_path / "mended.jsonl").write_text(f'{{"prompt": "{"A" * steps}", "right": 1}}\n')
        config = make_config(max_steps=steps, task=task, evaluation={"sets": sets})
        trainer = Trainer(config, tmp_path / "run", resume=steps > 1, console=Console(file=shown, width=500))
        trainer.run()
    start, final = (trainer.state.results[name].keys() for name in ("start", "final"))
    assert final - start == {"eval/mended/accuracy", "eval/mended/reward"} and "eval/kept/accuracy" in start
    assert shown.getvalue().count("evaluation.sets.mended has other prompts than before") == 1


@pytest.mark.parametrize(("changes", "start"), [
    ({"eval_limit_during": 4}, 0.25), ({"temperature": 0}, None), ({"samples": 2}, None), ({}, 0.25),
])  # fmt: skip
def test_a_resumed_run_compares_only_evaluations_of_the_same_prompts(known_config, tmp_path, changes, start):
    train(known_config(max_steps=2), tmp_path / "run")
    shown = io.StringIO()
    trainer = Trainer(known_config(**changes), tmp_path / "run", resume=True, console=Console(file=shown, width=500))
    summary = trainer.run()
    assert [row[0] for row in trainer.state.evaluations] == ([4] if changes else [0, 2, 4])
    assert [cost[1] > 0 for cost in trainer.state.costs] == ([True] if changes else [False, True, True])
    assert (summary["eval_accuracy_start"], summary["eval_accuracy_final"]) == (start, 0.25)
    assert shown.getvalue().count("evaluations have other prompts, rewards or sampling than before") == bool(changes)
