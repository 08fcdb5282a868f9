"""The guessing game of the examples, in whole runs."""

import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from conftest import QUIET, merged, same, train

from python_trainer.config import check_config
from python_trainer.run_directory import read_metrics
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


def reached(trainer, accuracy):
    """Whether the run has had its steps, or an evaluation of this accuracy."""
    rows = read_metrics(trainer.folder) if (trainer.folder / "metrics.jsonl").exists() else []
    return trainer.state.step == 120 or any(row.get("eval/accuracy", 0) >= accuracy for row in rows)


@pytest.mark.slow
def test_a_game_is_learned_by_what_is_said(playing, tmp_path):
    """By policies of random weights, the best of which finds what nobody finds without hints.

    Two guesses of three numbers, all equally frequent: without hints they find two thirds at most, however chosen. Some
    policies stop there, always guessing the same two.
    """
    changes = {"max_steps": 120, "optimizer": {"learning_rate": 4e-3}, "rollout": {"num_generations": 32}}
    changes |= {"algorithm": {"entropy_coef": 0.03}, "evaluation": {"samples": 50, "eval_steps": 10}}
    settings = merged(playing, changes)
    for seed in range(1, 6):
        folder = tmp_path / str(seed)
        trainer = Trainer(check_config(settings | {"seed": seed}, source="test"), folder, console=QUIET)
        trainer.finished = partial(reached, trainer, 0.87)
        trainer.run()
        rows = read_metrics(folder)
        if (best := rows[-1]["eval/accuracy"]) > 0.85:
            break
    steps = [row for row in rows if "reward" in row]
    first = sum(row["reward"] for row in steps[:5]) / 5
    assert first < 0.4 and best > 0.85, (first, best)
    assert steps[-1]["environment/turns"] > 1.2 and all(row["environment/failures"] == 0 for row in steps)
    assert all(row["rewards/found/mean"] == pytest.approx(row["reward"]) for row in steps)


def test_an_interrupted_game_goes_on_as_if_nothing_had_been(playing, tmp_path):
    config = check_config(playing, source="test")
    whole = train(config, tmp_path / "whole")
    train(config.model_copy(update={"max_steps": 2}), tmp_path / "part")
    assert same(train(config, tmp_path / "part", resume=True), whole)
