"""Right answers that are trained on again."""

import io
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import same, train
from rich.console import Console

from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.rhyme import accelerator, sampling
from python_trainer.accelerators.rhyme.accelerator import HistoryUse, Rhyme
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StoredAnswer
from python_trainer.accelerators.rhyme.recording import OWN
from python_trainer.accelerators.rhyme.replay import DECAY_STEPS, FIRST_GROUPS, PER_PROMPT, REST, SuccessRates
from python_trainer.accelerators.rhyme.sampling import AnswerBank
from python_trainer.accelerators.settings import RhymeSettings
from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.data import Rollout
from python_trainer.loop.batch import Batch
from python_trainer.loop.dynamic_sampling import StepSampler
from python_trainer.rollout.settings import RolloutConfig
from python_trainer.run.directory import read_metrics
from python_trainer.run.logger import group_spread, rollout_statistics
from python_trainer.trainer import Trainer

RIGHT = {"finish_reason": "stop", "accuracy": 1.0}
OTHER = 7  # a run


def answer(key, token=5, tokens=10, **facts):
    return Rollout(prompt_ids=[1, key], response_ids=[token] * tokens, logprobs=[-0.3] * tokens, prompt_index=key,
                   **RIGHT | facts)  # fmt: skip


def stored_answer(text="a", tokens=10, run_id=OWN, step=1):
    return StoredAnswer(run_id, step, "key", text, True, 1.0, "", torch.full((tokens,), 5), torch.full((tokens,), -0.5))


def filled(*answers, step=1):
    bank = AnswerBank()
    bank.add(answers, step)
    return bank


