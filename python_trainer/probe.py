"""What training would meet, by answers to a sample of training prompts: ``python -m python_trainer probe``."""

import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from python_trainer.config import Config
from python_trainer.data import Rollout
from python_trainer.errors import UserError
from python_trainer.keyed import keyed_seed, prompt_order
from python_trainer.run_state import device_name, versions
from python_trainer.trainer import Trainer

FIRST_PROMPTS = 4  # so that a short time is enough
SHARE = 0.6  # of the seconds, for answers; the rest is for an update
Groups = list[list[Rollout]]  # the answers to each prompt


def sample_groups(trainer: Trainer, seconds: float) -> tuple[Groups, dict[str, float], float]:
    """Answers prompts drawn at random until the time is over, in growing numbers up to a step's worth.

    Returns:
        The groups, the seconds that generation and rewards take in a step, and generated tokens per second. The first
        prompts are not timed, if others follow.
    """
    begun, state, settings = time.perf_counter(), trainer.state, trainer.config.rollout
    groups: Groups = []
    train, tries, size = len(trainer.prompts.ids["train"]), settings.num_generations, FIRST_PROMPTS
    order = prompt_order(trainer.config.seed, 0, train, train)
    while len(groups) < train and (not groups or time.perf_counter() - begun < seconds):
        requests = trainer.prompts.groups(order[len(groups) : len(groups) + size], len(groups))
        if len(groups) in (0, FIRST_PROMPTS):
            before, untimed = asdict(state), len(groups)
        with state.measure("rollout"):
            rollouts = trainer.generate(requests, keyed_seed(trainer.config.seed, "probe"))
        with state.measure("reward"):
            trainer.scorer.score(requests, rollouts)
        for answer in rollouts:
            answer.group += len(groups)
        groups += [rollouts[i : i + tries] for i in range(0, len(rollouts), tries)]
        size = min(2 * size, settings.prompts_per_step)
    spent, steps = state.metrics_since(before), (len(groups) - untimed) / settings.prompts_per_step
    of_a_step = {"generation": spent["time/rollout_s"] / steps, "rewards": spent["time/reward_s"] / steps}
    return groups, of_a_step, spent["rollout_tokens_per_second"]


def time_update(trainer: Trainer, groups: Groups) -> float:
    """Returns the seconds of an update on a step's worth of answers, by one on the first of these groups."""
    settings = trainer.config.rollout
    part = [answer for group in groups[: settings.prompts_per_step] for answer in group]
    trainer.engine.sleep()  # as before every update: vLLM holds the memory that this one takes
    warm = next((g for g in groups if len({answer.reward for answer in g}) > 1), groups[0])
    trainer.learner.update(warm, 1)  # moments and the like are made once
    begun = time.perf_counter()
    trainer.learner.update(part, 1)
    if trainer.policy.device.type == "cuda":
        torch.cuda.synchronize(trainer.policy.device)
    return (time.perf_counter() - begun) * settings.prompts_per_step * settings.num_generations / len(part)


def probe(config: Config, *, seconds: float = 60.0) -> dict[str, Any]:
    """Answers some training prompts, makes one update, and returns what ``--json`` writes; keeps nothing."""
    rollout = config.rollout
    if config.parallel != "none":
        raise UserError(f"probe runs in one process: parallel must be none, got {config.parallel}")
    with TemporaryDirectory() as folder:
        trainer = Trainer(config, Path(folder), label="probe", console=Console(stderr=True))
        trainer.logger.max_steps = 1
        try:
            with trainer.logger.recording():
                groups, parts, speed = sample_groups(trainer, SHARE * seconds)
                trainer.logger.log_work(0, 1, "update")
                parts["update"] = time_update(trainer, groups)
        finally:
            trainer.engine.close()
    answers, size, count = [answer for group in groups for answer in group], rollout.num_generations, len(groups)
    right = [sum(answer.accuracy > 0.5 for answer in group) for group in groups]
    judged = all(answer.merit is None for answer in answers)  # else nothing is right or wrong
    differ = sum(len({answer.reward for answer in group}) > 1 for group in groups) / count
    train = len(trainer.prompts.ids["train"])
    return {
        "p": [n / size for n in right],
        "prompts": [group[0].prompt_key for group in groups],  # whose p this is: indices in the training set
        "mean_p": sum(right) / size / count,
        "group_size": size,
        "judged": judged,
        "spread": sum(0 < n < size for n in right) / count if judged else differ,
        "reward_spread": differ,
        "all_wrong": right.count(0) / count if judged else 0.0,
        "lengths": [sum(len(answer.response_ids) for answer in group) / size for group in groups],
        "mean_length": sum(len(answer.response_ids) for answer in answers) / len(answers),
        "truncated": sum(answer.finish_reason == "length" for answer in answers) / len(answers),
        "tokens_per_second": speed,
        "seconds": parts,
        "train_prompts": train,
        "steps": config.max_steps,
        "epochs": config.max_steps * rollout.prompts_per_step / train,
        "device": device_name(trainer.policy.device),
        "versions": versions(),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Writes the findings in words."""
    p, seconds = found["p"], found["seconds"]
    whole = sum(seconds.values())
    unjudged = ["nothing is right or wrong in this task: p has no meaning, and groups are compared by rewards"]
    return [
        f"{len(p)} prompts, {found['group_size']} answers each; p, the share of right ones: mean {found['mean_p']:.3f}",
        *([] if found["judged"] else unjudged),
        f"groups of {found['group_size']} with right and wrong answers: {found['spread']:.1%}; without a right one: "
        f"{found['all_wrong']:.1%}; without a wrong one: {p.count(1) / len(p):.1%}; with different rewards: "
        f"{found['reward_spread']:.1%}",
        f"answers: {found['mean_length']:.0f} tokens, {found['truncated']:.1%} truncated",
        f"a step of {whole:.1f} s: " + ", ".join(f"{n} {s:.1f} s ({s / whole:.0%})" for n, s in seconds.items()),
        f"generation: {found['tokens_per_second']:,.0f} tokens/s",
        f"epochs: {found['epochs']:.2f} in {found['steps']} steps over {found['train_prompts']} prompts",
    ]
