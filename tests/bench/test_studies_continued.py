"""Answers continued: the rules, that measuring changes nothing, and training on answers that were continued."""

import time

import pytest
import torch
from rich.console import Console

from bench.studies.continued import (
    COMMON,
    MEASURING,
    Continuations,
    by_chance,
    by_number,
    check,
    trained,
    until_reject,
)
from bench.studies.continued_report import RULES, SAME_NUMBERS, report
from bench.studies.continuing import EarlierAnswers
from python_trainer.config import load_config
from python_trainer.run import Trainer
from python_trainer.run_directory import read_metrics

SHORT = [
    *COMMON, *MEASURING, "model.path=small", "task.train_size=8", "task.test_size=8", "evaluation.eval_limit=4",
    "rollout.prompts_per_step=4", "rollout.num_generations=3", "rollout.max_completion_length=24",
    "optimizer.learning_rate=1e-3", "optimizer.warmup_steps=1", "save.save_steps=2",
]  # fmt: skip
ON = ["accelerators.enabled=['bench.studies.continuing:ContinuedSettings']"]
STEPS = 6
DRAWS = 200_000
KEY = {"part": "measure", "task": "sums", "seed": 0, "steps": STEPS, "cpu": "", "torch": "", "commit": ""}
OLD, NEW = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.3, 0.0])


def uniforms(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def drawn(chances, numbers):
    return by_number(chances.log().expand(len(numbers), -1), torch.zeros(len(numbers), dtype=torch.int64), numbers)[1]


def kept_by_number(new, old):
    """Whether each of many tokens that ``old`` drew is kept, and the tokens before and after."""
    numbers = uniforms(DRAWS)
    tokens = drawn(old, numbers)
    return *by_number(new.log().expand(DRAWS, -1), tokens, numbers), tokens


def kept_by_chance(new, old):
    tokens = drawn(old, uniforms(DRAWS))
    return by_chance(new.log()[tokens], old.log()[tokens], uniforms(DRAWS, 1)), tokens


def test_the_policy_that_drew_them_keeps_all_tokens():
    assert kept_by_chance(OLD, OLD)[0].all() and kept_by_number(OLD, OLD)[0].all()


def test_a_token_that_cannot_be_drawn_any_more_is_rejected():
    kept, tokens = kept_by_chance(NEW, OLD)
    assert not kept[tokens == 3].any() and (tokens == 3).any()
    kept, now, tokens = kept_by_number(NEW, OLD)
    assert not kept[tokens == 3].any() and not (now == 3).any()


def test_tokens_are_kept_as_often_as_the_distributions_overlap():
    kept, _ = kept_by_chance(NEW, OLD)
    overlap = torch.minimum(NEW, OLD).sum().item()
    assert kept.float().mean().item() == pytest.approx(overlap, abs=0.006)  # five standard errors
    kept, now, _ = kept_by_number(NEW, OLD)
    between = [torch.cat([torch.zeros(1), chances]).cumsum(0) for chances in (OLD, NEW)]
    same = torch.minimum(*(x[1:] for x in between)) - torch.maximum(*(x[:-1] for x in between))
    assert kept.float().mean().item() == pytest.approx(same.clamp_min(0).sum().item(), abs=0.006)
    assert (now.bincount(minlength=4) / DRAWS - NEW).abs().max() < 0.006  # what is kept or drawn is of the new policy
    two = torch.tensor([0.3, 0.7]), torch.tensor([0.6, 0.4])  # of two tokens the same numbers keep all that can be kept
    assert kept_by_number(*two)[0].float().mean().item() == pytest.approx(0.7, abs=0.006)


def test_an_answer_stands_up_to_its_first_reject():
    kept = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    assert until_reject(kept).tolist() == [2, 0, 4]


@pytest.fixture
def run(tmp_path):
    """run(folder, steps, options) -> the trainer of a run that is over, and its metrics."""

    def make(folder, steps=STEPS, options=(), **arguments):
        config = load_config("configs/sums.yaml", [*SHORT, f"max_steps={steps}", *options])
        trainer = Trainer(config, tmp_path / folder, console=Console(quiet=True), resume=True, **arguments)
        trainer.run()
        return trainer, read_metrics(tmp_path / folder)[1:]

    return make


def same_weights(*trainers):
    weights = [list(trainer.policy.model.parameters()) for trainer in trainers]
    return all(torch.equal(x, y) for x, y in zip(*weights, strict=True))


def test_measuring_changes_nothing(run):
    watch = Continuations(time.process_time)
    plain, _ = run("plain")
    measured, rows = run("measured", callbacks=[watch])
    assert same_weights(plain, measured)
    row = watch.row(rows)
    assert watch.steps == [3, 4, 5, 6] and row["answers"] == 4 * 12
    for rule in RULES:
        assert 0 < row[f"tokens, {rule}"] < row["tokens"] and row[f"continuing_s, {rule}"] > 0
        assert row[f"groups without spread, {rule}"][1] + row[f"groups with spread, {rule}"][1] == 16
    assert 0 < row["check_s"] and 0 < row["rollout_s"] < row["step_s"]
    said = report([KEY | row])
    assert "| answers kept whole: same numbers | " in said and "## Trained" not in said


def test_answers_that_were_just_drawn_are_kept_whole(run):
    seen = []

    class Look(Continuations):
        def on_rollouts(self, trainer, step, rollouts):
            super().on_rollouts(trainer, step, rollouts)
            earlier = [answer for key in {answer.prompt_key for answer in rollouts} for answer in self.before[key]]
            found, _ = check(trainer.context(step), earlier, self.timer)
            seen.append(([len(answer.rollout.response_ids) for answer in earlier], found[SAME_NUMBERS]))

    run("run", 3, callbacks=[Look(time.process_time)])
    for lengths, found in seen:
        assert found.kept == lengths and not any(found.instead)


def test_off_it_is_plain_training(run):
    plain, _ = run("plain")
    off, rows = run("off", options=[*ON, "accelerators.continued.reuse=false"])
    assert same_weights(plain, off)
    assert all(row["continued/forward_passes"] > 8 and row["continued/taken_over"] == 0 for row in rows)


def test_answers_go_on_where_they_are_no_longer_what_their_numbers_draw(run, monkeypatch):
    on, rows = run("on", options=ON)
    assert [row["continued/taken_over"] > 0 for row in rows] == [False] * 2 + [True] * 4
    monkeypatch.setattr(EarlierAnswers, "draft", lambda *arguments: None)
    alone, others = run("no drafts", options=ON)
    assert same_weights(on, alone)  # the engine's check only says which tokens it does not have to draw
    found, without = trained(rows), trained(others)
    assert found["forward_passes"] < without["forward_passes"] and 0 < found["taken_over"] < found["tokens"]
    said = report([KEY | without | {"part": "plain"}, KEY | found | {"part": "continued"}])
    passes = f"{without['forward_passes']:,.0f}, {found['forward_passes']:,.0f}"
    assert "## Measured" not in said and f" | {passes} | {found['taken_over']:,.0f} of {found['tokens']:,.0f} (" in said


def test_goes_on_as_if_it_had_not_been_interrupted(run):
    whole, _ = run("whole", options=ON)
    run("parts", 4, ON)
    parts, _ = run("parts", options=ON)
    assert same_weights(whole, parts)
