"""Score answers by the rewards of their task: the rollouts of a step, stored answers, and answers to test sets."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from python_trainer.algorithms.advantages import overlong_penalties
from python_trainer.config import Config
from python_trainer.data import Example, Group, Messages, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.loop.prompts import Prompts, PromptSet
from python_trainer.tasks.base import Task
from python_trainer.tasks.rewards import Scores, score


class Scorer:
    """Scores the answers of a run.

    Args:
        prompts: of the task that is trained on. ``judged`` of their run state turns False once the rewards show that
            the task has no right and wrong.
    """

    def __init__(self, config: Config, prompts: Prompts, ranks: RankGroup):
        self.config = config
        self.prompts = prompts
        self.ranks = ranks
        self._failure_noted = False

    def score(self, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> None:
        """Fill in text, rewards and accuracy of every rollout; rollouts come in the order of their groups."""
        scores = self.score_raw(self.prompts.split("train"), groups, rollouts)
        rewards = self.apply_length_penalty(scores.total, [rollout.response_ids for rollout in rollouts])
        for i, rollout in enumerate(rollouts):
            rollout.reward = rewards[i]
            rollout.accuracy = scores.accuracy[i]
            rollout.filter_score = None if scores.filter_scores is None else scores.filter_scores[i]
            rollout.rewards = {name: values[i] for name, values in scores.rewards.items()}

    def score_stored(self, examples: Sequence[Example], texts: Sequence[str], ids: Sequence[Sequence[int]]) -> Scores:
        """Return the scores of stored answers to training prompts, with ``total`` as the advantages see it."""
        scores = self._score_on_ranks(self.prompts.task, examples, texts, ids)
        return replace(scores, total=self.apply_length_penalty(scores.total, ids))

    def apply_length_penalty(self, rewards: Sequence[float], responses: Sequence[Sequence[int]]) -> list[float]:
        """Add to each reward the penalty of its answer's length, at most 0 (``algorithm.overlong_cache``)."""
        cache = self.config.algorithm.overlong_cache
        if cache is None:
            return list(rewards)
        lengths = torch.tensor([len(ids) for ids in responses])
        limit = self.config.rollout.max_completion_length
        penalties = overlong_penalties(lengths, max_length=limit, cache=cache)
        return [reward + penalty for reward, penalty in zip(rewards, penalties.tolist(), strict=True)]

    def score_raw(self, prompt_set: PromptSet, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> Scores:
        """Return the scores of rollouts by the task alone, and fill in their texts, groups and prompts.

        Reward functions get the prompts of the set as the policy saw them.
        """
        self._label(groups, rollouts)
        failed = next((r.episode for r in rollouts if r.episode and r.episode.failure), None)
        if failed and not self._failure_noted:
            self._failure_noted = True
            self.prompts.note(
                f"the environment {self.config.task.environment} failed in turn {failed.turns} of an answer, which "
                f"ends there: {failed.failure}; environment/failures counts such answers"
            )
        seen = [replace(group.example, prompt=prompt_set.opened[group.prompt_index]) for group in groups]
        examples = [rollout.with_environment_reward(seen[rollout.group]) for rollout in rollouts]
        completions = [rollout.completion for rollout in rollouts]
        ids = [rollout.response_ids for rollout in rollouts]
        return self._score_on_ranks(prompt_set.task, examples, completions, ids)

    def _label(self, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> None:
        """Fill in text, group and prompt of rollouts that come in the order of their groups."""
        numbered = [(number, group) for number, group in enumerate(groups) for _ in range(group.num_generations)]
        for rollout, (number, group) in zip(rollouts, numbered, strict=True):
            rollout.text = self.prompts.policy.decode(rollout.response_ids)
            rollout.group = number
            rollout.prompt_index = group.prompt_index

    def _score_on_ranks(
        self,
        task: Task,
        examples: Sequence[Example],
        completions: Sequence[str | Messages],
        ids: Sequence[Sequence[int]],
    ) -> Scores:
        """Return scores; each rank scores a part of the answers.

        ``filter_scores`` are set if the task has no right and wrong.
        """
        ranks = self.ranks
        bounds = [_group_start(examples, rank * len(examples) // ranks.size) for rank in range(ranks.size + 1)]
        part = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
        rank_scores: list[Scores] = []  # one, or none of no answers
        with ranks.fail_together():
            if examples[part]:
                timeout = self.config.task.reward_seconds
                rank_scores.append(score(task, examples[part], completions[part], ids[part], timeout=timeout))
        parts = list(chain.from_iterable(ranks.gather(rank_scores)))
        binary = all(scores.filter_scores is None for scores in parts)
        if task is self.prompts.task:
            if not binary:
                self._note_unjudged()
            binary = self.prompts.state.judged
        rewards = {name: [x for scores in parts for x in scores.rewards[name]] for name in task.reward_functions}
        total = [x for scores in parts for x in scores.total]
        accuracy = [x for scores in parts for x in scores.accuracy]
        return Scores(rewards, total, accuracy, None if binary else total)

    def _note_unjudged(self) -> None:
        """Record, and print once, that the rewards of the task do not tell right from wrong."""
        if self.prompts.state.judged:
            self.prompts.state.judged = False
            self.prompts.note(
                "an answer got a reward that is neither 0 nor 1: no answer is right or wrong, dynamic sampling and "
                "accelerators compare rewards, and eval/accuracy is the share above 0.5; a reward function that gives "
                "0 or 1 may come first in task.reward (weight 0 leaves the reward as it is)"
            )


def _group_start(examples: Sequence[Example], index: int) -> int:
    """Move ``index`` forward to the next example boundary: one rank judges all answers to an example."""
    while 0 < index < len(examples) and examples[index].prompt is examples[index - 1].prompt:
        index += 1
    return index
