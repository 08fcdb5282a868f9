"""The accelerator: stored answers in the place of fresh ones.

A run is recorded where ``accelerators.rhyme.database`` names a database, whether rhyme is enabled or not.
"""

import shutil
from functools import partial
from pathlib import Path

import pytest
from conftest import QUIET, digits, even, merged, run_settings, same, train

from bench.faults.training import differences
from python_trainer.accelerators.rhyme import accelerator, replay
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.recording import RunRecorder
from python_trainer.config import load_config
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer

JUDGED = {"reward": ["tiny:mostly_digits", "conftest:digits"], "reward_weights": [0, 1]}
TRUST_ALL = {"threshold": 0.0, "fraction": 1.0}


def steps_of(path):
    database = RetrospectiveDatabase(str(path), create=False)
    return [[record.step for record in database.trajectory(run.id)] for run in database.runs()]


@pytest.fixture(scope="session")
def first_run(tiny_policy, jsonl_files, tmp_path_factory):
    """Return the folder of a run of 9 steps, every prompt three times, that wrote into history.db next to it."""
    folder = tmp_path_factory.mktemp("history")
    rhyme = {"enabled": ["rhyme"], "rhyme": {"database": str(folder / "history.db")}}
    changes = {"max_steps": 9, "task": JUDGED, "accelerators": rhyme}
    train(load_config(merged(run_settings(tiny_policy, jsonl_files), changes)), folder / "run")
    return folder


@pytest.fixture
def filled(first_run, tmp_path):
    """Return the path of a copy of that run's database."""
    return Path(shutil.copy(first_run / "history.db", tmp_path / "history.db"))


@pytest.fixture
def no_replay(monkeypatch):
    monkeypatch.setattr(accelerator, "REPLAY_SHARE", 0)
    monkeypatch.setattr(accelerator, "REHEARSALS", 0)


