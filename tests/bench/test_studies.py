"""The harness of the studies: turns, resumption, tuning, earlier runs, and what is made of the figures."""

import copy
import dataclasses
import importlib
import json
import math
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support import assert_equal, write_jsonl

from bench.studies import __main__ as command
from bench.studies import drafts, ranks, report, trl
from bench.studies import harness as harnesses
from bench.studies.harness import TUNING_SEED, Arm, Harness, Interval, Study, evaluations, fewer_prompts, reached, train
from bench.studies.rhyme import Oracle
from bench.studies.rpo import first_error
from python_trainer import Trainer, load_config
from python_trainer.accelerators.rhyme.sampling import GroupSampler
from python_trainer.accelerators.settings import RhymeSettings

FEWER = Arm("half", ["rollout.prompts_per_step=2"], rate=1e-4)


def pretend(config, overrides, folder):
    """Stand in for a trainer: its accuracy rises with its rate, and each turn leaves a line in the file "turns"."""
    settings = dict(text.split("=", 1) for text in overrides)
    rate = float(settings["optimizer.learning_rate"])
    steps = int(settings.get("max_steps", 4))
    seed = int(settings["seed"])
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    num_rows = metrics.read_text().count("\n") if metrics.exists() else 0
    for step in range(num_rows, steps + 1):
        if settings.get("fails") == str(step):
            raise RuntimeError("a trainer ended with exit code 3")
        accuracy = 0.5 + 100 * rate * step + 0.01 * (seed % 7)
        row = {"step": step, "eval/accuracy": accuracy, "total/generated_tokens": 100 * step,
               "time/training_s": 2.0 * step, "reward": accuracy}  # fmt: skip
        with metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        with (folder.parents[1] / "turns").open("a") as file:
            file.write(f"{folder.parent.name}/{folder.name} {step}\n")
        yield
    summary = {"steps": steps, "generated_tokens": 100 * steps, "eval_accuracy_final": accuracy, "device": "here"}
    (folder / "summary.json").write_text(json.dumps(summary))


class Steps:
    """In place of a process: the same turns, of a generator within this one."""

    def __init__(self, train, *arguments):
        self.turns = train(*arguments)

    def turn(self):
        end = object()
        return next(self.turns, end) is not end

    def stop(self):
        self.turns.close()


@pytest.fixture
def study(monkeypatch):
    monkeypatch.setattr(harnesses, "Worker", Steps)
    arms = [Arm("plain", rate=1e-4, train=pretend), dataclasses.replace(FEWER, train=pretend)]
    return Study("some", "none", [], arms, levels=[0.52, 0.9], columns={"last reward": "reward"})


def turns(tmp_path):
    return (tmp_path / "some" / "turns").read_text().splitlines()


def test_arms_take_turns_and_what_is_over_is_kept(study, tmp_path):
    harness = Harness(study, tmp_path)
    harness.run_all(1)
    assert turns(tmp_path) == [f"{arm}/seed-0 {step}" for step in range(5) for arm in ("plain", "half")]
    harness.run_all(2)
    assert len(turns(tmp_path)) == 20 and turns(tmp_path)[10] == "plain/seed-1 0"
    rows = harness.rows(2)
    assert [(row["arm"], row["seed"], row["tokens"], row["seconds"]) for row in rows] == [
        ("plain", 0, 400, 8.0), ("plain", 1, 400, 8.0), ("half", 0, 400, 8.0), ("half", 1, 400, 8.0)
    ]  # fmt: skip
    assert rows[1]["more"] == {"last reward": pytest.approx(0.55)}


def test_a_report_of_what_there_is_measures_nothing(study, tmp_path):
    """A report takes what a killed measurement left; the next real measurement is kept."""
    Harness(study, tmp_path).run_all(1)
    calls = []
    study = dataclasses.replace(study, measure=lambda run: calls.append(run.parent.name) or {"norm": 2.0})
    harness = Harness(study, tmp_path)
    (tmp_path / "some" / "half" / "seed-0" / "other_weights.json").write_text('{"rank 1": [0.5, 0.1]}')
    measured = [row["more"] for row in harness.rows(1, measure=False)]
    assert [values.get("other weights") for values in measured] == [None, {"rank 1": [0.5, 0.1]}] and not calls
    for _ in range(2):
        assert [row["more"]["norm"] for row in harness.rows(1)] == [2.0, 2.0]
    assert calls == ["plain", "half"] and harness.rows(1, measure=False)[1]["more"]["norm"] == 2.0


def test_a_study_that_was_killed_goes_on(study, tmp_path):
    with pytest.raises(RuntimeError, match="exit code 3"):
        Harness(study, tmp_path, ["fails=2"]).run_all(1)
    for path in (tmp_path / "some").glob("*/seed-0.json"):
        path.unlink()  # else the other settings would be refused
    Harness(study, tmp_path).run_all(1)
    assert [row["tokens"] for row in Harness(study, tmp_path).rows(1)] == [400, 400]
    assert turns(tmp_path).count("plain/seed-0 1") == 1, "a step that was over is not done again"


