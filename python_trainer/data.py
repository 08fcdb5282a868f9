"""The plain data of a training step: examples, requests and rollouts."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, TypeVar

T = TypeVar("T")
Messages = list[dict[str, str]]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class Example:
    """One prompt, with the columns that its reward functions need."""

    prompt: str | Messages  # plain text, or chat messages for the tokenizer's template
    columns: dict[str, Any] = field(default_factory=dict)  # answer, difficulty, ...
    place: str = field(default="", compare=False)  # file:line of its source, for messages


@dataclass
class Request:
    """One prompt to continue, ``num_generations`` times.

    Answer ``j`` draws its noise with sample id ``sample_id + j``, so requests need ids ``num_generations`` apart.
    """

    prompt_ids: Sequence[int]
    prefix_ids: Sequence[int] = field(default_factory=list)  # the start of the answer, which stays as it is
    num_generations: int = 1
    max_new_tokens: int = 256  # after the prefix
    sample_id: int = 0
    stops_from: int = 0  # the first token of the answer in which a stop string may begin


@dataclass(kw_only=True)
class Group(Request):
    """The request for one prompt of a step; its answers are compared with each other."""

    example: Example
    prompt_index: int  # of the prompt in the task's training set


@dataclass
class Episode:
    """The record of an answer with an environment."""

    turns: int = 0  # of the policy
    reward: float = 0.0  # sum over its steps
    failure: str = ""  # why the environment failed; empty if it did not
    messages: Messages = field(default_factory=list)  # in a chat: the messages after the prompt


def is_right(accuracy: float) -> bool:
    """Return whether an answer of this accuracy counts as right."""
    return accuracy > 0.5


@dataclass(eq=False)
class Rollout:
    """One answer, from the engine to the loss.

    The engine makes it and fills the first part; the scorer fills the second. A rollout equals only itself.
    """

    prompt_ids: Sequence[int]
    response_ids: list[int]  # the given prefix, then the generated tokens, with the end token if there is one
    prefix_len: int = 0  # how many of response_ids were given
    # of the generated tokens, under softmax(logits / temperature) before top-k and top-p, as in the loss; NaN: unknown
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""  # "stop" (end token or stop string) or "length"; empty during generation
    # False for each token of response_ids that the policy did not write (tool output, the user's next turn): it is
    # context only, and its entry in logprobs is ignored. None: the policy wrote all tokens. Accelerators drop the mask.
    response_mask: list[bool] | None = None
    episode: Episode | None = None  # None: no environment
    stops_from: int = 0  # as of its Request

    prompt_index: int = -1  # as of its Group
    group: int = 0  # index of its group in the round, from StepSampler.rollouts on in the step
    text: str = ""  # the decoded response
    reward: float = 0.0  # shaped reward, which the advantages use
    rewards: dict[str, float | None] = field(default_factory=dict)  # raw value of each reward function
    accuracy: float = 0.0  # raw task accuracy, 0 or 1; filters use this, never the shaped reward
    filter_score: float | None = None  # raw reward, for filters, if the task has no right and wrong; else None
    importance_cap: float | None = None  # truncates the importance weights of a stored answer; None: a fresh answer
    success_rate: float | None = None  # baseline of a stored answer, in (0, 1); None: its group is the baseline

    @property
    def num_tokens(self) -> int:
        """Return how many tokens prompt and response have."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def ids(self) -> list[int]:
        """Return the generated tokens."""
        return self.response_ids[self.prefix_len :]

    @property
    def policy_ids(self) -> list[int]:
        """Return the tokens that the policy generated, without those of an environment."""
        return self._by_policy(self.ids)

    @property
    def policy_logprobs(self) -> list[float]:
        """Return the log-probabilities of the tokens that the policy generated."""
        return self._by_policy(self.logprobs)

    def _by_policy(self, values: list[T]) -> list[T]:
        """Return the values of those generated tokens that are no environment's."""
        mask = self.response_mask
        return values if mask is None else list(compress(values, mask[self.prefix_len :]))

    @property
    def right(self) -> bool:
        """Return whether the answer is right, in a task that has right and wrong."""
        return is_right(self.accuracy)

    @property
    def completion(self) -> str | Messages:
        """Return the completion for reward functions: the messages of a chat with an environment, else the text."""
        return self.episode.messages if self.episode and self.episode.messages else self.text

    def with_environment_reward(self, example: Example) -> Example:
        """Return the example, with the environment's reward as a further column."""
        if self.episode is None:
            return example
        return replace(example, columns=example.columns | {"environment_reward": self.episode.reward})


def select_fresh(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Return the rollouts that the current policy generated from their first token on."""
    return [rollout for rollout in rollouts if rollout.importance_cap is None and not rollout.prefix_len]


def filter_scores(answers: Iterable[Rollout]) -> list[float]:
    """Return the numbers that filters compare: accuracies, or raw rewards if the task has no right and wrong."""
    return [answer.accuracy if answer.filter_score is None else answer.filter_score for answer in answers]


def select_good(answers: Sequence[Rollout]) -> list[Rollout]:
    """Return the right answers of a group; if the task has no right and wrong, those above the mean raw reward."""
    if all(answer.filter_score is None for answer in answers):
        return [answer for answer in answers if answer.right]
    scores = filter_scores(answers)
    mean = statistics.mean(scores)  # exact: no answer of a group without spread is above it
    return [answer for answer, score in zip(answers, scores) if score > mean]


def has_spread(answers: Iterable[Rollout]) -> bool:
    """Return whether the filter scores of a group differ: else no answer has an advantage."""
    return len(set(filter_scores(answers))) > 1


def by_group(rollouts: Iterable[Rollout]) -> dict[int, list[Rollout]]:
    """Return the answers by group, in their order."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return groups
