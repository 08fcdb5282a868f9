"""Stored answers, judged by the rewards of the present run."""

from collections.abc import Sequence
from typing import Any

from python_trainer.accelerators.rhyme.records import Sample, prompt_key
from python_trainer.config import Config
from python_trainer.objective import shaped_rewards
from python_trainer.tasks import Task
from python_trainer.tasks.rewards import score


def reward_rules(config: Config) -> dict[str, Any]:
    """What decides the reward of an answer, and whether it is right."""
    algorithm = {name: getattr(config.algorithm, name) for name in ("overlong_cache", "overlong_penalty")}
    return {"task": config.task.model_dump(mode="json"), "longest": config.rollout.max_completion_length, **algorithm}


def judged(samples: Sequence[Sample], task: Task, config: Config) -> list[Sample]:
    """Those that this run calls right, in their order; their rewards become what fresh answers would get.

    Runs of other reward functions, weights or penalties, and an earlier part of a resumed run, have rewards of their
    own scale, which say nothing next to those of fresh answers. Answers that this run could not give are left out: to
    prompts that it does not have, and longer ones than it allows. Reward functions are called with as many answers as
    in a step, which is what their time limit is for.
    """
    examples = {prompt_key(example.prompt): example for example in task.train}
    rollout, right = config.rollout, []
    size = rollout.prompts_per_step * rollout.num_generations
    possible = [s for s in samples if s.prompt_key in examples and len(s.response_ids) <= rollout.max_completion_length]
    for first in range(0, len(possible), size):
        part = possible[first : first + size]
        ids = [sample.response_ids for sample in part]
        scores = score(task, [examples[sample.prompt_key] for sample in part], [sample.text for sample in part], ids)
        for sample, reward, accuracy in zip(part, shaped_rewards(scores.total, ids, config), scores.accuracy):
            sample.reward = reward
            if accuracy > 0.5:
                right.append(sample)
    return right