def test_runs_take_turns_at_the_same_time_until_it_is_late(study, tmp_path, monkeypatch):
    barrier = threading.Barrier(2, timeout=60)
    finished_workers = []

    def meet(*arguments):
        barrier.wait()
        yield from pretend(*arguments)

    arms = [dataclasses.replace(arm, train=meet) for arm in study.arms]
    harness = Harness(dataclasses.replace(study, arms=arms), tmp_path, jobs=2)
    monkeypatch.setattr(harness, "_is_late", iter([False, False, False, True]).__next__)
    monkeypatch.setattr(Steps, "finish", lambda worker: finished_workers.append(worker), raising=False)
    harness.run_all(1)
    assert len(finished_workers) == 2 and len(turns(tmp_path)) == 4 and harness.rows(1) == []
    Harness(study, tmp_path).run_all(1)
    assert [row["tokens"] for row in harness.rows(1)] == [400, 400]


def test_a_run_of_other_settings_is_refused(study, tmp_path):
    Harness(study, tmp_path).run_all(1)
    with pytest.raises(SystemExit, match="begun with other settings"):
        Harness(study, tmp_path, ["max_steps=5"]).run_all(1)


def test_every_arm_tries_the_same_rates(study, tmp_path):
    arms = [dataclasses.replace(arm, rate=None) for arm in study.arms]
    study = dataclasses.replace(study, arms=arms, rates=(1e-4, 3e-4, 2e-4), tuning_steps=2)
    harness = Harness(study, tmp_path)
    assert harness.rows(1) == [], "no rate is chosen yet"
    harness.run_all(1)
    assert [row["rate"] for row in harness.rows(1)] == [3e-4, 3e-4]
    tuning_runs = {line.split()[0] for line in turns(tmp_path) if "rate-" in line}
    assert tuning_runs == {f"{arm}/rate-{rate}" for arm in ("plain", "half") for rate in ("0.0001", "0.0002", "0.0003")}
    settings = json.loads((tmp_path / "some" / "plain" / "rate-0.0002.json").read_text())
    assert settings == ["max_steps=2", f"seed={TUNING_SEED}", "optimizer.learning_rate=0.0002"]
    untuned = Harness(harnesses.at_rate(study, 5e-4), tmp_path / "untuned")
    untuned.run_all(1)
    assert [row["rate"] for row in untuned.rows(1)] == [5e-4, 5e-4]
    tuned_arms = [dataclasses.replace(arm, rate=rate) for arm, rate in zip(arms, (1e-4, 2e-4))]
    study_at_rate = harnesses.at_rate(dataclasses.replace(study, arms=tuned_arms), 5e-4)
    assert [arm.rate for arm in study_at_rate.arms] == [5e-4, 1e-3], "an arm of twice the rate keeps it"


def test_an_earlier_run_comes_first_and_is_shown_apart(study, tmp_path):
    earlier = Arm("smaller", ["max_steps=2"], rate=5e-5, train=pretend)
    arms = [*study.arms, Arm("after it", ["model.path={earlier}/model"], after="smaller", rate=1e-4, train=pretend)]
    study = dataclasses.replace(study, arms=arms, earlier=[earlier])
    harness = Harness(study, tmp_path)
    harness.run_all(2)
    order = [line.split()[0] for line in turns(tmp_path)]
    assert order.index("after-it/seed-1") > max(i for i, name in enumerate(order) if name == "smaller/seed-101")
    settings = json.loads((tmp_path / "some" / "after-it" / "seed-1.json").read_text())
    assert settings[0] == f"model.path={tmp_path}/some/smaller/seed-101/model"
    rows = harness.rows(2)
    assert [row.get("earlier tokens") for row in rows] == [None] * 4 + [200, 200]
    text = "\n".join(report.table(study, rows))
    assert "earlier run: tokens | s" in text and "| 200 | 4 |" in text


def test_fewer_prompts_are_half_and_a_quarter():
    assert [arm.settings for arm in fewer_prompts(16, settings=["a=1"])] == [
        ["a=1", "rollout.prompts_per_step=8"], ["a=1", "rollout.prompts_per_step=4"]
    ]  # fmt: skip


def test_a_level_is_held_by_two_evaluations():
    evaluated = [(0, 0, 0.0, 0.4), (1, 10, 1.0, 0.8), (2, 20, 2.0, 0.6), (3, 30, 3.0, 0.7), (4, 40, 4.0, 0.9)]
    assert (reached(evaluated, 0.6), reached(evaluated, 0.7)) == ((10, 1.0), (30, 3.0))
    assert reached(evaluated, 0.8) is None  # the last evaluation alone
    assert reached(evaluated[:1], 0.1) is None


