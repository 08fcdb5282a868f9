"""Scores rollouts: the task's rewards, and rewards shaped as the advantages see them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from python_trainer.algorithms.advantages import overlong_penalties
from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.data import Example, Group, Messages, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.run_state import RunState
from python_trainer.tasks.base import Task
from python_trainer.tasks.rewards import Scores


def shaped_rewards(
    rewards: Sequence[float], responses: Sequence[Sequence[int]], config: AlgorithmConfig, longest: int
) -> list[float]:
    """Subtract from each reward the penalty of its answer's length (``algorithm.overlong_cache``).

    Args:
        responses: token ids of each answer.
        longest: most tokens that an answer may have.
    """
    cache = config.overlong_cache
    if cache is None:
        return list(rewards)
    penalties = overlong_penalties(torch.tensor([len(ids) for ids in responses]), max_length=longest, cache=cache)
    return [r + p for r, p in zip(rewards, penalties.tolist(), strict=True)]


class Scorer:
    """Scores the answers of a run.

    Args:
        state: its ``judged`` turns False once the rewards show that answers are not simply right or wrong.
        decode: token ids -> text.
        longest: most tokens that an answer may have.
    """

    def __init__(
        self,
        task: Task,
        ranks: RankGroup,
        state: RunState,
        *,
        decode: Callable[[Sequence[int]], str],
        algorithm: AlgorithmConfig,
        longest: int,
    ):
        self.task, self.ranks, self.state = task, ranks, state
        self.decode, self.algorithm, self.longest = decode, algorithm, longest

    def score(self, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> None:
        """Fills in text, rewards and accuracy of every rollout; rollouts come in the order of their groups."""
        owners = [(number, group) for number, group in enumerate(groups) for _ in range(group.num_samples)]
        texts = [self.decode(rollout.response_ids) for rollout in rollouts]
        examples = [rollout.judged(group.example) for rollout, (_, group) in zip(rollouts, owners, strict=True)]
        completions = [rollout.said(text) for rollout, text in zip(rollouts, texts)]
        scores = self.shaped(examples, completions, [r.response_ids for r in rollouts])
        for i, (rollout, (number, group)) in enumerate(zip(rollouts, owners, strict=True)):
            rollout.group, rollout.prompt_key, rollout.text = number, group.prompt_key, texts[i]
            rollout.reward, rollout.accuracy = scores.total[i], scores.accuracy[i]
            rollout.merit = None if scores.merit is None else scores.merit[i]
            rollout.rewards = {name: values[i] for name, values in scores.rewards.items()}

    def shaped(
        self, examples: Sequence[Example], completions: Sequence[str | Messages], ids: Sequence[Sequence[int]]
    ) -> Scores:
        """Returns the scores of answers, with ``total`` shaped as the advantages see it."""
        scores = self.raw(examples, completions, ids)
        return replace(scores, total=shaped_rewards(scores.total, ids, self.algorithm, self.longest))

    def raw(
        self, examples: Sequence[Example], completions: Sequence[str | Messages], ids: Sequence[Sequence[int]]
    ) -> Scores:
        """Returns the task's own scores of answers.

        ``merit`` is set from the first batch on whose rewards show that answers are not simply right or wrong.
        """
        scores = self.ranks.score(self.task, examples, completions, ids)
        self.state.judged &= scores.merit is None
        return replace(scores, merit=None if self.state.judged else scores.total)
