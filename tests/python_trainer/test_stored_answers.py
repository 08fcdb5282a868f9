"""Right answers that are trained on again."""

import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from python_trainer.accelerators.curriculum.accelerator import Curriculum
from python_trainer.accelerators.curriculum.rare import FIRST, Rarity
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.accelerators.curriculum.stored import MOST, PER_PROMPT, REST, StoredAnswers
from python_trainer.algorithms.advantages import against_chance
from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.batch import Batch, Minibatch
from python_trainer.data import Episode, Rollout
from python_trainer.dynamic_sampling import StepSampler
from python_trainer.logger import rollout_statistics
from python_trainer.rollout.settings import RolloutConfig
from python_trainer.run_directory import read_metrics
from python_trainer.trainer import Trainer

RIGHT = {"finish_reason": "stop", "accuracy": 1.0}


def answer(key, token=5, tokens=10, **facts):
    return Rollout(prompt_ids=[1, key], response_ids=[token] * tokens, logprobs=[-0.3] * tokens, prompt_key=key,
                   **RIGHT | facts)  # fmt: skip


def always(p):
    return lambda keys: torch.full((len(keys),), p, dtype=torch.float64)


def filled(*answers, uses=3, memory=60.0, step=1):
    stored = StoredAnswers(uses, memory)
    stored.add(answers, step)
    return stored


def test_rests_between_uses_and_goes_after_the_last():
    stored, used = filled(answer(0)), []
    for step in range(1, 20):
        stored.advance(step)
        used += [step] * len(stored.take(step, always(0.01), 8, 100))
    assert used == [1 + REST, 1 + 2 * REST, 1 + 3 * REST] and not len(stored)


def test_goes_when_it_is_old():
    stored = filled(answer(0), memory=5)
    stored.advance(6)
    assert len(stored) == 1
    stored.advance(7)
    assert not len(stored)


def test_keeps_the_newest_different_right_ones():
    stored = StoredAnswers(8, 60)
    wrong = answer(0, 9, accuracy=0.0)
    written_by_others = answer(0, 8, response_mask=[True] * 9 + [False])
    for step, token in enumerate((5, 6, 6, 7), start=1):
        stored.add([answer(0, token), wrong, written_by_others, answer(0, 4, episode=Episode())], step)
    assert [s.answer.response_ids[0] for s in stored] == [6, 7][-PER_PROMPT:]


def test_is_bounded():
    stored = StoredAnswers(8, 1e9)
    for key in range(MOST + 5):
        stored.add([answer(key, tokens=1)], step=key)
    stored.advance(MOST + 5)
    assert len(stored) == MOST and min(s.born for s in stored) == 5


@pytest.mark.parametrize(("p", "taken"), [(0.0, 1), (0.124, 1), (0.125, 0), (0.9, 0)])
def test_only_prompts_answered_right_less_than_once_in_a_group(p, taken):
    answers = filled(answer(0)).take(3, always(p), 8, 100)
    assert len(answers) == taken
    assert all(a.expected == max(p, 1 / 10) and a.importance_cap == 1 for a in answers)


def test_those_used_least_come_first_within_the_tokens():
    stored = filled(*(answer(key) for key in range(6)), uses=8)
    first = stored.take(3, always(0.01), 8, 25)
    rest = stored.take(5, always(0.01), 8, 1000)
    assert len(first) == 2 and len(rest) == 6
    assert {a.prompt_key for a in rest[:4]} == set(range(6)) - {a.prompt_key for a in first}
    assert not filled(answer(0)).take(3, always(0.01), 8, 9)


def test_state_round_trip():
    stored = filled(answer(0, 5, text="a", reward=1.5), answer(3, 6, tokens=7), answer(0, 7), uses=8)
    stored.take(3, always(0.01), 8, 17)
    other = StoredAnswers(8, 60)
    other.load_state_dict(stored.state_dict())
    ours, theirs = (list(s) for s in (stored, other))
    assert [(s.born, s.last, s.uses) for s in ours] == [(s.born, s.last, s.uses) for s in theirs]
    for a, b in zip(ours, theirs):
        assert a.answer.response_ids == b.answer.response_ids and a.answer.prompt_ids == b.answer.prompt_ids
        assert a.answer.logprobs == pytest.approx(b.answer.logprobs)
        assert (a.answer.text, a.answer.reward) == (b.answer.text, b.answer.reward)
    empty = StoredAnswers(8, 60)
    empty.load_state_dict(StoredAnswers(8, 60).state_dict())
    assert not len(empty)


