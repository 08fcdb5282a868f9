"""Right answers of earlier runs, trained on at first: of those that are clearly better than the present one."""

import json
import shutil
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from conftest import merged, same
from gloo import KINDS, run_on_ranks, train
from safetensors.torch import load_file

from bench.studies.sentences import RightAnswersFirst
from python_trainer.accelerators.rhyme import accelerator, replay, sampling
from python_trainer.accelerators.rhyme.accelerator import HistoryUse, Rhyme
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StepRecord, prompt_hash
from python_trainer.accelerators.rhyme.matching import PARTS, curve_of
from python_trainer.accelerators.rhyme.replay import (
    MIN_PROMPTS_TO_COMPARE,
    MIN_STANDARD_ERRORS,
    clearly_better,
    in_batches,
    last_shares,
)
from python_trainer.accelerators.settings import RhymeSettings
from python_trainer.data import Rollout
from python_trainer.errors import UserError
from python_trainer.model.policy import load_policy
from python_trainer.run.directory import read_metrics


def odd(prompts, completions, completion_ids, **_):
    """Return 1 where the first token is odd, so that some answers of a random policy are right."""
    return [float(ids[0] % 2) for ids in completion_ids]


@pytest.fixture
def run(history_run, tmp_path, monkeypatch):
    """Run :func:`history_run` on one database by default, without stored answers in groups; every run is better.

    No random policy is clearly better than another; which are is for other tests.
    """
    monkeypatch.setattr(sampling, "RESCUERS", 0)
    monkeypatch.setattr(replay, "clearly_better", Mock(return_value=True))

    def make(folder, rehearsals=3, database=tmp_path / "history.db", **changes):
        monkeypatch.setattr(accelerator, "REHEARSALS", rehearsals)
        return history_run(folder, database=database and str(database), history_ratio=0, **changes)

    return make


def key_sum(folder, key):
    return sum(row.get(key, 0) for row in read_metrics(folder))


def count_rehearsed(tmp_path, folder):
    """Return how many answers of earlier runs were trained on first, each three times."""
    return key_sum(tmp_path / folder, "rhyme/rehearsed_answers") / 3


def test_a_run_begins_with_the_answers_of_earlier_ones(run, tmp_path):
    """A plain one leaves its answers, too."""
    run("first")
    run("plain", enabled=[], seed=2)
    database = RetrospectiveDatabase(str(tmp_path / "history.db"))
    answers = database.samples()
    for recorded, folder, enabled in zip(database.runs(), ("first", "plain"), (["rhyme"], []), strict=True):
        assert recorded.task == "jsonl" and recorded.settings["optimizer"]["learning_rate"] == 1e-2
        assert recorded.settings["accelerators"] == enabled, "nothing that could hold a password"
        recorded_rewards = [(record.step, record.reward) for record in database.trajectory(recorded.id)]
        rows = read_metrics(tmp_path / folder)[1:]
        assert recorded_rewards == [(row["step"], pytest.approx(row["reward"])) for row in rows] and len(rows) == 4
    assert {answer.run_id for answer in answers} == {1, 2}
    assert all(answer.response_ids[0] % 2 and not answer.logprobs.isnan().any() for answer in answers)
    assert all(answer.reward > 0.5 and len(answer.response_ids) == len(answer.logprobs) for answer in answers)
    second = run("second", seed=1)
    rows = read_metrics(tmp_path / "second")[1:]
    assert (
        count_rehearsed(tmp_path, "first")
        == 0
        < count_rehearsed(tmp_path, "second")
        == rows[1]["rhyme/rehearsed_answers"] / 3
    )
    tokens = sum(step.generated_tokens for run_id in (1, 2) for step in database.trajectory(run_id))
    assert rows[1]["rhyme/earlier_tokens"] == tokens > 0
    run_seconds = [database.trajectory(run_id)[-1].seconds for run_id in (1, 2)]
    assert rows[1]["rhyme/earlier_seconds"] == pytest.approx(sum(run_seconds))
    for seconds, folder in zip(run_seconds, ("first", "plain"), strict=True):
        earlier, last = (row["time/training_s"] for row in read_metrics(tmp_path / folder)[-2:])
        assert earlier < seconds <= last, "on the clock of the run, until its last step was over"
    assert not any("rhyme/rehearsed_answers" in row for row in (rows[0], *rows[2:]))
    assert rows[1]["tokens/trained"] > rows[0]["tokens/trained"] > 0
    assert json.loads((tmp_path / "second" / "summary.json").read_text())["generated_tokens"] == sum(
        row["tokens/generated"] for row in rows
    )
    assert not same(second, run("other", seed=1, database=None))