def test_history_replaces_generation_and_is_weighted(filled, rhyme_config, tmp_path, no_replay):
    trainer = train(rhyme_config(filled, TRUST_ALL, max_steps=6, seed=1), tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert rows[0]["rhyme/stored_answers"] == 0  # nothing is trusted before there is anything to compare
    assert max(row["rhyme/stored_answers"] for row in rows) >= 1
    for rollouts in trainer.updates:
        numbers = [r.group for r in rollouts]
        assert numbers == sorted(numbers) and all(r.success_rate is None for r in rollouts)
        for r in rollouts:
            assert len(r.response_ids) == r.prefix_len + len(r.logprobs)
            assert r.importance_cap is None or (r.importance_cap == 1.0 and r.accuracy == 1)
    # fewer answers were generated, and those are still the policy's own
    assert all(row["sampling/logp_difference/max"] < 1e-4 for row in rows)
    fresh = [sum(r.importance_cap is None for r in rollouts) for rollouts in trainer.updates]
    assert fresh[0] == 16 and min(fresh) < 16
    assert len(RetrospectiveDatabase(str(filled)).runs()) == 2


def test_untrusted_history_changes_nothing(filled, rhyme_config, make_config, tmp_path, no_replay):
    plain = train(make_config(seed=1), tmp_path / "plain")
    aware = train(rhyme_config(filled, {"threshold": 1.0, "max_staleness": 0}, seed=1), tmp_path / "aware")
    assert same(plain, aware)
    assert read_metrics(tmp_path / "aware")[-1]["rhyme/best_match"] > 0.5  # there was something


EVERYTHING = {**TRUST_ALL, "selection": "retrodiction"}


def test_resume_equals_the_uninterrupted_run(filled, rhyme_config, tmp_path):
    """Although the steps after the checkpoint are in the database already, and others have written to it."""
    copies = [shutil.copy(filled, tmp_path / f"copy{i}.db") for i in range(2)]
    train(rhyme_config(copies[0], EVERYTHING, max_steps=6), tmp_path / "whole")
    train(rhyme_config(copies[1], EVERYTHING, max_steps=5), tmp_path / "parts")  # checkpoints after 2, 4 and 5
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000005")
    train(rhyme_config(copies[1], max_steps=2, seed=9), tmp_path / "other")
    train(rhyme_config(copies[1], EVERYTHING, max_steps=6), tmp_path / "parts", resume=True)
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    assert [list(map(len, steps_of(copy))) for copy in copies] == [[9, 6], [9, 6, 2]]
    answers = [[s for s in RetrospectiveDatabase(str(copy)).samples() if s.run_id == 2] for copy in copies]
    assert len(answers[0]) == len(answers[1]) > 0


def test_retrodiction_learns_from_what_was_not_trained_on(filled, rhyme_config, tmp_path, monkeypatch):
    monkeypatch.setattr("python_trainer.accelerators.rhyme.retrodiction.READY", 8)
    settings = {**EVERYTHING, "history_ratio": 0.34}
    trainer = train(rhyme_config(filled, settings, max_steps=8), tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    network = trainer.accelerators[0].groups.retrodictor
    assert len(network.targets) >= 8 and network.ready and network.features.isfinite().all()
    assert network.features.std(0).count_nonzero() > 5 and any(row["rhyme/stored_answers"] > 0 for row in rows)


def test_stored_answers_are_worth_what_fresh_ones_are(filled, rhyme_config, tmp_path):
    """Whatever the run that found them thought of them; those that are wrong now are not used."""

    def worth(answer):
        return 10 * even([], [], [answer.response_ids])[0] - len(answer.response_ids) / 12

    samples = RetrospectiveDatabase(str(filled)).samples()
    task = {"reward": "conftest:even", "reward_weights": [10.0]}
    algorithm = {"overlong_cache": 12}
    config = rhyme_config(filled, TRUST_ALL, max_steps=6, seed=1, task=task, algorithm=algorithm)
    trainer = train(config, tmp_path / "run")
    stored = [r for batch in trainer.updates for r in batch if r.importance_cap is not None and r.success_rate is None]
    assert stored and [r.reward for r in stored] == pytest.approx([worth(r) for r in stored])
    bank = [entry.answer for entry in trainer.accelerators[0].bank if entry.answer.run_id == 1]
    assert bank and [s.reward for s in bank] == pytest.approx([worth(s) for s in bank], rel=1e-5)
    right = {(s.step, s.text, s.prompt_key) for s in samples if even([], [], [s.response_ids])[0]}
    assert {(s.step, s.text, s.prompt_key) for s in bank} == right and len(right) < len(samples)


def test_a_resumed_run_with_other_rewards_begins_with_an_empty_bank(rhyme_config, tmp_path):
    train(rhyme_config(None, max_steps=8), tmp_path / "run")
    config = rhyme_config(None, max_steps=10, task={"reward_weights": [10.0]})
    trainer = Trainer(config, tmp_path / "run", resume=True, console=QUIET)
    bank = trainer.accelerators[0].bank
    assert len(bank) > 0
    trainer.run()
    rewards, ids = zip(*((entry.answer.reward, entry.answer.response_ids.tolist()) for entry in bank))
    assert list(rewards) == pytest.approx([10 * share for share in digits([], [], ids)])


def test_rewards_are_stored_as_they_were_before_rpo_shaped_them(rhyme_config, tmp_path):
    """Otherwise the length reward would apply to a stored answer again and again."""
    path = tmp_path / "history.db"
    task = {"reward": "conftest:even"}
    config = rhyme_config(path, enabled=("rpo", "rhyme"), max_steps=4, task=task)
    trainer = train(config, tmp_path / "run")
    assert any(0 < r.reward < 1 for rollouts in trainer.updates for r in rollouts), "rpo has shaped some"
    bank = [entry.answer for entry in trainer.accelerators[1].bank]
    for stored in bank, RetrospectiveDatabase(str(path)).samples():
        assert stored and {answer.reward for answer in stored} == {1.0}
    assert all(step.reward == step.accuracy for step in RetrospectiveDatabase(str(path)).trajectory(1))


@pytest.fixture
def run(history_run):
    return partial(history_run, steps=2, enabled=(), save={"save_steps": 1})


@pytest.mark.parametrize("enabled", [[], ["rhyme"]])
def test_only_a_named_database_records(run, tmp_path, enabled):
    unrecorded = run("alone", enabled=enabled)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone"]
    recorded = run("named", enabled=enabled, database=str(tmp_path / "history.db"))
    assert same(recorded, unrecorded)
    assert steps_of(tmp_path / "history.db") == [[1, 2]] and len(recorded.accelerators) == 1
    assert recorded.accelerators[0].name == ("rhyme" if enabled else "recorder")


def test_a_run_without_rhyme_reads_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "clearly_better", lambda shares, run_shares: True)
    database = {"database": str(tmp_path / "history.db")}
    first = run("first", **database)
    second = run("second", **database)
    assert same(first, second) and [type(accelerator) for accelerator in second.accelerators] == [RunRecorder]
    third = run("third", enabled=["rhyme"], **database)
    assert read_metrics(tmp_path / "third")[2]["rhyme/rehearsed_answers"] > 0
    assert steps_of(tmp_path / "history.db") == [[1, 2]] * 3 and not same(first, third)


@pytest.mark.parametrize("enabled", [[], ["rhyme"]])
@pytest.mark.parametrize(
    ("first_database", "second_database"), [(None, "one"), ("one", None), ("one", "one"), ("one", "other")]
)
def test_whether_it_is_recorded_may_change_when_a_run_is_resumed(
    run, tmp_path, capsys, first_database, second_database, enabled
):
    def place(kind):
        return {"enabled": enabled, "database": kind and str(tmp_path / f"{kind}.db")}

    run("run", steps=1, **place(first_database))
    resumed = run("run", steps=2, resume=True, **place(second_database))
    unrecorded = run("alone", steps=2, **place(None))
    assert same(resumed, unrecorded)
    for kind in ("one", "other"):
        file = tmp_path / f"{kind}.db"
        steps = steps_of(file) if file.exists() else []
        assert steps == ([] if kind != first_database else [[1, 2]] if kind == second_database else [[1]])
    assert capsys.readouterr().err.count("note: this run is not recorded ") == (
        first_database != second_database is not None
    )


@pytest.mark.parametrize("enabled", [[], ["rhyme"]])
def test_a_run_resumed_without_its_database_and_then_with_it(run, tmp_path, capsys, enabled):
    """rhyme remembers where the run was recorded; without it nothing did at the second step."""
    named = {"enabled": enabled, "database": str(tmp_path / "named.db")}
    run("run", steps=1, **named)
    run("run", steps=2, resume=True, enabled=enabled)
    run("run", steps=3, resume=True, **named)
    assert steps_of(tmp_path / "named.db") == ([[1, 3]] if enabled else [[1]])
    assert ("not recorded" in capsys.readouterr().err) == (not enabled)


@pytest.mark.parametrize("enabled", [[], ["rhyme"]])
def test_a_resumed_run_never_writes_into_another(run, tmp_path, enabled):
    named = {"enabled": enabled, "database": str(tmp_path / "history.db")}
    run("run", steps=2, **named)
    (tmp_path / "history.db").unlink()
    run("another", steps=3, **named)  # with the same id
    run("run", steps=4, resume=True, **named)
    assert steps_of(tmp_path / "history.db") == [[1, 2, 3]]


@pytest.mark.parametrize("original_stays", [True, False])
def test_a_copied_run_does_not_write_into_the_run_that_it_was_copied_from(run, tmp_path, capsys, original_stays):
    options = {"enabled": ["rhyme"], "database": str(tmp_path / "history.db")}
    run("run", steps=1, **options)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    if not original_stays:
        shutil.rmtree(tmp_path / "run")  # the folder was moved
    run("copy", steps=2, resume=True, **options)
    assert steps_of(tmp_path / "history.db") == ([[1]] if original_stays else [[1, 2]])
    assert capsys.readouterr().err.count("note: this run is not recorded ") == original_stays


@pytest.mark.parametrize("enabled", [[], ["rhyme"]])
def test_a_run_goes_on_when_its_database_is_deleted(run, tmp_path, monkeypatch, capsys, enabled):
    file = tmp_path / "history.db"
    after_update = RunRecorder.after_update

    def delete_first(self, context):
        file.unlink(missing_ok=True)
        after_update(self, context)

    with monkeypatch.context() as patched:
        patched.setattr(RunRecorder, "after_update", delete_first)
        run("run", enabled=enabled, database=str(file))
    assert not file.exists() and capsys.readouterr().err.count("note: this run is not recorded ") == 1
