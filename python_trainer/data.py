"""The plain data of a training step: examples, requests and rollouts."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

Messages = list[dict[str, str]]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class Example:
    """One prompt, with the columns that its reward functions need."""

    prompt: str | Messages  # plain text, or chat messages for the tokenizer's template
    columns: dict[str, Any] = field(default_factory=dict)  # answer, difficulty, ...
    place: str = field(default="", compare=False)  # file:line of its source, for messages


@dataclass
class Request:
    """One prompt to continue, ``num_samples`` times.

    Sample ``j`` draws its noise with sample id ``sample_id + j``, so give requests ids ``num_samples`` apart.
    """

    prompt_ids: Sequence[int]
    prefix_ids: Sequence[int] = field(default_factory=list)  # the start of the answer, kept as it is
    num_samples: int = 1
    max_new_tokens: int = 256  # after the prefix
    sample_id: int = 0


@dataclass(kw_only=True)
class Group(Request):
    """The request for one prompt of a step; its answers are judged against each other."""

    example: Example
    prompt_key: int  # index of the prompt in the task's training set


@dataclass
class Episode:
    """The record of an answer with an environment."""

    turns: int = 0  # of the policy
    reward: float = 0.0  # sum over its steps
    failure: str = ""  # why the environment failed; empty if it did not
    messages: Messages = field(default_factory=list)  # in a chat: the messages after the prompt


@dataclass(eq=False)
class Rollout:
    """One answer, from the engine to the loss.

    The engine makes it and fills the first part; the scorer fills the second. Each is equal to itself alone.
    """

    prompt_ids: Sequence[int]
    response_ids: list[int]  # the given prefix, then what was generated, the end token included when there is one
    prefix_len: int = 0  # how many of response_ids were given
    # of the generated tokens, under softmax(logits / temperature) before top-k and top-p, as in the loss; NaN: unknown
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""  # "stop" (end token or stop string) or "length"; empty while it is being generated
    # False for each token of response_ids that others wrote (tool output, the user's next turn): context only, and its
    # entry in logprobs is ignored; None: all tokens are the policy's. Accelerators do not keep it.
    response_mask: list[bool] | None = None
    episode: Episode | None = None  # None: no environment

    prompt_key: int = -1  # as of its Group
    group: int = 0  # index of its group in the step
    text: str = ""  # the decoded response
    reward: float = 0.0  # shaped reward, which the advantages use
    rewards: dict[str, float | None] = field(default_factory=dict)  # raw value of each reward function
    accuracy: float = 0.0  # raw task accuracy, 0 or 1; filters use this, never the shaped reward
    merit: float | None = None  # raw reward, which filters use if the task has no right and wrong; else None
    importance_cap: float | None = None  # of a stored answer: truncates its importance weights; None: fresh
    expected: float | None = None  # chance of being right that a stored answer is judged against; None: its group

    @property
    def ids(self) -> list[int]:
        """Returns the generated tokens."""
        return self.response_ids[self.prefix_len :]

    @property
    def own_ids(self) -> list[int]:
        """Returns the tokens that the policy has generated, without those of an environment."""
        mask = self.response_mask or [True] * len(self.response_ids)
        return [token for token, own in list(zip(self.response_ids, mask))[self.prefix_len :] if own]

    @property
    def written(self) -> int:
        """Returns how many tokens the policy has generated."""
        return len(self.written_logprobs)

    @property
    def written_logprobs(self) -> list[float]:
        """Returns the log-probabilities of the tokens that the policy has generated."""
        mask = self.response_mask
        return self.logprobs if mask is None else list(compress(self.logprobs, mask[self.prefix_len :]))

    @property
    def said(self) -> str | Messages:
        """Returns the completion for reward functions: the messages of a chat with an environment, else the text."""
        return self.episode.messages if self.episode and self.episode.messages else self.text

    def judged(self, example: Example) -> Example:
        """Returns the example, with the environment's reward as a further column."""
        if self.episode is None:
            return example
        return replace(example, columns=example.columns | {"environment_reward": self.episode.reward})


def fresh_ones(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Returns the rollouts that the current policy generated from their first token on."""
    return [rollout for rollout in rollouts if rollout.importance_cap is None and not rollout.prefix_len]


def merits(answers: Iterable[Rollout]) -> list[float]:
    """Returns the numbers that filters compare: accuracies, or raw rewards if nothing is right or wrong."""
    return [answer.accuracy if answer.merit is None else answer.merit for answer in answers]


def good_ones(answers: Sequence[Rollout]) -> list[Rollout]:
    """Returns the right answers of a group; if nothing is right or wrong, those above the mean raw reward."""
    if all(answer.merit is None for answer in answers):
        return [answer for answer in answers if answer.accuracy > 0.5]
    worth = merits(answers)
    mean = statistics.mean(worth)  # exact: no answer of a group without spread is above it
    return [answer for answer, merit in zip(answers, worth) if merit > mean]


def by_group(rollouts: Iterable[Rollout]) -> dict[int, list[Rollout]]:
    """Returns the answers by group, in their order."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return groups