def test_the_study_uses_right_answers_first_and_no_history_after_that(run, tmp_path, monkeypatch):
    run("first")
    kinds = {"rhyme": Rhyme, "first alone": RightAnswersFirst}
    for folder, kind in kinds.items():
        monkeypatch.setattr(RhymeSettings, "accelerator", f"{kind.__module__}:{kind.__name__}")
        monkeypatch.setattr(sampling, "RESCUERS", 1)
        shutil.copy(tmp_path / "history.db", database := tmp_path / f"{folder}.db")
        run(folder, seed=1, steps=8, database=database, rare_share=0)
    rehearsed, used = ({folder: key_sum(tmp_path / folder, f"rhyme/{key}") for folder in kinds}
                       for key in ("rehearsed_answers", "stored_answers"))  # fmt: skip
    assert rehearsed["rhyme"] == rehearsed["first alone"] > 0
    assert used["rhyme"] > 0 == used["first alone"]


def test_rehearsal_is_a_share_of_the_run(run, tmp_path, monkeypatch):
    run("first", steps=6)
    monkeypatch.setattr(accelerator, "REHEARSAL_BATCH", 1)
    for share in (0.0, 0.5, 10.0):
        monkeypatch.setattr(accelerator, "REHEARSAL_SHARE", share)
        run(f"share {share}", seed=1, steps=2)
    rows = [read_metrics(tmp_path / f"share {share}")[2] for share in (0.0, 0.5, 10.0)]
    rehearsed = [row.get("rhyme/rehearsed_answers", 0) for row in rows]
    assert rehearsed[0] == 0 < rehearsed[1] <= 16 < 3 * count_rehearsed(tmp_path, "share 10.0") == rehearsed[2]


def test_what_rehearsal_has_brought_is_seen_at_once(run, tmp_path):
    run("first")
    for name, every, rehearsals in ("with", 3, 1), ("without", 3, 0), ("never", 0, 1):
        run(name, seed=1, steps=4, rehearsals=rehearsals, evaluation={"eval_steps": every})
    evaluated_steps = {
        name: [row["step"] for row in read_metrics(tmp_path / name) if "eval/accuracy" in row]
        for name in ("with", "without", "never")
    }
    assert evaluated_steps == {"with": [0, 2, 3, 4], "without": [0, 3, 4], "never": [0, 4]}


def test_rehearsal_makes_right_answers_more_likely(run, tmp_path):
    run("first", steps=6)
    rollout = {"num_generations": 32, "prompts_per_step": 4}
    run("with", steps=2, seed=1, rehearsals=20, rollout=rollout)
    run("without", steps=2, seed=1, rehearsals=0, rollout=rollout)
    accuracy = {name: read_metrics(tmp_path / name)[2]["accuracy"] for name in ("with", "without")}
    assert accuracy["with"] > accuracy["without"] + 0.2


def test_the_newest_different_answers_are_taken(run, make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "REHEARSED_PER_PROMPT", 2)
    run("first", steps=1, enabled=[])
    task = make_config().task.load()
    database = RetrospectiveDatabase(str(tmp_path / "history.db"))
    facts = database.runs()[0]
    sample = database.samples()[0]
    record = database.trajectory(1)[0]
    key = prompt_hash(task.train[0].prompt)
    later = database.add_run(facts)
    texts = ["1", "3", "1", "5", "3"]  # what was said in steps 1 to 5
    for step, text in enumerate(texts, 1):
        ids = load_policy(make_config().model).tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = {"response_ids": torch.tensor(ids), "logprobs": -torch.ones(len(ids))}
        answer = replace(sample, prompt_key=key, text=text, **tokens)
        database.add_step(later, replace(record, step=step), [replace(answer, step=step)], created=facts.created)
    trainer = run("second", steps=1, seed=1, task={"reward": "test_dynamic_sampling:always"})
    (tmp_path / "third").mkdir()
    rhyme = Rhyme(trainer.accelerators[0].settings)
    trainer.run_context.folder = tmp_path / "third"
    rhyme.begin(trainer.run_context)
    assert rhyme.before_step(trainer.context(1)) == []
    batches = rhyme.before_step(trainer.context(2))
    texts = [answer.text for batch in batches for answer in batch if answer.prompt_index == 0]
    assert texts == ["3", "5"] * 3


