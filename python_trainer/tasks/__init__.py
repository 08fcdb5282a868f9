"""Tasks: prompts to train and test on, and how answers are judged."""

from python_trainer.data import Example
from python_trainer.tasks.base import RewardFunction, Task
from python_trainer.tasks.settings import TASKS, TaskSettings

__all__ = ["TASKS", "Example", "RewardFunction", "Task", "TaskSettings"]