def test_rests_between_uses_and_goes_after_the_last(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_USES", 3)
    bank = filled((0, stored_answer()))
    used = []
    for step in range(1, 20):
        for entry in bank.replayable(step, {OWN}):
            entry.uses = entry.uses + 1
            entry.last_use = step
            used.append(step)
    assert used == [1 + REST, 1 + 2 * REST, 1 + 3 * REST]


def test_goes_when_it_is_old():
    bank = filled((0, stored_answer()))
    assert len(bank.replayable(1 + DECAY_STEPS, {OWN})) == 1 and not bank.replayable(2 + DECAY_STEPS, {OWN})


def test_the_newest_different_ones_of_this_run_and_of_better_ones_are_replayed():
    bank = AnswerBank()
    for step, text in enumerate("abbcd", start=1):
        bank.add([(0, stored_answer(text, step=step)), (0, stored_answer(f"other {step}", run_id=OTHER))], step)
    assert [entry.answer.text for entry in bank.replayable(9, {OWN})] == ["d", "c"][:PER_PROMPT]
    assert [entry.answer.text for entry in bank.replayable(9, {OTHER})] == ["other 5", "other 4"]
    assert [entry.answer.text for entry in bank.replayable(9, {OWN, OTHER})] == ["d", "other 5"]


def replaying(*answers, num_right=0, num_answers=0):
    """Make an accelerator in step 4 with these stored answers, and this many right ones among earlier answers."""
    rhyme = Rhyme(RhymeSettings(rare_share=0))
    rhyme.use = HistoryUse.USED
    rhyme.rates = SuccessRates(8)
    rhyme.bank = filled(*answers)
    rhyme.rates.right += num_right
    rhyme.rates.answers += num_answers
    config = SimpleNamespace(rollout=SimpleNamespace(num_generations=8))
    run = SimpleNamespace(config=config, prompts=[[1, key] for key in range(8)])

    def replay(step, *, tokens):
        context = StepContext(run, step, 0)
        fresh = [answer(7, tokens=tokens // 2), answer(7, tokens=tokens // 2, accuracy=0.0)]
        replayed = rhyme._replay(context, [fresh])
        assert context.telemetry.get("rhyme/replayed_answers", 0) == len(replayed)
        return replayed

    return replay


@pytest.mark.parametrize(("num_right", "num_answers", "num_replayed"), [(0, 0, 1), (1, 9, 1), (1, 8, 0), (9, 10, 0)])
def test_only_prompts_answered_right_less_than_once_in_a_group(num_right, num_answers, num_replayed):
    answers = replaying((0, stored_answer()), num_right=num_right, num_answers=num_answers)(4, tokens=200)
    rate = (num_right + num_right / max(num_answers, 1)) / (num_answers + 1)
    assert len(answers) == num_replayed == (rate < 1 / 8)
    assert all(a.success_rate == pytest.approx(max(rate, 1 / 10)) and a.importance_cap == 1 for a in answers)
    assert all(a.accuracy == 1 and a.prompt_ids == [1, 0] and a.logprobs == [-0.5] * 10 for a in answers)


def test_those_used_least_come_first_within_the_tokens():
    """Half as many tokens as fresh answers that teach something have."""
    replay = replaying(*((key, stored_answer()) for key in range(6)))
    first = replay(4, tokens=50)
    second = replay(6, tokens=2000)
    assert len(first) == 2 and len(second) == 6
    assert {a.prompt_index for a in second[:4]} == set(range(6)) - {a.prompt_index for a in first}
    assert not replaying((0, stored_answer()))(4, tokens=18)


def test_a_rate_is_a_discounted_mean_with_one_answer_of_the_mean_prompt():
    rates = SuccessRates(3)
    keys = [0, 1, 2]
    assert rates.rates(keys) == [0, 0, 0] and rates.rates([]) == []
    rates.advance(1)
    rates.add([[answer(0)] + [answer(0, accuracy=0.0)] * 3, [answer(1)] * 4])
    assert rates.rates(keys) == pytest.approx([(1 + 5 / 8) / 5, (4 + 5 / 8) / 5, 5 / 8])
    rates.advance(1 + DECAY_STEPS // 2)
    discount = math.exp(-0.5)
    rates.add([[answer(0, accuracy=0.0)] * 4])
    mean = 5 * discount / (8 * discount + 4)
    assert rates.rates([0]) == pytest.approx([(discount + mean) / (4 * discount + 4 + 1)])


def test_right_answers_are_rare_by_the_first_groups():
    rates = SuccessRates(1)
    wrong = answer(0, accuracy=0.0)
    for _ in range(FIRST_GROUPS // 2):
        assert rates.rare(0.5) is None and rates.rare(0)
        rates.add([[wrong, wrong], [wrong, answer(0)]])
    rates.add([[wrong]] * 99)
    assert (rates.groups, rates.failed) == (FIRST_GROUPS, FIRST_GROUPS // 2)
    assert rates.rare(0.5) is True and rates.rare(0.51) is False and rates.rare(0)


@pytest.mark.parametrize(("algorithm", "expected"), [
    ({}, math.sqrt(0.9 / 0.1)),
    ({"scale_rewards": "batch"}, math.sqrt(0.9 / 0.1)),
    ({"scale_rewards": "none"}, 0.9),
    ({"advantage": "rloo"}, 0.9),
    ({"advantage": "reinforce++"}, math.sqrt(0.9 / 0.1)),
])  # fmt: skip
def test_the_loss_judges_it_against_the_chance_and_others_as_before(algorithm, expected):
    fresh = [answer(0, reward=float(i < 1), group=0) for i in range(4)]
    lone = answer(1, group=1, reward=1.0, success_rate=0.1, importance_cap=1.0)
    config = AlgorithmConfig(**algorithm)
    batches = [Batch(rollouts, config, 10, torch.device("cpu")) for rollouts in (fresh, [*fresh, lone])]
    metrics = [batch.set_advantages() for batch in batches]
    fresh_advantages, advantages = (batch.advantages for batch in batches)
    assert torch.allclose(advantages[4], torch.tensor(expected))
    assert torch.equal(advantages[:4], fresh_advantages) and metrics[0] == metrics[1]


def test_answers_that_are_all_stored_need_nothing_to_compare_them_with():
    batch = Batch([answer(1, group=1, success_rate=0.5)], AlgorithmConfig(), 10, torch.device("cpu"))
    assert batch.set_advantages() == {}
    assert torch.equal(batch.advantages, torch.ones(1, 10))


def test_dynamic_sampling_lets_them_through():
    sampler = StepSampler(RolloutConfig(prompts_per_step=1, dynamic_sampling=True))
    sampler.add([answer(0, group=0), answer(0, group=0, accuracy=0.0), answer(2, group=1, success_rate=0.1)])
    sampler.add([answer(3, group=0), answer(3, group=0), answer(4, group=1, success_rate=0.1)])
    assert [(a.prompt_index, a.group) for a in sampler.rollouts()] == [(0, 0), (0, 0), (2, 1), (4, 2)]
    assert sampler.metrics()["sampling/kept_groups"] == 0.5


def test_they_are_in_no_metric_of_groups():
    fresh = [answer(0, reward=float(i), group=0) for i in range(2)]
    lone = answer(1, group=1, success_rate=0.1, importance_cap=1.0)
    assert rollout_statistics([*fresh, lone]) == rollout_statistics(fresh)
    assert group_spread([*fresh, lone]) == group_spread(fresh)
    stored = [answer(0, reward=float(i), group=0, importance_cap=1.0) for i in range(2)]
    assert rollout_statistics(stored) == {}
    assert group_spread(stored) == {"reward_std": pytest.approx(0.5**0.5), "frac_reward_zero_std": 0.0}


SMALL_GROUPS = {"num_generations": 2, "prompts_per_step": 8}
EVEN = {"reward": "conftest:even"}


@pytest.mark.parametrize(
    ("other_accelerators", "options"),
    [
        ([], {"rollout": SMALL_GROUPS | {"dynamic_sampling": True, "max_sampling_rounds": 2}}),
        (["drafts"], {"rollout": SMALL_GROUPS, "algorithm": {"advantage": "gae", "num_iterations": 2}}),
    ],
)
def test_a_run_uses_them_and_resumes_with_the_same_weights(
    make_config, tmp_path, monkeypatch, other_accelerators, options
):
    monkeypatch.setattr(sampling, "RESCUERS", 0)
    accelerators = {"enabled": ["rhyme", *other_accelerators], "rhyme": {"rare_share": 0, "history_ratio": 0}}

    def run(folder, steps, resume=False):
        config = make_config(max_steps=steps, accelerators=accelerators, task=EVEN, **options)
        return train(config, tmp_path / folder, resume=resume)

    uninterrupted = run("whole", 8)
    run("parts", 5)
    assert same(uninterrupted, run("parts", 8, resume=True))
    rows = read_metrics(tmp_path / "whole")[1:]
    assert sum(row["rhyme/replayed_answers"] for row in rows) > 0
    monkeypatch.setattr(accelerator, "REPLAY_SHARE", 0)
    assert not same(uninterrupted, run("without", 8))


@pytest.mark.parametrize("database", [False, True])
def test_where_right_answers_are_not_rare_a_run_is_plain_training(make_config, tmp_path, monkeypatch, database):
    """Bit for bit, at the defaults. Before it is known nothing is used either; checkpoints have what was decided."""
    monkeypatch.setattr("python_trainer.accelerators.rhyme.replay.FIRST_GROUPS", 16)

    def run(folder, steps, resume=False, **accelerators):
        config = make_config(max_steps=steps, rollout=SMALL_GROUPS, accelerators=accelerators, task=EVEN)
        lines = io.StringIO()
        trainer = Trainer(config, tmp_path / folder, console=Console(file=lines, width=300), resume=resume)
        trainer.run()
        used = [row["rhyme/replayed_answers"] for row in read_metrics(tmp_path / folder)[1:] if accelerators]
        return trainer, used, lines.getvalue()

    def rhyme(share=0.55, **options):
        file = {"database": str(tmp_path / "history.db")} if database else {}
        return {"enabled": ["rhyme"], "rhyme": {"rare_share": share, **file, **options}}

    plain, *_ = run("plain", 8)
    monkeypatch.setattr("python_trainer.accelerators.rhyme.replay.clearly_better", lambda shares, run_shares: False)
    for number in range(2):  # the second after a run that has left its answers
        declined, used, output = run(f"declined {number}", 8, **rhyme())
        assert same(plain, declined) and not any(used)
        assert "of the first 16 groups had no right answer: a share below 0.55, history is not used" in output
        (rhyme_of_run,) = declined.accelerators
        assert not len(rhyme_of_run.bank) and rhyme_of_run.use is HistoryUse.UNUSED
    if database:
        assert len(RetrospectiveDatabase(str(tmp_path / "history.db")).samples()) > 0
    rare = rhyme(0.01)
    uninterrupted, used, output = run("whole", 8, **rare)
    assert not any(used[:1]) and any(used[1:]), "decided after the second step"
    assert output.count("right answers are rare, history is used") == 1
    assert not same(plain, uninterrupted)
    (tmp_path / "history.db").unlink(missing_ok=True)
    uninterrupted, *_ = run("whole alone", 8, **rare)
    (tmp_path / "history.db").unlink(missing_ok=True)
    run("parts", 1, **rare)
    run("parts", 4, resume=True, **rare)
    resumed, *_ = run("parts", 8, resume=True, **rare)
    assert same(uninterrupted, resumed)
