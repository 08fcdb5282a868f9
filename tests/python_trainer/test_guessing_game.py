"""The guessing game of the examples, in whole runs."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from conftest import QUIET, merged, train

from python_trainer.config import check_config
from python_trainer.errors import UserError
from python_trainer.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def playing(tiny_policy, monkeypatch):
    """Settings of the guessing game of the examples, of three numbers, for a policy that knows nothing."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    settings = yaml.safe_load((EXAMPLES / "guessing_game.yaml").read_text())
    changes = {
        "max_steps": 3,
        "task": {"numbers": 3, "max_turns": 2},
        "model": {"path": str(tiny_policy), "device": "cpu"},
        "rollout": {"prompts_per_step": 3, "num_generations": 24, "max_completion_length": 12},
        "optimizer": {"learning_rate": 1e-2},
        "save": {"save_steps": 2},
    }
    yield merged(settings, changes)
    sys.modules.pop("guessing_game", None)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def reached(trainer, accuracy):
    """Whether the run has had its steps, or an evaluation of this accuracy."""
    rows = metrics(trainer.folder) if (trainer.folder / "metrics.jsonl").exists() else []
    return trainer.state.step == 120 or any(row.get("eval/accuracy", 0) >= accuracy for row in rows)


class Hidden:
    """The game in which every wrong guess is called too low: made a :class:`Guessing` by the test."""

    def step(self, text):
        said, reward, over = super().step(text)
        return ">" if said else said, reward, over


@pytest.mark.slow
def test_a_game_is_learned_by_what_is_said(playing, tmp_path, monkeypatch):
    """By policies of random weights, the best of which finds what nobody finds without hints, nor itself without them.

    Two guesses of three numbers, all equally frequent: without hints they find two thirds at most, however chosen. Some
    policies stop there, always guessing the same two.
    """
    changes = {"max_steps": 120, "optimizer": {"learning_rate": 4e-3}, "rollout": {"num_generations": 32}}
    changes |= {"algorithm": {"entropy_coef": 0.03}}
    looked = {"samples": 50, "eval_steps": 10}
    settings = merged(playing, changes | {"evaluation": looked})
    for seed in range(1, 6):
        folder = tmp_path / str(seed)
        trainer = Trainer(check_config(settings | {"seed": seed}, source="test"), folder, console=QUIET)
        trainer.finished = partial(reached, trainer, 0.87)
        trainer.run()
        rows = metrics(folder)
        if (best := rows[-1]["eval/accuracy"]) > 0.85:
            break
    steps = [row for row in rows if "reward" in row]
    first = sum(row["reward"] for row in steps[:5]) / 5
    assert first < 0.4 and best > 0.85, (first, best)
    assert steps[-1]["environment/turns"] > 1.2 and all(row["environment/failures"] == 0 for row in steps)
    assert all(row["rewards/found/mean"] == pytest.approx(row["reward"]) for row in steps)

    game = importlib.import_module("guessing_game")
    monkeypatch.setattr(game, "Hidden", type("Hidden", (Hidden, game.Guessing), {}), raising=False)
    blind = merged(settings, {"max_steps": 1, "task": {"environment": "guessing_game:Hidden"}})
    blind = merged(blind, {"model": {"path": str(folder / "model")}, "evaluation": {"samples": 200, "eval_steps": 0}})
    Trainer(check_config(blind, source="test"), tmp_path / "hidden", console=QUIET).run()
    # 600 games: their share is within 0.1 of what it is expected to be, five standard deviations
    assert metrics(tmp_path / "hidden")[0]["eval/accuracy"] < 2 / 3 + 0.1


def test_an_interrupted_game_goes_on_as_if_nothing_had_been(playing, tmp_path):
    def weights(trainer):
        return torch.cat([p.detach().flatten() for p in trainer.policy.model.parameters()])

    config = check_config(playing, source="test")
    whole = train(config, tmp_path / "whole")
    part = config.model_copy(update={"max_steps": 2})
    Trainer(part, tmp_path / "part", console=QUIET).run()
    resumed = train(config, tmp_path / "part", resume=True)
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accelerators": {"enabled": ["rpo"]}}, "rpo needs task.environment=null, got guessing_game:Guessing, which"),
        ({"accelerators": {"enabled": ["rhyme"]}}, "rhyme needs task.environment=null.* allows drafts, alpha"),
        ({"task": {"environment": "gues"}}, "must be one of module:Class, got 'gues'"),
    ],
)
def test_what_cannot_take_turns_is_refused(playing, changes, message):
    with pytest.raises(UserError, match=message):
        check_config(merged(playing, changes), source="test")
