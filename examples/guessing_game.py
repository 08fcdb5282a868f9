"""A game for an answer of several turns: find a number by guessing, told each time whether it is higher or lower.

From the root of the repository, with the policy that ships with the package:

    cd examples && python -m python_trainer train --config guessing_game.yaml --output-dir runs/guessing
"""

from pydantic import Field

from python_trainer.data import Example
from python_trainer.environment import Environment
from python_trainer.tasks import Task, TaskSettings
from python_trainer.tasks.rewards import environment_reward


class Guessing(Environment):
    """A turn ends with a digit (``rollout.stop``), which is the guess; it is answered with ``>`` or ``<``."""

    def reset(self, example):
        self.secret = example.columns["secret"]
        return example.prompt

    def step(self, text):
        guess = int(text[-1]) if text[-1:].isdigit() else 0
        if guess == self.secret:
            return "", 1.0, True
        return (">" if guess < self.secret else "<"), 0.0, False


class GuessingSettings(TaskSettings):
    """Every number once, to train on and to test on: the prompt does not tell them apart."""

    name: str = "guessing_game:GuessingSettings"
    numbers: int = Field(7, ge=1, le=9)
    """How many there are; three guesses find one of 7, if each halves what is left, and two one of 3."""

    def load(self) -> Task:
        examples = [Example("?", {"secret": number}) for number in range(1, self.numbers + 1)]
        return Task("guessing", examples, examples, {"found": environment_reward})