def test_what_each_prompt_was_answered_with_is_counted(run, tmp_path):
    """Rounds of dynamic sampling are one step of history."""
    sampling = {"num_generations": 2, "prompts_per_step": 4, "dynamic_sampling": True}
    trainer = run("rounds", steps=3, rollout=sampling, rare_share=0)
    names = {prompt_hash(example.prompt) for example in trainer.task.train}
    database = RetrospectiveDatabase(str(tmp_path / "history.db"))
    trajectory = database.trajectory(1)
    assert [record.step for record in trajectory] == [1, 2, 3]
    assert sum(len(record.outcomes["answers"]) for record in trajectory) == trainer.state.prompts > 12
    assert len(database.samples()) == len(trainer.accelerators[0].bank) > 0
    for record in trajectory:
        outcomes = record.outcomes
        assert set(outcomes["answers"].tolist()) == {2} and (outcomes["right"] <= 2).all()
        assert outcomes["right"].sum().item() / outcomes["answers"].sum().item() == pytest.approx(record.accuracy)
        assert {bytes(key).hex() for key in outcomes["prompts"].tolist()} <= names
    assert any(record.accuracy for record in trajectory)
    run("share", steps=1, enabled=[], task={"reward": "conftest:digits"})  # nothing is right or wrong
    assert RetrospectiveDatabase(str(tmp_path / "history.db")).trajectory(2)[0].outcomes == {}


def test_a_critic_learns_nothing_of_right_answers_alone(run, tmp_path):
    run("first")
    algorithm = {"advantage": "gae", "num_iterations": 2}
    plain, rehearsed = (
        run(f"{times}", steps=2, seed=1, rehearsals=times, algorithm=algorithm, optimizer={"learning_rate": 1e-12})
        for times in (0, 3)
    )
    assert read_metrics(tmp_path / "3")[2]["rhyme/rehearsed_answers"] > 0
    torch.testing.assert_close(rehearsed.learner.critic.state_dict(), plain.learner.critic.state_dict())


def test_other_rewards_judge_again(run, tmp_path):
    run("first")
    run("second", seed=1, task={"reward": "test_dynamic_sampling:coins"})
    assert count_rehearsed(tmp_path, "second") == 0
    run("third", seed=1, task={"reward": "conftest:digits"})  # nothing is right or wrong
    assert count_rehearsed(tmp_path, "third") == 0


def settings_of_ranks(settings, database, steps):
    rhyme = {"database": database, "rare_share": 0, "threshold": 0, "fraction": 1}
    sections = {
        "max_steps": steps,
        "seed": 1,
        "task": {"reward": "test_earlier_runs:odd"},
        # several micro-batches for each process; Adam divides by the size of a gradient, of rounding errors too
        "optimizer": {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "micro_batch_tokens": 30},
        "accelerators": {"enabled": ["rhyme"], "rhyme": rhyme},
    }
    return merged(settings, sections)


def train_ranks(settings, folder):
    replay.clearly_better = Mock(return_value=True)
    accelerator.REHEARSAL_SHARE = 10  # in this process
    for kind in KINDS:
        database = str(folder / f"{kind}.db")
        for steps in (2, 3):
            train(settings_of_ranks(settings, database, steps), folder / kind, kind, resume=steps == 3)
        enabled = {"accelerators": {"enabled": [], "rhyme": {"database": str(folder / "plain.db")}}}
        train(merged(settings_of_ranks(settings, database, 1), enabled), folder / f"plain {kind}", kind)
        with pytest.raises(UserError, match="notes.db cannot be used"):  # on both ranks
            train(settings_of_ranks(settings, str(folder / "notes.db"), 1), folder / f"bad {kind}", kind)