def test_intervals_are_those_of_student():
    interval = Interval.of([1.0, 2.0, 4.0])
    half_width = 4.302653 * math.sqrt(7 / 3) / math.sqrt(3)  # t of two degrees of freedom, deviation of the three
    assert interval.mean == pytest.approx(7 / 3)
    assert interval.high - interval.mean == pytest.approx(half_width, rel=1e-6)
    assert Interval.of([1.0]) == Interval(1.0)
    assert interval.text("{:.1f}".format) == f"2.3 [{7 / 3 - half_width:.1f}, {7 / 3 + half_width:.1f}]"


def test_the_table_pairs_seeds(study):
    def row(arm, seed, accuracy, tokens):
        evaluated = [(0, 0, 0.0, 0.5), (1, tokens, 1.0, 0.6), (2, 2 * tokens, 2.0, accuracy)]
        return {"study": "some", "arm": arm, "seed": seed, "rate": 1e-4, "tokens": 2 * tokens, "seconds": 2.0,
                "accuracy": accuracy, "evaluations": evaluated, "more": {},
                "reached": {f"{level:g}": reached(evaluated, level) for level in study.levels}}  # fmt: skip

    rows = [row("plain", 0, 0.7, 100), row("plain", 1, 0.8, 100), row("half", 0, 0.6, 50), row("half", 1, 0.7, 25)]
    head, _, plain, half = report.table(study, rows)
    assert head.startswith("|  | rate | seeds | tokens | s | accuracy | minus plain, points | tokens to plain's end |")
    assert plain.startswith("| **plain** | 0.0001 | 2 | 200 | 2 | 0.750 |  |  |  | 100 | 1 | 0 of 2 |")
    assert "| 0.650 | -10.0 [-10.0, -10.0] | 0 of 2 | 0 of 2 | 38 (0.35 [0.00, 28.90])" in half, half
    assert "+10.0 | 0.25 | 0.50 |" in report.table(study, [row("plain", 0, 0.6, 100), row("half", 0, 0.7, 50)])[3]


def test_a_report_without_runs_writes_nothing(tmp_path, monkeypatch, capsys):
    places = ["--output", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["studies", "rpo", "--report-only", *places])
    assert command.main() == 2
    assert "nothing was written" in capsys.readouterr().err and not (tmp_path / "results").exists()


def test_the_page_of_what_there_is(study, tmp_path):
    Harness(study, tmp_path).run_all(1)
    page = report.write_page("some", "About it.", [study], Harness(study, tmp_path).rows(1), tmp_path / "results")
    assert page.count("\n") < 60 and "About it." in page and "| **half** |" in page
    assert (tmp_path / "results" / "some.md").read_text() == page
    assert (tmp_path / "results" / "some.png").stat().st_size > 5000
    assert len((tmp_path / "results" / "some.jsonl").read_text().splitlines()) == 2


def test_the_picture_of_seconds_is_drawn_from_rows(tmp_path, monkeypatch):
    """Draw README's picture; the study itself writes rows with the same keys."""
    picture = tmp_path / "trl.png"
    monkeypatch.setattr(sys, "argv", ["studies", "trl", "--picture", str(picture)])
    assert command.main() == 0 and picture.stat().st_size > 5000
    rows = report.read_rows(report.RESULTS / "trl.jsonl")
    trainer_rows = [row for row in rows if row["arm"] == "python_trainer"]
    assert report.at_level(trainer_rows, 0.85, 1) == [7.019064811000002, 8.381960864, 7.023715802]
    for row in trainer_rows:  # first an arm that gets there in two seeds of three, at last one that never does
        row["reached"]["0.85"] = None
        report.draw_seconds(trl.STUDIES[0], rows, picture)


def test_the_oracle_keeps_the_set_after_which_most_is_right(monkeypatch):
    context = SimpleNamespace(run=None, step=1, seed=0, telemetry={})
    oracle = Oracle(None, GroupSampler(RhymeSettings(), None))
    oracle.offers = [None]
    monkeypatch.setattr(GroupSampler, "mix", lambda self, context, rollouts: [self.attempt])
    monkeypatch.setattr(oracle, "after_update", lambda rollouts, step: [0.1, 0.4, 0.3, 0.2][rollouts[0]])
    assert oracle.mix(context, []) == [1] and context.telemetry["oracle/right"] == 0.4