def test_advantage_is_that_of_a_large_group_that_is_right_as_often():
    n, right = 10_000, 500
    rewards = torch.tensor([1.0] * right + [0.0] * (n - right))
    p = torch.tensor([right / n])
    assert against_chance(p, deviations=True)[0].item() == pytest.approx(
        ((1 - rewards.mean()) / rewards.std()).item(), rel=1e-3
    )
    assert against_chance(p, deviations=False)[0].item() == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        ({}, math.sqrt(0.9 / 0.1)),
        ({"scale_rewards": "batch"}, math.sqrt(0.9 / 0.1)),
        ({"scale_rewards": "none"}, 0.9),
        ({"advantage": "rloo"}, 0.9),
        ({"advantage": "reinforce++"}, math.sqrt(0.9 / 0.1)),
        ({"advantage": "gae"}, math.sqrt(0.9 / 0.1)),
    ],
)
def test_the_loss_judges_it_against_the_chance_and_others_as_before(algorithm, wanted):
    fresh = [answer(0, reward=float(i < 1), group=0) for i in range(4)]
    lone = answer(1, group=1, reward=1.0, expected=0.1, importance_cap=1.0)
    config = AlgorithmConfig(**algorithm)
    batches = [Batch(rollouts, config, 10, torch.device("cpu")) for rollouts in (fresh, [*fresh, lone])]
    for batch in batches:
        if algorithm.get("advantage") == "gae":
            batch.values = batch.sampler.like(torch.full(batch.scored.shape, 0.25))
    facts = [batch.set_advantages() for batch in batches]
    alone, both = (batch.advantages.padded() for batch in batches)
    assert torch.allclose(both[4], torch.tensor(wanted))
    assert torch.equal(both[:4], alone) and facts[0] == facts[1]
    if algorithm.get("advantage") == "gae":
        alone, both = (batch.returns.padded() for batch in batches)
        assert torch.equal(both[:4], alone) and both[4].isnan().all(), "a critic learns nothing of it"


def test_a_critic_learns_nothing_of_it():
    """Its loss, and that of the policy, have the gradients of the fresh answers."""
    fresh = [answer(0, reward=float(i < 1), group=0) for i in range(4)]
    lone = answer(1, group=1, reward=1.0, expected=0.1, importance_cap=1.0)
    config = AlgorithmConfig(advantage="gae", vf_coef=0.5)
    gradients = []
    for rollouts in (fresh, [*fresh, lone]):
        batch, every = Batch(rollouts, config, 10, torch.device("cpu")), list(range(len(rollouts)))
        batch.values = batch.sampler.like(torch.full(batch.scored.shape, 0.25))
        batch.set_advantages()
        batch.advantages.flat.zero_()
        packed = batch.pack(every)
        logprobs = torch.full(packed.mask.shape, -0.3)
        values = torch.full(packed.mask.shape, 0.3, requires_grad=True)
        loss, _ = Minibatch(batch, every).loss(packed, logprobs, torch.zeros_like(logprobs), values)
        loss.backward()
        gradients.append({i: values.grad[row] for row, i in enumerate(packed.samples)})
    alone, both = gradients
    assert all(torch.equal(alone[i], both[i]) and alone[i].any() for i in range(4)) and not both[4].any()


def test_answers_that_are_all_stored_need_nothing_to_compare_them_with():
    batch = Batch([answer(1, group=1, expected=0.5)], AlgorithmConfig(), 10, torch.device("cpu"))
    assert batch.set_advantages() == {}
    assert torch.equal(batch.advantages.padded(), torch.ones(1, 10))


def test_dynamic_sampling_lets_them_through():
    sampler = StepSampler(RolloutConfig(prompts_per_step=1, dynamic_sampling=True))
    sampler.add([answer(0, group=0), answer(0, group=0, accuracy=0.0), answer(2, group=1, expected=0.1)])
    sampler.add([answer(3, group=0), answer(3, group=0), answer(4, group=1, expected=0.1)])
    assert [(a.prompt_key, a.group) for a in sampler.rollouts()] == [(0, 0), (0, 0), (2, 1), (4, 2)]
    assert sampler.metrics()["sampling/kept_groups"] == 0.5


def test_they_are_in_no_metric_of_groups():
    fresh = [answer(0, reward=float(i), group=0) for i in range(2)]
    lone = answer(1, group=1, expected=0.1, importance_cap=1.0)
    assert rollout_statistics([*fresh, lone]) == rollout_statistics(fresh)
    stored = [answer(0, reward=float(i), group=0, importance_cap=1.0) for i in range(2)]
    assert rollout_statistics(stored) == {"reward_std": pytest.approx(0.5**0.5), "frac_reward_zero_std": 0.0}