@pytest.mark.slow
def test_the_first_rank_alone_reads_and_writes_and_all_rehearse(run, settings, tmp_path, monkeypatch):
    run("first")
    monkeypatch.setattr(sampling, "RESCUERS", 1)
    for name in ("none", *KINDS):
        shutil.copy(tmp_path / "history.db", tmp_path / f"{name}.db")
    (tmp_path / "notes.db").write_text("no database at all")
    run_on_ranks(tmp_path, train_ranks, settings, tmp_path)
    train(settings_of_ranks(settings, str(tmp_path / "none.db"), 3), tmp_path / "none")
    expected = load_file(tmp_path / "none" / "weights.safetensors")
    for kind in KINDS:
        weights = load_file(tmp_path / kind / "weights.safetensors")
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        for key in ("rhyme/rehearsed_answers", "rhyme/stored_answers"):
            rows = [[row.get(key, 0) for row in read_metrics(tmp_path / name)] for name in ("none", kind)]
            assert rows[0] == rows[1] and sum(rows[0]) > 0, key
        database = RetrospectiveDatabase(str(tmp_path / f"{kind}.db"))
        assert len(database.runs()) == 2 and [record.step for record in database.trajectory(2)] == [1, 2, 3]
        one_process = RetrospectiveDatabase(str(tmp_path / "none.db"))
        assert [record.reward for record in database.trajectory(2)] == [r.reward for r in one_process.trajectory(2)]
    plain = RetrospectiveDatabase(str(tmp_path / "plain.db"))
    assert [len(plain.trajectory(stored.id)) for stored in plain.runs()] == [1, 1]


def test_batches_keep_a_prompt_together_and_see_all_as_often():
    groups = [[Rollout([key], [1], prompt_index=key)] * size for key, size in enumerate([1, 3, 2, 5, 1])]
    batches = in_batches(groups, size=4, times=3, seed=7)
    keys = [answer.prompt_index for batch in batches for answer in batch]
    assert [keys.count(key) for key in range(5)] == [3, 9, 6, 15, 3]
    for batch in batches[:-1]:
        assert 4 <= len(batch) <= 8
    for batch in batches:
        assert len({answer.group for answer in batch}) == len({(a.group, a.prompt_index) for a in batch})
    assert in_batches([], 4, 3, 7) == [] == in_batches(groups, 4, 0, 7)
    assert [answer.prompt_index for batch in in_batches(groups, 4, 3, 8) for answer in batch] != keys


def outcomes(rows):
    """Return outcomes of (number of a prompt, answers, right ones)."""
    keys = torch.zeros(len(rows), 16, dtype=torch.uint8)
    keys[:, 0] = torch.tensor([number for number, *_ in rows])
    counts = torch.tensor([counts for _, *counts in rows], dtype=torch.int32)
    return {"prompts": keys, "answers": counts[:, 0], "right": counts[:, 1]}


def test_the_last_visit_of_each_prompt_counts():
    shares = last_shares([outcomes([(1, 4, 0), (2, 4, 4)]), {}, outcomes([(1, 8, 2), (3, 4, 3)])])
    assert {bytes.fromhex(key)[0]: share for key, share in shares.items()} == {1: 0.25, 2: 1.0, 3: 0.75}


def test_damaged_steps_are_refused():
    complete = outcomes([(number, 8, 3) for number in range(16)])
    sketch = {name: torch.ones(bins) for name, bins in PARTS.items()}
    record = StepRecord(1, 0.5, 0.5, sketch, outcomes=complete)
    assert len(last_shares([complete])) == len(curve_of(1, [record]).shares) == 16
    for changes in (
        {"outcomes": {"answers": complete["answers"]}},
        {"outcomes": complete | {"right": complete["right"][:3]}},
        {"outcomes": complete | {"prompts": complete["prompts"].float()}},
        {"outcomes": complete | {"prompts": torch.tensor(3)}},
        {"outcomes": complete | {"right": complete["right"] + 9}},
        {"sketch": sketch | {"ngrams": -sketch["ngrams"]}},
        {"sketch": sketch | {"lengths": torch.ones(31)}},
        {"sketch": {name: sketch[name] for name in sketch if name != "ngrams"}},
    ):
        with pytest.raises(UserError, match="steps of run 1 in the retrospective database are damaged"):
            curve_of(1, [replace(record, **changes)])


def test_few_prompts_tell_nothing_and_more_a_clear_gain():
    shares = {str(i): 0.25 for i in range(MIN_PROMPTS_TO_COMPARE)}
    better_shares = {str(i): 0.75 for i in range(MIN_PROMPTS_TO_COMPARE)} | {"another": 0.0}
    assert clearly_better(better_shares, shares) and not clearly_better(shares, shares)
    del shares["0"]
    assert not clearly_better(better_shares, shares)