@pytest.mark.slow
def test_a_real_run_is_charged_and_resumed(tmp_path, monkeypatch):
    settings = ["task.variant=short", "model.path=small", "task.train_size=8", "rollout.prompts_per_step=2",
                "rollout.num_generations=4", "rollout.max_completion_length=24", "task.test_size=4",
                "evaluation.eval_steps=1", "max_steps=4", "save.save_steps=1", "optimizer.warmup_steps=0",
                ranks.HISTORY]  # fmt: skip
    arms = [Arm("plain"), Arm("half", ["rollout.prompts_per_step=1"])]
    study = Study("real", "configs/sums.yaml", settings, arms, levels=[0.9])
    Harness(study, tmp_path, jobs=2, stop_after=0.5).run_all(1)
    assert (
        sorted(logged_accuracies.name for logged_accuracies in tmp_path.glob("real/*/seed-0/checkpoints/*"))
        == ["step-000001"] * 2
    )
    harness = Harness(study, tmp_path)
    assert harness.rows(1) == []
    harness.run_all(1)
    first, second = harness.rows(1)
    assert first["steps"] == 4 and first["tokens"] > second["tokens"] > 0 and first["seconds"] > 0
    run = tmp_path / "real" / "plain" / "seed-0"
    assert [step for step, *_ in evaluations(run)] == [0, 1, 2, 3, 4]
    assert first["arm"] == "plain" and arms[0].train is train
    path_shape = ranks.shape_of_path(run)
    assert 0 <= path_shape["lowest R^2"] <= path_shape["R^2 of a line"] <= 1 and 0 < path_shape["norm in rank 1"] <= 1
    monkeypatch.setattr(ranks, "KNOWN_SHARE", 0.75)
    accuracies = ranks.other_weights(run)
    logged_accuracies = {step: accuracy for step, *_, accuracy in evaluations(run)}
    assert [accuracies[name][0] for name in ("start", "end", "step 3")] == [
        logged_accuracies[0],
        logged_accuracies[4],
        logged_accuracies[3],
    ]
    assert len(accuracies) == 15 and json.loads((run / "other_weights.json").read_text()) == {
        name: list(pair) for name, pair in accuracies.items()
    }


def test_a_trial_of_the_oracle_is_undone(tmp_path):
    overrides = ["model.path=small", "task.train_size=2", "task.gate_size=4", "optimizer.warmup_steps=0"]
    trainer = Trainer(load_config("configs/smoke.yaml", overrides), tmp_path, console=Console(quiet=True))
    groups = trainer.prompts.groups([0, 1])
    rollouts = trainer.generate(groups, 0)
    trainer.scorer.score(groups, rollouts)
    for number, rollout in enumerate(rollouts):
        rollout.reward = float(number % 2)
    evaluated_states = []
    state = copy.deepcopy(trainer.learner.state_dict())
    trainer.evaluator.evaluate_each = lambda *_: [
        evaluated_states.append(copy.deepcopy(trainer.learner.state_dict())) or 1.0
    ]
    assert Oracle(trainer, GroupSampler(RhymeSettings(), None)).after_update(rollouts, 1) == 1.0
    assert_equal(trainer.learner.state_dict(), state)
    assert any(not torch.equal(weight, state["model"][name]) for name, weight in evaluated_states[0]["model"].items())


def test_drafts_are_compared_with_a_plain_run_that_has_finished(tmp_path):
    folders = [tmp_path / arm / "seed-0" for arm in ("plain", "drafts")]
    for folder, seconds in zip(folders, (1.0, 2.0)):
        folder.mkdir(parents=True)
        rows = [{"step": step, "loss": 0.5, "time/rollout_s": seconds} for step in (1, 2)]
        write_jsonl(folder / "metrics.jsonl", rows)
    assert drafts.measure(12, folders[1]) == {}, "it waits"
    (folders[0] / "summary.json").write_text("{}")
    assert drafts.measure(12, folders[1]) == {"s of rollouts": 4.0, "same training": 1.0}
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "loss": 0.5}) + "\n")
    assert drafts.measure(12, folders[1])["same training"] == 0.0


def test_where_the_first_error_of_an_answer_stands():
    right = "10+20=30\n30+30=60\nA:60"
    assert first_error("10+20+30=", right) is None
    assert first_error("10+20+30=", "10+20=31\n31+30=61\nA:61") == 0.0
    assert first_error("10+20+30=", "10+20=30\n30+30=61\nA:61") == 0.5
    assert first_error("10+20+30=", "10+20=30\n30+30=60\nA:61") == 1.0
    assert first_error("10+20+30=", "10+20=30") == 0.5


@pytest.mark.parametrize("name", command.STUDIES)
def test_studies_have_valid_settings(name, tmp_path, monkeypatch):
    """Check every arm; ``prepare`` makes files, which this test does not read."""
    for study in importlib.import_module(f"bench.studies.{name}").STUDIES:
        harness = Harness(dataclasses.replace(study, rates=()), tmp_path)
        assert len({harness.run_of(arm, 0).folder for arm in study.arms}) == len(study.arms)
        for arm in (*study.arms, *study.earlier):
            load_config(study.config, harness.run_of(arm, 0).overrides)
