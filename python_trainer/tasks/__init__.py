"""Tasks: prompts to train and test on, and how answers are judged."""

from python_trainer.tasks.base import Example, RewardFunction, Task
from python_trainer.tasks.config import TaskConfig
from python_trainer.tasks.load import load_task

__all__ = ["Example", "RewardFunction", "Task", "TaskConfig", "load_task"]
