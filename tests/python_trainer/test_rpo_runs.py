"""Whole runs with suffix rollouts: what they remember, fill, share and resume."""

import pytest
from conftest import QUIET, record_updates, train

from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.data import merits
from python_trainer.run_directory import read_metrics
from python_trainer.trainer import Trainer

ROOM = {"max_completion_length": 60}  # enough for the tiny policy to end most of its answers


def rpo_config(make_config, rollout=(), *, rpo, **changes):
    return make_config(rollout=ROOM | dict(rollout), accelerators={"enabled": ["rpo"], "rpo": rpo}, **changes)


def test_training_with_suffix_rollouts(make_config, tmp_path):
    """12 prompts at 4 a step: from step 4 on most groups start from a prefix, and fewer tokens are generated."""
    config = rpo_config(make_config, max_steps=9, rpo={"whole_share": 0})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    seen = record_updates(trainer)
    summary = trainer.run()
    rows = read_metrics(tmp_path / "run")[1:]
    assert all(row["rpo/hit_rate"] == 0 for row in rows[:3]) and rows[-1]["rpo/hit_rate"] > 0.5
    assert rows[-1]["completions/generated_length"] < rows[-1]["completions/mean_length"]
    for rollouts in seen:
        for start in range(0, len(rollouts), 4):
            group = rollouts[start : start + 4]
            shared = group[0].prefix_len
            assert len({tuple(r.response_ids[:shared]) for r in group}) == 1  # one cut for the whole group
            assert all(r.prefix_len == shared and len(r.response_ids) <= 60 for r in group)
    # the sampler's log-probabilities are those of the trainer, prefix or not
    assert all(row["sampling/logp_difference/max"] < 1e-4 for row in rows)
    for name in ("generated", "prefill", "cached", "trained"):
        assert sum(row[f"tokens/{name}"] for row in rows) == summary[f"{name}_tokens"] > 0


def test_filled_before_the_first_step_and_on_the_clock(make_config, tmp_path):
    config = rpo_config(make_config, max_steps=2, rpo={"fill": 3})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    summary = trainer.run()
    rows = read_metrics(tmp_path / "run")
    assert rows[1]["rpo/remembered"] > 4 and rows[1]["rpo/hit_rate"] > 0
    assert rows[0]["total/generated_tokens"] > 12 and rows[0]["time/training_s"] > 0
    assert summary["accelerator_s"]["rpo"] > 0
    # the same answers as those of the same policy, prompt by prompt
    again = Trainer(config, tmp_path / "again", console=QUIET)
    one = again.answer_once([5], 0)[0]
    assert one.response_ids == again.answer_once(range(12), 0)[5].response_ids
    assert one.response_ids != again.answer_once([5], 1)[0].response_ids


def test_dynamic_sampling_refills_with_suffixes_and_counts_every_round(make_config, tmp_path):
    """Rewards that are 0 or 1 by the last token: short cuts leave many groups without spread, which are drawn again."""
    rollout = {"dynamic_sampling": True, "max_sampling_rounds": 3}
    config = rpo_config(make_config, rollout, max_steps=3, rpo={"cut_share": 0.3}, task={"reward": "conftest:even"})
    train(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert max(row["sampling/rounds"] for row in rows) > 1
    for row in rows:
        assert row["rpo/informative"] == pytest.approx(row["sampling/kept_groups"])
    assert any(row["rpo/hit_rate"] > 0 for row in rows)


def test_continued_answers_are_not_taken_for_the_policys_own(make_config, gate_task, tmp_path):
    """Neither in rewards and accuracy, nor in what alpha and the database go by."""
    accelerators = {
        "enabled": ["rpo", "alpha", "rhyme"],
        "rpo": {"fill": 4, "whole_share": 0},
        "alpha": {"first_step": 99},
        "rhyme": {"database": str(tmp_path / "history.db")},
    }
    config = make_config(max_steps=20, accelerators=accelerators, task=gate_task,
                         rollout={"prompts_per_step": 2})  # fmt: skip
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    seen = record_updates(trainer)
    trainer.run()
    rows = read_metrics(tmp_path / "run")[1:]
    known, recorded, level = [], [], None
    for row, rollouts in zip(rows, seen):
        begun = [r for r in rollouts if not r.prefix_len]
        continued = [r for r in rollouts if r.prefix_len]
        for words, answers in (("", begun), ("continued/", continued)):
            for name in ("reward", "accuracy"):
                worth = [getattr(answer, name) for answer in answers]
                assert row.get(words + name) == (pytest.approx(sum(worth) / len(worth)) if worth else None)
        assert row.get("continued/share", 0) == len(continued) / len(rollouts)
        if begun:
            level = sum(r.reward for r in begun) / len(begun)
            known.append([row["step"], sum(merits(begun)), len(begun)])
        recorded.append(level)
    assert any("reward" not in row for row in rows), "a step whose answers were all continued"
    trajectory = RetrospectiveDatabase(str(tmp_path / "history.db")).trajectory(1)
    assert [step.reward for step in trajectory] == pytest.approx(recorded)
    alpha = next(a for a in trainer.accelerators if a.name == "alpha")
    assert alpha.answered == known and len(known) < 20