def test_runs_that_are_as_good_seldom_seem_better():
    generator = torch.Generator().manual_seed(5)
    probs = torch.rand(2000, 16, 1, generator=generator).expand(-1, -1, 8)
    rows = [torch.bernoulli(probs, generator=generator).mean(2).tolist() for _ in range(2)]
    verdicts = [clearly_better(*(dict(enumerate(shares)) for shares in pair)) for pair in zip(*rows)]
    # a normal variable exceeds two deviations in 2.3 % of the cases, Student's with 15 degrees of freedom in 3.2 %
    assert MIN_STANDARD_ERRORS == 2 and 0.01 < sum(verdicts) / len(verdicts) < 0.045
    probs = torch.rand(2000, 16, 1, generator=generator) * 0.5
    worse, better = (
        torch.bernoulli(group_probs.expand(-1, -1, 8), generator=generator).mean(2).tolist()
        for group_probs in (probs, probs + 0.3)
    )
    verdicts = [clearly_better(dict(enumerate(a)), dict(enumerate(b))) for a, b in zip(better, worse)]
    assert sum(verdicts) / len(verdicts) > 0.99


@pytest.fixture
def judged_run(history_run):
    """Run :func:`history_run`, which finds out which earlier runs are better."""
    return partial(history_run, save={"save_steps": 1})


def judged_otherwise(database, right, run_id=1):
    """Count so many of the answers of a run, by default the first, as right."""
    created = database.runs()[run_id - 1].created
    for record in database.trajectory(run_id):
        counts = record.outcomes | {"right": (record.outcomes["answers"] * right).int()}
        answers = [s for s in database.samples() if (s.run_id, s.step) == (run_id, record.step)]
        database.add_step(run_id, replace(record, outcomes=counts), answers, created=created)


def forget_the_second(database):
    _, second = database.runs()
    database.remove_run(second.id, created=second.created)


def test_a_worse_run_changes_nothing_to_the_bit_and_a_better_one_is_learned_from(judged_run, tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "COMPARED_STEPS", 4)
    url = str(tmp_path / "history.db")
    judged_run("first", database=url)
    database = RetrospectiveDatabase(url)
    samples = len(database.samples())
    judged_otherwise(database, 0.0)
    assert len(database.samples()) == samples > 0
    without_history, with_worse = (
        judged_run(name, seed=1, steps=6, database=db) for name, db in (("alone", None), ("worse", url))
    )
    assert same(without_history, with_worse) and count_rehearsed(tmp_path, "worse") == 0
    assert with_worse.accelerators[0].compared and with_worse.accelerators[0].use is not HistoryUse.USED
    forget_the_second(database)
    judged_otherwise(database, 1.0)
    better = judged_run("better", seed=1, steps=6, database=url)
    assert not same(without_history, better) and count_rehearsed(tmp_path, "better") > 0
    rehearsed_steps = [row["step"] for row in read_metrics(tmp_path / "better") if row.get("rhyme/rehearsed_answers")]
    assert rehearsed_steps == [3]  # eight prompts are answered after two steps
    forget_the_second(database)
    judged_run("parts", seed=1, steps=2, database=url)  # ends before it has learned from it
    resumed = judged_run("parts", seed=1, steps=6, resume=True, database=url)
    assert same(resumed, better)


@pytest.mark.parametrize(("interrupted_at", "right"), [(1, 1.0), (2, 0.0), (2, 1.0), (3, 1.0)])
def test_what_others_write_while_a_run_is_stopped_is_not_for_it(judged_run, tmp_path, interrupted_at, right):
    url = str(tmp_path / "history.db")
    judged_run("first", database=url)
    database = RetrospectiveDatabase(url)
    judged_otherwise(database, right)
    shutil.copy(tmp_path / "history.db", tmp_path / "whole.db")
    uninterrupted = judged_run("whole", seed=1, steps=4, database=str(tmp_path / "whole.db"))
    judged_run("parts", seed=1, steps=interrupted_at, database=url)
    judged_otherwise(database, 1 - right)
    judged_run("others", seed=2, database=url)
    judged_otherwise(database, 1.0, run_id=3)
    resumed = judged_run("parts", seed=1, steps=4, resume=True, database=url)
    assert same(uninterrupted, resumed)
    summaries = [trainer.accelerators[0].summary() for trainer in (uninterrupted, resumed)]
    assert summaries[0] == summaries[1] and (count_rehearsed(tmp_path, "parts") > 0) == (right == 1.0)
    assert (resumed.accelerators[0].better == [1]) == (right == 1.0)
