"""RPO: only the last part of an answer is generated, after a prefix of an answer from an earlier visit.

"Suffix rollouts" of arXiv 2601.19404. Changes the objective: the policy learns to finish answers that it (or an
earlier version of it) began. What differs from the paper:

- The first visit to a prompt generates whole answers, instead of one sample of the initial policy beforehand.
- The cut is drawn once per prompt and step and shared by its group; different cuts would confound the advantages.
- New tokens are limited by ``max_completion_length`` alone, so that answers need not shrink.
- Token ids are kept, never text: decoding and encoding again would drift.
"""

import math
from typing import Any, Literal

import torch
from pydantic import Field

from python_trainer.accelerators.base import Accelerator, PlannedGroup, Rollout, Settings, StepContext
from python_trainer.keyed import keyed_choice, keyed_seed, keyed_unit


class RPOSettings(Settings):
    """Suffix rollouts."""

    cut_share: float = Field(1.0, gt=0, le=1)
    """Longest cut as a share of the cached answer; the cut is uniform between one token and this."""
    cut_tokens: int | None = Field(None, ge=1)
    """Longest cut in tokens instead (the paper: 300, 500 or 800)."""
    epsilon: float = Field(0.5, ge=0, le=1)
    """Probability that the cache takes the best answer of the group; otherwise it takes another one."""
    length_reward: Literal["none", "correct", "paper"] = "none"
    """Prefer short answers: `correct` scales the reward of right answers only, `paper` lifts wrong ones to 0.5 too."""
    length_alpha: float = Field(0.01, gt=0)
    """Steepness of the length reward per token."""


def length_reward(rewards: list[float], lengths: list[int], *, alpha: float, lift_wrong: bool) -> list[float]:
    """clip(r / (1 + exp(-alpha (mean length - length))), 0.5, 1) for one group (RPO, section 3).

    With ``lift_wrong`` False the clip applies to the factor, so that a reward of 0 stays 0.
    """
    mean = sum(lengths) / max(len(lengths), 1)
    factors = [0.5 * (1 + math.tanh(alpha * (mean - length) / 2)) for length in lengths]  # the logistic function
    if lift_wrong:
        return [min(max(reward * factor, 0.5), 1.0) for reward, factor in zip(rewards, factors)]
    return [reward * max(factor, 0.5) for reward, factor in zip(rewards, factors)]


class RPO(Accelerator):
    """A cache of one answer per prompt, cut at a random place."""

    name = "rpo"
    Settings = RPOSettings
    settings: RPOSettings

    def __init__(self, settings: RPOSettings):
        super().__init__(settings)
        self.answers: dict[int, list[int]] = {}  # prompt key -> token ids of a whole answer

    def cut(self, length: int, seed: int, prompt_key: int) -> int:
        """How many of ``length`` cached tokens to take off: 1 to the longest cut."""
        longest = self.settings.cut_tokens or math.ceil(self.settings.cut_share * length)
        return 1 + keyed_seed(seed, "rpo cut", prompt_key) % min(longest, length)

    def plan(self, context: StepContext, groups: list[PlannedGroup]) -> list[PlannedGroup]:
        for group in groups:
            answer = self.answers.get(group.prompt_key)
            if answer and not group.prefix_ids:
                group.prefix_ids = answer[: len(answer) - self.cut(len(answer), context.seed, group.prompt_key)]
                group.max_new_tokens -= len(group.prefix_ids)
        context.telemetry["rpo/prefix_tokens"] = sum(len(g.prefix_ids) for g in groups) / max(len(groups), 1)
        context.telemetry["rpo/hit_rate"] = sum(bool(g.prefix_ids) for g in groups) / max(len(groups), 1)
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        groups: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        for group in groups.values():
            self.remember(context.seed, group)
            if self.settings.length_reward != "none":
                lengths = [len(r.response_ids) for r in group]
                shaped = length_reward(
                    [r.reward for r in group],
                    lengths,
                    alpha=self.settings.length_alpha,
                    lift_wrong=self.settings.length_reward == "paper",
                )
                for rollout, reward in zip(group, shaped):
                    rollout.reward = reward
        return rollouts

    def remember(self, seed: int, group: list[Rollout]) -> None:
        """Epsilon-greedy: the best answer with probability epsilon, otherwise one of the others."""
        key = group[0].prompt_key
        best = max(rollout.reward for rollout in group)
        top = [rollout for rollout in group if rollout.reward == best]
        chosen = keyed_choice(top, seed, "rpo best", key)
        others = [rollout for rollout in group if rollout is not chosen]
        if others and keyed_unit(seed, "rpo greedy", key) >= self.settings.epsilon:
            chosen = keyed_choice(others, seed, "rpo other", key)
        if chosen.response_ids:
            self.answers[key] = list(chosen.response_ids)

    def state_dict(self) -> dict[str, Any]:
        ids = [token for answer in self.answers.values() for token in answer]
        return {
            "keys": list(self.answers),
            "lengths": [len(answer) for answer in self.answers.values()],
            "ids": torch.tensor(ids, dtype=torch.int32),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = state["ids"].split(state["lengths"])
        self.answers = {key: part.tolist() for key, part in zip(state["keys"], parts)}
