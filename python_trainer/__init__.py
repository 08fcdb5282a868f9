"""A compact PPO / GRPO trainer on rlkernels: ``python -m python_trainer --help``."""

import rlkernels._waiting  # noqa: F401 before torch
