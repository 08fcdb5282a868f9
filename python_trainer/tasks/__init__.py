"""Tasks: prompts to train and test on, and how answers are judged."""

from python_trainer.data import Example
from python_trainer.tasks.base import RewardFunction, Task
from python_trainer.tasks.load import load_task
from python_trainer.tasks.settings import TaskConfig

__all__ = ["Example", "RewardFunction", "Task", "TaskConfig", "load_task"]
