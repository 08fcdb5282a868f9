"""A compact PPO / GRPO trainer on rlkernels: ``python -m python_trainer --help``."""