@pytest.mark.parametrize("enabled", [["curriculum"], ["curriculum", "drafts"]])
def test_a_run_uses_them_and_resumes_with_the_same_weights(make_config, tmp_path, enabled):
    """``stored_uses: 1`` against the default is a switch that changes what is trained on."""

    def run(folder, steps, resume=False, **curriculum):
        options = {"enabled": enabled, "curriculum": {"least_gain": 0, "rare_share": 0, **curriculum}}
        config = make_config(
            max_steps=steps,
            rollout={"num_generations": 2, "prompts_per_step": 8},
            accelerators=options,
            task={"reward": "conftest:even"},
        )
        trainer = Trainer(config, tmp_path / folder, console=Console(quiet=True), resume=resume)
        trainer.run()
        return [p.detach().clone() for p in trainer.policy.model.parameters()]

    whole = run("whole", 8)
    run("parts", 5)
    rest = run("parts", 8, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, rest))
    rows = read_metrics(tmp_path / "whole")[1:]
    assert sum(row["curriculum/stored_answers"] for row in rows) > 0
    without = run("without", 8, stored_share=0)
    assert any(not torch.equal(a, b) for a, b in zip(whole, without))


def test_rarity_is_of_the_first_groups():
    rarity, wrong = Rarity(0.5), answer(0, accuracy=0.0)
    for _ in range(FIRST // 2):
        assert not rarity.known and not rarity.rare
        decided = rarity.count([[wrong, wrong], [wrong, answer(0)]])
    assert decided and rarity.known and rarity.rare
    assert rarity.words().startswith("64 of the first 128 groups had no right answer: right answers are rare here")
    assert not rarity.count([[answer(0)]] * 99) and rarity.groups == FIRST
    other = Rarity(0.51)
    other.load_state_dict(rarity.state_dict())
    assert other.known and not other.rare and "a share below 0.51: right answers are not rare here" in other.words()
    assert Rarity(0).rare and not Rarity(0).count([[wrong]])


def test_where_right_answers_are_not_rare_a_run_is_plain_training(make_config, tmp_path, monkeypatch):
    """Before it is known they are not used either; what is decided is in the checkpoint."""
    monkeypatch.setattr("python_trainer.accelerators.curriculum.rare.FIRST", 16)

    def run(folder, steps, resume=False, **accelerators):
        config = make_config(
            max_steps=steps,
            rollout={"num_generations": 2, "prompts_per_step": 8},
            accelerators=accelerators,
            task={"reward": "conftest:even"},
        )
        lines = io.StringIO()
        trainer = Trainer(config, tmp_path / folder, console=Console(file=lines, width=300), resume=resume)
        trainer.run()
        used = [row["curriculum/stored_answers"] for row in read_metrics(tmp_path / folder)[1:] if accelerators]
        return [p.detach().clone() for p in trainer.policy.model.parameters()], used, lines.getvalue(), trainer

    def curriculum(share, **options):
        return {"enabled": ["curriculum"], "curriculum": {"rare_share": share, **options}}

    plain, *_ = run("plain", 8)
    declined, used, told, trainer = run("declined", 8, **curriculum(1.0))
    assert all(torch.equal(a, b) for a, b in zip(plain, declined)) and not any(used)
    assert "of the first 16 groups had no right answer, a share below 1: right answers are not rare here" in told
    (accelerator,) = trainer.accelerators
    assert not len(accelerator.stored)
    rare = curriculum(0.01, least_gain=0)
    whole, used, told, _ = run("whole", 8, **rare)
    assert not any(used[:1]) and any(used[1:]), "decided after the second step"
    assert told.count("right answers are rare here, and trained on again") == 1
    run("parts", 1, **rare)
    run("parts", 4, resume=True, **rare)
    rest, *_ = run("parts", 8, resume=True, **rare)
    assert all(torch.equal(a, b) for a, b in zip(whole, rest))


def test_checkpoints_of_before_always_used_them():
    context = SimpleNamespace(prompts=[[1]] * 4, output_dir=Path(), console=None)
    before, after = (Curriculum(CurriculumSettings(database=None)) for _ in range(2))
    before.begin(context)
    state = before.state_dict()
    del state["rarity"]
    after.load_state_dict(state)
    assert after.rare and not before.rare
