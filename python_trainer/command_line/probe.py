"""Difficulty and cost of a task, from answers to a sample of training prompts: ``python -m python_trainer probe``."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from python_trainer.config import Config
from python_trainer.data import Rollout, by_group
from python_trainer.errors import UserError
from python_trainer.run.run_state import device_name, versions
from python_trainer.tasks.prompt_order import prompt_order
from python_trainer.trainer import Trainer
from rlkernels.sampling.keys import keyed_seed

FIRST_PROMPTS = 4  # few, so that a short time is enough
ANSWER_SHARE = 0.6  # of the seconds, for answers; the rest is for an update
Groups = list[list[Rollout]]  # the answers to each prompt


def sample_groups(trainer: Trainer, seconds: float) -> tuple[Groups, dict[str, float], float]:
    """Answer prompts drawn at random until the time is over, in growing numbers up to a step's worth.

    Returns:
        The groups, the seconds that generation and rewards take in a step, and generated tokens per second. The first
        prompts are not timed, if others follow.
    """
    start = time.perf_counter()
    state, settings = trainer.state, trainer.config.rollout
    groups: Groups = []
    num_prompts = len(trainer.prompts.ids["train"])
    order = prompt_order(trainer.config.seed, 0, num_prompts, num_prompts)
    size = FIRST_PROMPTS
    while len(groups) < num_prompts and (not groups or time.perf_counter() - start < seconds):
        requests = trainer.prompts.groups(order[len(groups) : len(groups) + size], len(groups))
        if len(groups) in (0, FIRST_PROMPTS):
            state_before = state.copy()
            num_untimed = len(groups)
        with state.measure("rollout"):
            rollouts = trainer.generate(requests, keyed_seed(trainer.config.seed, "probe"))
        with state.measure("reward"):
            trainer.scorer.score(requests, rollouts)
        for answer in rollouts:
            answer.group += len(groups)
        groups += by_group(rollouts).values()
        size = min(2 * size, settings.prompts_per_step)
    metrics = state.metrics_since(state_before)
    steps = (len(groups) - num_untimed) / settings.prompts_per_step
    step_seconds = {"generation": metrics["time/rollout_s"] / steps, "rewards": metrics["time/reward_s"] / steps}
    return groups, step_seconds, metrics["rollout_tokens_per_second"]


def time_update(trainer: Trainer, groups: Groups) -> float:
    """Return the seconds of an update on a step's worth of answers, by one on the first of these groups."""
    settings = trainer.config.rollout
    answers = [answer for group in groups[: settings.prompts_per_step] for answer in group]
    trainer.engine.sleep()  # as before every update: vLLM holds memory that the update needs
    warm = next((g for g in groups if len({answer.reward for answer in g}) > 1), groups[0])
    trainer.learner.update(warm, 1)  # moments and the like are made once
    start = time.perf_counter()
    trainer.learner.update(answers, 1)
    if trainer.policy.device.type == "cuda":
        torch.cuda.synchronize(trainer.policy.device)
    step_size = settings.prompts_per_step * settings.num_generations
    return (time.perf_counter() - start) * step_size / len(answers)


def probe(config: Config, *, seconds: float = 60.0) -> dict[str, Any]:
    """Answer some training prompts, make one update, and return what ``--json`` writes; leave no files."""
    rollout = config.rollout
    if config.parallel != "none":
        raise UserError(f"probe runs in one process: parallel must be none, got {config.parallel}")
    with TemporaryDirectory() as folder:
        trainer = Trainer(config, Path(folder), label="probe", console=Console(stderr=True))
        trainer.logger.max_steps = 1
        try:
            with trainer.logger.recording():
                groups, step_seconds, tokens_per_second = sample_groups(trainer, ANSWER_SHARE * seconds)
                trainer.logger.log_work(0, 1, "update")
                step_seconds["update"] = time_update(trainer, groups)
        finally:
            trainer.engine.close()
    answers = [answer for group in groups for answer in group]
    size, count = rollout.num_generations, len(groups)
    right = [sum(answer.right for answer in group) for group in groups]
    binary_reward = all(answer.filter_score is None for answer in answers)
    reward_spread = sum(len({answer.reward for answer in group}) > 1 for group in groups) / count
    num_prompts = len(trainer.prompts.ids["train"])
    return {
        "p": [n / size for n in right],
        "prompts": [group[0].prompt_index for group in groups],  # whose p this is, among those that are trained on
        "places": [trainer.task.train[group[0].prompt_index].place for group in groups],
        "mean_p": sum(right) / size / count,
        "group_size": size,
        "judged": binary_reward,
        "spread": sum(0 < n < size for n in right) / count if binary_reward else reward_spread,
        "reward_spread": reward_spread,
        "all_wrong": right.count(0) / count if binary_reward else 0.0,
        "lengths": [sum(len(answer.response_ids) for answer in group) / size for group in groups],
        "mean_length": sum(len(answer.response_ids) for answer in answers) / len(answers),
        "truncated": sum(answer.finish_reason == "length" for answer in answers) / len(answers),
        "tokens_per_second": tokens_per_second,
        "seconds": step_seconds,
        "train_prompts": num_prompts,
        "steps": config.max_steps,
        "epochs": config.max_steps * rollout.prompts_per_step / num_prompts,
        "device": device_name(trainer.policy.device),
        "versions": versions(),
    }


def lines(findings: dict[str, Any]) -> list[str]:
    """Write the findings in words."""
    p, seconds = findings["p"], findings["seconds"]
    step_seconds = sum(seconds.values())
    not_binary = ["nothing is right or wrong in this task: p has no meaning, and groups are compared by rewards"]
    return [
        f"{len(p)} prompts, {findings['group_size']} answers each; p, the share of right ones: mean "
        f"{findings['mean_p']:.3f}",
        *([] if findings["judged"] else not_binary),
        f"groups of {findings['group_size']} with right and wrong answers: {findings['spread']:.1%}; without a right "
        f"one: {findings['all_wrong']:.1%}; without a wrong one: {p.count(1) / len(p):.1%}; with different rewards: "
        f"{findings['reward_spread']:.1%}",
        f"answers: {findings['mean_length']:.0f} tokens, {findings['truncated']:.1%} truncated",
        f"a step of {step_seconds:.1f} s: "
        + ", ".join(f"{name} {part:.1f} s ({part / step_seconds:.0%})" for name, part in seconds.items()),
        f"generation: {findings['tokens_per_second']:,.0f} tokens/s",
        f"epochs: {findings['epochs']:.2f} in {findings['steps']} steps over {findings['train_prompts']} prompts",
    ]
