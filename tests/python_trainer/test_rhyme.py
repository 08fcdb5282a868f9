"""The accelerator: stored answers in the place of fresh ones."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import digits, even, run_settings
from rich.console import Console
from test_checkpoint import assert_same_run

from python_trainer.accelerators.rhyme import accelerator as rhyme_module
from python_trainer.accelerators.rhyme.accelerator import begins_with
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.records import StoredAnswer, prompt_key
from python_trainer.accelerators.rhyme.settings import RhymeSettings
from python_trainer.config import check_config
from python_trainer.data import Rollout, by_group
from python_trainer.errors import UserError
from python_trainer.keyed import keyed_unit, prompt_order
from python_trainer.objective import Objective, make_batch, set_advantages
from python_trainer.report.write import report
from python_trainer.run import Trainer
from python_trainer.run_directory import read_metrics

QUIET = Console(quiet=True)
TRUST_ALL = {"threshold": 0.0, "fraction": 1.0, "lookahead": 100}


@pytest.fixture
def rhyme_config(make_config):
    """Config with the accelerator: ``rhyme_config(database, {settings of rhyme}, max_steps=...)``."""

    def make(database=None, rhyme=(), enabled=("rhyme",), **changes):
        rhyme = {"database": database and str(database), **dict(rhyme)}
        accelerators = {"enabled": list(enabled), "rhyme": rhyme, "rpo": {"keep": "any", "fill": False}}
        return make_config(**changes, accelerators=accelerators)

    return make


def train(config, folder, **options):
    trainer = Trainer(config, folder, console=QUIET, **options)
    summary = trainer.run()
    return trainer, summary, read_metrics(folder)[1:]


@pytest.fixture(scope="session")
def first_run(tiny_policy, jsonl_files, tmp_path_factory):
    """Folder of a run of 9 steps, every prompt three times, that wrote into history.db beside it."""
    folder = tmp_path_factory.mktemp("history")
    values = dict(run_settings(tiny_policy, jsonl_files), max_steps=9)
    values["task"] = values["task"] | {"accuracy": "digits"}
    rhyme = {"database": str(folder / "history.db"), "history_ratio": 0, "rescue": False}
    values["accelerators"] = {"enabled": ["rhyme"], "rhyme": rhyme}
    train(check_config(values, source="test"), folder / "run")
    return folder


@pytest.fixture
def filled(first_run, tmp_path):
    """The database of that run, to be written to."""
    return Path(shutil.copy(first_run / "history.db", tmp_path / "history.db"))


def test_a_run_fills_the_database(first_run):
    database = RetrospectiveDatabase(str(first_run / "history.db"), create=False)
    (run,) = database.runs()
    rows = read_metrics(first_run / "run")[1:]
    assert run.facts.family == "qwen2" and run.facts.task == "jsonl" and run.facts.parameters > 1000
    assert run.facts.settings["optimizer"]["learning_rate"] == 1e-2
    assert run.facts.settings["accelerators"] == ["rhyme"]  # nothing that could hold a password
    trajectory = database.trajectory(run.id)
    assert [s.step for s in trajectory] == list(range(1, 10))
    assert [s.reward for s in trajectory] == pytest.approx([row["reward"] for row in rows])
    samples = database.samples()
    assert run.rollouts == len(samples) > 5
    for sample in samples:
        assert sample.reward > 0.5 and len(sample.response_ids) == len(sample.logprobs)
        assert not any(math.isnan(x) for x in sample.logprobs) and sample.policy_version == sample.step - 1


def test_history_replaces_generation_and_is_weighted(filled, rhyme_config, tmp_path):
    config = rhyme_config(filled, TRUST_ALL, max_steps=6, seed=1)
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    seen, original = [], trainer.learner.update

    def spy(rollouts, number):
        seen.append(rollouts)
        return original(rollouts, number)

    trainer.learner.update = spy
    trainer.run()
    rows = read_metrics(tmp_path / "run")[1:]
    assert rows[0]["rhyme/stored_share"] == 0  # nothing is trusted before there is anything to compare
    assert max(row["rhyme/stored_share"] for row in rows) > 0.05
    for rollouts in seen:
        numbers = [r.group for r in rollouts]
        assert numbers == sorted(numbers)
        for r in rollouts:
            assert len(r.response_ids) == r.prefix_len + len(r.logprobs)
            assert r.importance_cap is None or (r.importance_cap == 1.0 and r.accuracy == 1)
    # fewer answers were generated, and those are still the policy's own
    assert all(row["sampling/logp_difference/max"] < 1e-4 for row in rows)
    fresh = [sum(r.importance_cap is None for r in rollouts) for rollouts in seen]
    assert fresh[0] == 16 and min(fresh) < 16
    report([tmp_path / "run"], QUIET)
    assert (tmp_path / "run" / "history.png").stat().st_size > 5000
    assert len(RetrospectiveDatabase(str(filled)).runs()) == 2


def test_untrusted_history_changes_nothing(filled, rhyme_config, make_config, tmp_path):
    plain = train(make_config(seed=1), tmp_path / "plain")[0]
    aware = train(rhyme_config(filled, {"threshold": 1.0, "max_staleness": 0}, seed=1), tmp_path / "aware")[0]
    for a, b in zip(plain.policy.model.parameters(), aware.policy.model.parameters()):
        assert torch.equal(a, b)
    assert read_metrics(tmp_path / "aware")[-1]["rhyme/best_match"] > 0.5  # there was something


def failing(prompts, completions, completion_ids, **columns):
    return [0.0] * len(completions)


def any_digit(prompts, completions, completion_ids, **columns):
    return [float(any(token < 10 for token in ids)) for ids in completion_ids]


def stored_answer(trainer, key, ids=(1, 2, 3), logprobs=(-1.0, -1.0, -1.0)):
    prompt = trainer.task.train[key].prompt
    return StoredAnswer(0, 0, 0, prompt_key(prompt), "123", True, 1.0, list(ids), list(logprobs))


def test_groups_in_which_all_failed_are_rescued(rhyme_config, tmp_path):
    config = rhyme_config(None, {"history_ratio": 0, "min_weight": 0}, max_steps=1,
                          task={"reward": "test_rhyme:failing"})  # fmt: skip
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    key = prompt_order(0, 0, 4, 12)[2]  # the third prompt of the first step
    trainer.accelerators[0].bank.add(stored_answer(trainer, key), fresh=True)
    trainer.run()
    row = read_metrics(tmp_path / "run")[1]
    assert row["rhyme/failed_groups"] == 1 and row["rhyme/rescued_groups"] == 0.25
    assert row["rhyme/stored_share"] == pytest.approx(1 / 17) and row["reward"] == 0
    assert row["frac_reward_zero_std"] < 1 and row["grad_norm"] > 0  # one group teaches


def test_stale_own_answers_and_far_ones_stay_out(rhyme_config, tmp_path):
    for name, settings, logprobs in (
        ("stale", {"max_staleness": 0, "min_weight": 0}, [-1.0] * 3),
        ("far", {"min_weight": 0.5}, [0.0] * 3),  # certain then, unlikely now
    ):
        config = rhyme_config(None, settings, max_steps=1, task={"reward": "test_rhyme:failing"})
        trainer = Trainer(config, tmp_path / name, console=QUIET)
        key = prompt_order(0, 0, 4, 12)[0]
        trainer.accelerators[0].bank.add(stored_answer(trainer, key, logprobs=logprobs), fresh=True)
        trainer.run()
        row = read_metrics(tmp_path / name)[1]
        assert row["rhyme/stored_share"] == 0 and row["rhyme/rescued_groups"] == 0
        assert ("rhyme/too_far" in row) == (name == "far")


def test_no_more_answers_are_spared_than_stored_ones_can_come(rhyme_config, tmp_path):
    """A candidate that the policy would not write spares none, two spare two, and both of them join."""
    config = rhyme_config(None, {"history_ratio": 1.0, "min_weight": 0.5}, max_steps=1,
                          task={"reward": "test_rhyme:failing"})  # fmt: skip
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    rhyme, keys = trainer.accelerators[0], prompt_order(0, 0, 4, 12)[:3]
    for key, answers in zip(keys, ([(1, 2)], [(1, 2), (3, 4)], [(1, 2), (3, 4), (5, 6)])):
        for ids in answers:
            known = 0.0 if key == keys[0] else -9.0  # certain then; hardly possible then
            sample = stored_answer(trainer, key, ids, [known] * 2)
            sample.text = str(ids)
            rhyme.bank.add(sample, fresh=True)
    trainer.run()
    assert rhyme.spared == [0, 2, 2, 0] and len(rhyme.offers) == 5
    row = read_metrics(tmp_path / "run")[1]
    assert row["rhyme/spared_answers"] == row["rhyme/stored_answers"] == 4 and row["rhyme/candidates"] == 6
    assert row["rhyme/passed_over"] == 1 and row["rhyme/too_far"] == pytest.approx(1 / 6)


def test_a_prompt_that_comes_twice_in_a_step_has_stored_answers_in_both_groups(rhyme_config, tmp_path, monkeypatch):
    rollout = {"prompts_per_step": 24}  # two epochs of 12 prompts
    config = rhyme_config(None, {"min_weight": 0}, max_steps=1, rollout=rollout, task={"reward": "test_rhyme:failing"})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    rhyme, update, groups = trainer.accelerators[0], trainer.learner.update, []
    rhyme.bank.add(stored_answer(trainer, 5), fresh=True)

    def spy(rollouts, number):
        groups.extend(by_group(rollouts).values())
        return update(rollouts, number)

    monkeypatch.setattr(trainer.learner, "update", spy)
    trainer.run()
    stored = [sum(r.importance_cap is not None for r in group) for group in groups if group[0].prompt_key == 5]
    assert stored == [1, 1] and {len(group) for group in groups} == {4}
    row = read_metrics(tmp_path / "run")[1]
    assert row["rhyme/spared_answers"] == row["rhyme/stored_answers"] == 2
    assert row["rhyme/prompts_with_candidates"] == row["rhyme/rescued_groups"] == 2 / 24


@pytest.mark.parametrize("selection", ["likelihood", "reward", "random"])
def test_the_selection_chooses(rhyme_config, tmp_path, selection):
    """Among sixteen candidates for two places."""
    settings = {"history_ratio": 1.0, "min_weight": 0, "candidates": 16, "selection": selection}
    config = rhyme_config(None, settings, max_steps=1, task={"reward": "test_rhyme:failing"})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    key = prompt_order(0, 0, 4, 12)[0]
    for i in range(16):
        sample = stored_answer(trainer, key, (i % 10, i % 7, i % 3))
        sample.text, sample.reward = str(i), 1.0 + i % 5
        trainer.accelerators[0].bank.add(sample, fresh=True)
    rhyme, seeds, chosen = trainer.accelerators[0], [], []
    original = rhyme.collect

    def spy(context, rollouts):
        seeds.append(context.seed)
        mixed = original(context, rollouts)
        chosen.extend(rollout for rollout in mixed if rollout.importance_cap is not None)
        return mixed

    rhyme.collect = spy
    trainer.run()
    offers, evidence = rhyme.offers, rhyme.evidence
    worth = {
        "likelihood": [float(values.mean()) for values in evidence.logprobs],
        "reward": [offer.sample.reward for offer in offers],
        "random": [keyed_unit(seeds[0], "rhyme random", i) for i in range(16)],
    }
    best = sorted(range(16), key=lambda i: -worth[selection][i])[:2]
    assert [answer.text for answer in chosen] == [offers[i].sample.text for i in best]
    assert read_metrics(tmp_path / "run")[1]["rhyme/passed_over"] == 14


def test_rewards_outside_of_their_range_are_told_of_once(rhyme_config, tmp_path, capsys):
    config = rhyme_config(None, max_steps=3, task={"reward_weights": [10.0]})
    train(config, tmp_path / "run")
    notes = [line for line in capsys.readouterr().err.splitlines() if "reward_range [0, 1]" in line]
    assert len(notes) == 1 and "outside" in notes[0]


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (4.0, 1.5), (math.nan, 1.0)])
def test_a_stored_token_enters_the_loss_with_its_truncated_weight(make_config, ratio, weight):
    """The weight is min(pi / behaviour, cap), or 1 where nobody knows; also without any importance_sampling."""
    config = make_config(algorithm={"importance_sampling": "none", "loss_type": "token-mean"}).algorithm
    now = torch.tensor([-1.0, -2.0])
    kept = [float(x) - math.log(ratio) if ratio > 0 else math.nan for x in now]
    common = {"prompt_key": 0, "group": 0, "prompt_ids": [5], "prefix_len": 0, "finish_reason": "stop", "text": ""}
    rollouts = [
        Rollout(**common, response_ids=[1, 2], logprobs=now.tolist(), reward=0.0, rewards={}, accuracy=0.0),
        Rollout(**common, response_ids=[3, 4], logprobs=kept, reward=1.0, rewards={}, accuracy=1.0, importance_cap=1.5),
    ]
    batch = make_batch(rollouts, config, torch.device("cpu"))
    set_advantages(batch, config)
    advantages = batch.advantages.padded()[:, 0]
    packed = batch.pack([0, 1])
    logprobs = now.expand(2, 2).clone().requires_grad_()
    loss, _ = Objective(config, 8).loss(packed, logprobs, torch.zeros(2, 2), batch, [0, 1])
    loss.backward()
    expected = -advantages[1] * weight / 4
    assert logprobs.grad[1].tolist() == pytest.approx([float(expected)] * 2, rel=1e-5)
    assert logprobs.grad[0].tolist() == pytest.approx([float(-advantages[0] / 4)] * 2, rel=1e-5)


EVERYTHING = {**TRUST_ALL, "retrodiction_steps": 1, "selection": "retrodiction", "held_out": 8}


def test_resume_equals_the_uninterrupted_run(filled, rhyme_config, tmp_path):
    """Although the steps after the checkpoint are in the database already, and others have written to it."""
    copies = [tmp_path / f"copy{i}.db" for i in range(2)]
    for copy in copies:
        shutil.copy(filled, copy)
    train(rhyme_config(copies[0], EVERYTHING, max_steps=6), tmp_path / "whole")
    train(rhyme_config(copies[1], EVERYTHING, max_steps=5), tmp_path / "parts")  # checkpoints after 2, 4 and 5
    for folder in (tmp_path / "parts" / "checkpoints").glob("step-000005"):
        shutil.rmtree(folder)
    other = rhyme_config(copies[1], {"history_ratio": 0}, max_steps=2, seed=9)
    train(other, tmp_path / "other")
    train(rhyme_config(copies[1], EVERYTHING, max_steps=6), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    runs = [RetrospectiveDatabase(str(copy)).runs() for copy in copies]
    assert [run.steps for run in runs[0]] == [9, 6] and [run.steps for run in runs[1]] == [9, 6, 2]
    assert runs[0][1].rollouts == runs[1][1].rollouts


def test_a_resumed_run_never_writes_into_another(rhyme_config, tmp_path):
    """Of the same id, where a new database has taken the place of the one that it was in."""
    path = tmp_path / "history.db"
    train(rhyme_config(path, max_steps=2), tmp_path / "run")
    path.unlink()
    train(rhyme_config(path, max_steps=3), tmp_path / "another")
    train(rhyme_config(path, max_steps=4), tmp_path / "run", resume=True)
    (run,) = RetrospectiveDatabase(str(path)).runs()
    assert run.steps == 3


def test_a_database_that_is_named_only_at_resume_records_nothing_which_is_said(rhyme_config, tmp_path, capsys):
    path = tmp_path / "history.db"
    train(rhyme_config(max_steps=1), tmp_path / "run")
    train(rhyme_config(path, max_steps=2), tmp_path / "run", resume=True)
    assert capsys.readouterr().err.count(f"this run is not recorded in sqlite:///{path}: it began without it") == 1
    assert RetrospectiveDatabase(str(path)).runs() == []


@pytest.mark.parametrize("begun", [None, "other.db", "history.db"])
def test_a_database_that_is_named_only_at_resume_is_not_read_which_is_said(rhyme_config, tmp_path, capsys, begun):
    paths = {name: tmp_path / name for name in ("history.db", "other.db")}
    for path in paths.values():
        RetrospectiveDatabase(str(path))
    train(rhyme_config(begun and paths[begun], {"record": False}, max_steps=1), tmp_path / "run")
    assert capsys.readouterr().err == ""
    train(rhyme_config(paths["history.db"], {"record": False}, max_steps=2), tmp_path / "run", resume=True)
    said = f"note: this run was begun without sqlite:///{paths['history.db']}: it is read only every accelerators.rhyme"
    assert capsys.readouterr().err.count(said) == (begun != "history.db")


def test_retrodiction_is_measured_before_it_learns(filled, rhyme_config, tmp_path):
    _, _, rows = train(rhyme_config(filled, {**TRUST_ALL, "retrodiction_steps": 2, "held_out": 8}, max_steps=6),
                       tmp_path / "run")  # fmt: skip
    measured = [row for row in rows if "rhyme/rank/random" in row]
    assert measured and all(row["step"] % 2 == 0 for row in measured)
    for row in measured:
        for name in ("likelihood", "reward", "recent", "random"):
            assert -1 <= row[f"rhyme/rank/{name}"] <= 1
    assert "rhyme/rank/retrodiction" not in measured[0]  # it had seen nothing yet


def test_hindsight_ranks_perfectly(filled, rhyme_config, tmp_path):
    trainer, _, rows = train(rhyme_config(filled, {**TRUST_ALL, "selection": "oracle"}, max_steps=4), tmp_path / "run")
    assert any(row["rhyme/stored_share"] > 0 for row in rows)
    assert any("rhyme/alignment" in row for row in rows) and trainer.accelerators[0].ranking.last_gradient is not None


def test_stored_answers_join_a_group_only_from_where_it_begins(make_config, tmp_path, monkeypatch):
    """Answers of a group are compared with each other, so all of them go on from the same tokens."""
    config = make_config(max_steps=12, accelerators={"enabled": ["rhyme", "rpo"], "rpo": {"cut_share": 0.7}})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    update, stored, offered = trainer.learner.update, [], []

    def spy(rollouts, number):
        for members in by_group(rollouts).values():
            given = members[0].response_ids[: members[0].prefix_len]
            for r in members:
                assert r.prefix_len == len(given) and r.response_ids[: r.prefix_len] == given
                assert len(r.response_ids) == r.prefix_len + len(r.logprobs) and r.logprobs
            stored.extend(r.prefix_len for r in members if r.importance_cap is not None)
        return update(rollouts, number)

    def begins(response_ids, prefix_ids):
        offered.append(begins_with(response_ids, prefix_ids))
        return offered[-1]

    monkeypatch.setattr(trainer.learner, "update", spy)
    monkeypatch.setattr(rhyme_module, "begins_with", begins)
    trainer.run()
    assert 0 in stored and max(stored) > 0, "groups with and without a beginning"
    assert False in offered and True in offered
    assert not begins_with([1, 2], [1, 2]) and begins_with([1, 2], []) and not begins_with([1, 3, 2], [1, 2])


def test_no_answer_is_spared_for_stored_ones_that_begin_otherwise(rhyme_config, tmp_path):
    config = rhyme_config(None, {"min_weight": 0}, enabled=("rhyme", "rpo"), max_steps=1,
                          task={"reward": "test_rhyme:failing"})  # fmt: skip
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    assert [accelerator.name for accelerator in trainer.accelerators if not accelerator.watches] == ["rpo", "rhyme"]
    rpo, rhyme = trainer.accelerators[:2]
    for key in range(12):
        rpo.answers[key], rpo.shortest[key] = [7, 8, 9, 10], 4
        rhyme.bank.add(stored_answer(trainer, key), fresh=True)
    trainer.run()
    row = read_metrics(tmp_path / "run")[1]
    begun = row["rpo/hit_rate"]
    assert begun > 0 and row["rhyme/prompts_with_candidates"] == 1 - begun
    assert row["rhyme/spared_answers"] == row["rhyme/stored_answers"] == 4 * (1 - begun)


def test_with_suffix_rollouts(filled, rhyme_config, tmp_path):
    config = rhyme_config(filled, TRUST_ALL, enabled=("rhyme", "rpo"), max_steps=8, seed=1)
    _, _, rows = train(config, tmp_path / "run")
    assert max(row["rhyme/stored_share"] for row in rows) > 0 and rows[-1]["rpo/hit_rate"] >= 0.5
    stored = [s for s in RetrospectiveDatabase(str(filled)).samples() if s.run_id == 2]
    assert any(math.isnan(s.logprobs[0]) for s in stored)  # a given beginning has no log-probabilities


def test_with_a_critic(filled, rhyme_config, tmp_path):
    algorithm = {"advantage": "gae", "num_iterations": 2}
    _, _, rows = train(rhyme_config(filled, TRUST_ALL, algorithm=algorithm, max_steps=5, seed=1), tmp_path / "run")
    assert max(row["rhyme/stored_share"] for row in rows) > 0
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    assert all("explained_variance" in row for row in rows)


def test_without_a_database_the_run_learns_from_itself(rhyme_config, tmp_path):
    _, _, rows = train(rhyme_config(None, max_steps=8), tmp_path / "run")
    assert all(row["rhyme/stored_share"] == 0 for row in rows[:3])  # 12 prompts, 4 a step
    assert max(row["rhyme/stored_share"] for row in rows[3:]) > 0


def test_rounds_of_dynamic_sampling_are_one_step_of_history(rhyme_config, tmp_path):
    path = tmp_path / "history.db"
    rollout = {"dynamic_sampling": True, "max_sampling_rounds": 3}
    task = {"reward": "test_rhyme:any_digit"}
    config = rhyme_config(path, {"history_ratio": 0.0}, max_steps=4, rollout=rollout, task=task)
    trainer, _, _ = train(config, tmp_path / "run")
    database = RetrospectiveDatabase(str(path))
    assert [s.step for s in database.trajectory(1)] == [1, 2, 3, 4]
    assert (
        len(trainer.accelerators[0].gathered.groups) > 4 and len(trainer.accelerators[0].curve) == 4
    )  # prompts of a step
    assert len(database.samples()) == len(trainer.accelerators[0].bank) > 0


def test_refreshed_history_sees_other_runs(filled, rhyme_config, tmp_path):
    trainer = Trainer(rhyme_config(filled, {"refresh_steps": 2}, max_steps=4), tmp_path / "run", console=QUIET)
    accelerator, seen = trainer.accelerators[0], []
    original = accelerator._read_history
    accelerator._read_history = lambda context: (seen.append(context.step), original(context))
    trainer.run()
    assert seen == [1, 2, 4]


def test_bad_settings_are_named(rhyme_config, tmp_path):
    for settings, words in (
        ({"reward_range": [1, 0]}, "reward_range must ascend"),
        ({"selection": "retrodiction"}, "retrodiction_steps above 0"),
        ({"fraction": 0}, "fraction"),
    ):
        with pytest.raises(UserError, match=words):
            rhyme_config(None, settings)
    (tmp_path / "notes.txt").write_text("not a database")
    with pytest.raises(UserError, match="no SQLite file"):
        Trainer(rhyme_config(tmp_path / "notes.txt"), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists() and RhymeSettings().database is None


OTHER_REWARDS = {
    "weights": ({"task": {"reward_weights": [10.0]}}, lambda s: 10 * digits([], [], [s.response_ids])[0]),
    "penalty": (
        {"algorithm": {"overlong_cache": 12, "overlong_penalty": 0.25}},
        lambda s: digits([], [], [s.response_ids])[0] - 0.25 * len(s.response_ids) / 12,
    ),
    "function": ({"task": {"reward": "conftest:even"}}, lambda s: even([], [], [s.response_ids])[0]),
}


@pytest.mark.parametrize("other", OTHER_REWARDS)
def test_stored_answers_are_worth_what_fresh_ones_are(filled, rhyme_config, tmp_path, other):
    """Whatever the run that found them thought of them; those that are wrong now are not used."""
    changes, worth = OTHER_REWARDS[other]
    before = RetrospectiveDatabase(str(filled)).samples()
    trainer = Trainer(rhyme_config(filled, TRUST_ALL, max_steps=6, seed=1, **changes), tmp_path / "run", console=QUIET)
    update, stored = trainer.learner.update, []

    def spy(rollouts, number):
        stored.extend(r for r in rollouts if r.importance_cap is not None)
        return update(rollouts, number)

    trainer.learner.update = spy
    trainer.run()
    assert stored and [r.reward for r in stored] == pytest.approx([worth(r) for r in stored])
    bank = [sample for sample in trainer.accelerators[0].bank if sample.run_id == 1]
    assert bank and [s.reward for s in bank] == pytest.approx([worth(s) for s in bank], rel=1e-5)
    dropped = len({(s.step, s.text, s.prompt_key) for s in before}) - len(bank)
    assert (dropped > 0) == (other == "function") and all(worth(s) > 0 for s in bank)


def test_a_resumed_run_may_have_other_rewards(rhyme_config, tmp_path):
    train(rhyme_config(None, max_steps=8), tmp_path / "run")
    config = rhyme_config(None, {"bank_per_prompt": 1}, max_steps=10, task={"reward_weights": [10.0]})
    trainer = Trainer(config, tmp_path / "run", resume=True, console=QUIET)
    bank = trainer.accelerators[0].bank
    old = {(s.step, s.text) for s in bank}
    assert old and max(len(here) for here in bank.by_prompt.values()) == 1
    trainer.run()
    assert old & {(s.step, s.text) for s in bank}, "some are still there"
    assert [s.reward for s in bank] == pytest.approx([10 * digits([], [], [s.response_ids])[0] for s in bank])


def test_an_attempt_that_was_killed_before_its_first_checkpoint_is_no_history(filled, rhyme_config, tmp_path):
    copies = [Path(shutil.copy(filled, tmp_path / f"copy{i}.db")) for i in range(2)]
    configs = [rhyme_config(copy, TRUST_ALL, max_steps=6, save={"save_steps": 6}) for copy in copies]
    whole = train(configs[0], tmp_path / "whole")[0]
    part = Trainer(configs[1], tmp_path / "parts", console=QUIET)
    original = part.step

    def killed(number):
        if number == 5:
            raise KeyboardInterrupt
        return original(number)

    part.step = killed
    with pytest.raises(KeyboardInterrupt):
        part.run()
    database = RetrospectiveDatabase(str(copies[1]))
    assert [run.steps for run in database.runs()] == [9, 4] and not (tmp_path / "parts" / "checkpoints").exists()
    again = train(configs[1], tmp_path / "parts", resume=True)[0]
    assert [run.steps for run in database.runs()] == [9, 6]
    assert [curve.run_id for curve in again.accelerators[0].history] == [1]
    for a, b in zip(whole.policy.model.parameters(), again.policy.model.parameters()):
        assert torch.equal(a, b)
    train(rhyme_config(copies[1], TRUST_ALL, max_steps=8), tmp_path / "parts", resume=True)
    assert [run.steps for run in database.runs()] == [9, 8], "with a checkpoint it goes on"
