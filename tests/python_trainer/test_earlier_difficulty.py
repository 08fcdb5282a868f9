"""How hard prompts were to earlier runs, and what a run makes of it."""

import pytest
import torch
from test_curriculum import answers

from python_trainer.accelerators.curriculum import difficulty
from python_trainer.accelerators.curriculum.difficulty import difficulties, visits
from python_trainer.accelerators.curriculum.outcomes import Outcomes
from python_trainer.accelerators.rhyme.records import prompt_key
from python_trainer.errors import UserError

KEYS = [prompt_key(f"prompt {i}") for i in range(160)]
EASE = 2 * torch.randn(len(KEYS), generator=torch.Generator().manual_seed(7), dtype=torch.float64)  # logits


def draw(prompts, ability, generator):
    """Right ones of 8 answers to each of these prompts."""
    return torch.binomial(torch.full((len(prompts),), 8.0).double(), (ability + EASE[prompts]).sigmoid(), generator)


def earlier_run(prompts, ability, rise=0.0, steps=60, seed=0):
    """The outcomes of a run of the synthetic policy: 16 prompts a step, in random order."""
    generator, trajectory = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        asked = torch.tensor(prompts)[torch.randperm(len(prompts), generator=generator)[:16]]
        right = draw(asked, ability + rise * step / steps, generator)
        names = torch.tensor([list(bytes.fromhex(KEYS[i])) for i in asked.tolist()], dtype=torch.uint8)
        trajectory.append({"prompts": names, "answers": torch.full((16,), 8), "right": right.int()})
    return trajectory


def predict(earlier, epochs=3):
    """A new run that asks all prompts in turn -> mean squared error of what it expected in each epoch, its beliefs."""
    outcomes, generator = Outcomes([10] * len(KEYS), memory=60), torch.Generator().manual_seed(3)
    if earlier is not None:
        outcomes.know(earlier)
    errors, step = torch.zeros(epochs, dtype=torch.float64), 0
    for epoch in range(epochs):
        for keys in torch.randperm(len(KEYS), generator=generator).split(16):
            outcomes.advance(step := step + 1)
            right = draw(keys, -1.5, generator)
            errors[epoch] += (outcomes.p(keys) - right / 8).square().sum() / len(KEYS)
            for key, count in zip(keys.tolist(), right.tolist(), strict=True):
                outcomes.learn(answers(key, count))
    return errors.tolist(), outcomes


def test_difficulty_is_relative_to_what_a_run_can_do():
    """Of two runs, one weak and one able, that asked prompts of their own and some in common."""
    runs = [earlier_run(list(range(100)), -2.0, rise=3.0), earlier_run(list(range(60, 150)), 2.0, seed=1)]
    found = difficulties(runs, KEYS, 60)
    assert torch.corrcoef(torch.stack([found[:150], EASE[:150]]))[0, 1] > 0.9
    assert abs((found - EASE)[:60].mean() - (found - EASE)[100:150].mean()) < 1.5  # abilities are 4 apart at first
    assert found[150:].tolist() == [0.0] * 10
    twice = difficulties(runs, [*KEYS, *KEYS], 60)
    assert torch.equal(twice, torch.cat([found, found]))
    assert difficulties(runs, [prompt_key("another")], 60) is None and difficulties([], KEYS, 60) is None
    assert difficulties([[{}, {}]], KEYS, 60) is None


def test_what_is_near_the_start_of_a_run_counts(monkeypatch):
    """Of two halves of which one says the opposite of the other."""
    first, second = earlier_run(list(range(160)), 0.0), earlier_run(list(range(160)), 0.0, seed=1)
    for outcomes in second:
        outcomes["right"] = outcomes["answers"] - outcomes["right"]
    found = difficulties([first + second], KEYS, 20)
    assert torch.corrcoef(torch.stack([found, EASE]))[0, 1] > 0.8
    assert torch.corrcoef(torch.stack([difficulties([second + first], KEYS, 20), EASE]))[0, 1] < -0.8
    monkeypatch.setattr(difficulty, "MOST", 16 * 60)
    assert torch.equal(difficulties([first + second], KEYS, 20), difficulties([first], KEYS, 20))


def test_first_visits_are_predicted_and_noise_is_not_believed():
    earlier = difficulties([earlier_run(list(range(160)), -2.0, rise=3.0, steps=120)], KEYS, 60)
    alone, _ = predict(None)
    informed, outcomes = predict(earlier)
    assert informed[0] < 0.5 * alone[0] and informed[1] < alone[1]
    assert 0.7 < outcomes.best.w[-1] < 1.4
    shuffled = earlier[torch.randperm(len(KEYS), generator=torch.Generator().manual_seed(1))]
    misled, outcomes = predict(shuffled)
    assert all(after < 1.1 * before for after, before in zip(misled, alone, strict=True))
    assert abs(outcomes.best.w[-1]) < 0.25
    against, outcomes = predict(-earlier)  # what was easy is hard
    assert against[1] < alone[1] and outcomes.best.w[-1] < -0.7


def test_what_was_known_is_in_the_state():
    earlier = difficulties([earlier_run(list(range(160)), -1.0)], KEYS, 60)
    _, outcomes = predict(earlier, epochs=1)
    again = Outcomes([10] * len(KEYS), memory=60)
    again.load_state_dict(outcomes.state_dict())
    for beliefs in (outcomes, again):
        beliefs.advance(20)
        beliefs.learn(answers(5, 3))
    assert torch.equal(again.p(torch.arange(160)), outcomes.p(torch.arange(160)))
    assert torch.equal(again.earlier, earlier)


def test_damaged_outcomes_are_refused():
    whole = earlier_run(list(range(16)), 0.0, steps=1)[0]
    assert len(list(visits(whole))) == 16
    for damaged in (
        {"answers": whole["answers"]},
        whole | {"right": whole["right"][:3]},
        whole | {"prompts": whole["prompts"].float()},
        whole | {"prompts": torch.tensor(3)},
        whole | {"right": whole["right"] + 9},
    ):
        with pytest.raises(UserError, match="outcomes in the retrospective database are damaged"):
            list(visits(damaged))
