"""What a training step is made of, as plain data: prompts, groups of answers to come, answers."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Messages = list[dict[str, str]]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class Example:
    """One prompt and whatever columns its reward functions need."""

    prompt: str | Messages  # plain text, or chat messages for the tokenizer's template
    columns: dict[str, Any] = field(default_factory=dict)  # answer, difficulty, ...
    place: str = field(default="", compare=False)  # file:line that it is from, for messages


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
    """A request for the answers to one prompt of a step, which are judged against each other."""

    example: Example
    prompt_key: int  # index of the prompt in the task's training set


@dataclass
class Episode:
    """What an environment made of an answer."""

    turns: int = 0  # of the policy
    reward: float = 0.0  # sum over its steps
    failure: str = ""  # why the environment could not go on; empty where it could
    messages: Messages = field(default_factory=list)  # in a chat: what was said after the prompt


@dataclass
class Rollout:
    """One answer, from the engine to the loss.

    An engine makes it and fills the first part; the trainer fills the second when it has scored the answer.
    """

    prompt_ids: Sequence[int]
    response_ids: list[int]  # the given prefix, then what was generated, the end token included when there is one
    prefix_len: int = 0  # how many of response_ids were given
    logprobs: list[float] = field(default_factory=list)  # of the generated tokens, where they were drawn from
    finish_reason: str = ""  # "stop" (end token or stop string) or "length"; empty while it is being generated
    policy_version: int = 0  # of the engine, when the answer was begun
    # False for each token of response_ids that others wrote (tool output, the user's next turn): context and nothing
    # else, whatever stands in logprobs for it; None: all tokens are the policy's. Accelerators do not keep it.
    response_mask: list[bool] | None = None
    episode: Episode | None = None  # None: no environment

    prompt_key: int = -1  # as of its Group
    group: int = 0  # index of its group in the step
    text: str = ""  # the decoded response
    reward: float = 0.0  # shaped reward that advantages are made of
    rewards: dict[str, float | None] = field(default_factory=dict)  # raw value of every reward function
    accuracy: float = 0.0  # raw task accuracy, 0 or 1; filters use this, never the shaped reward
    merit: float | None = None  # the raw reward, which they use where a task has no right and wrong; else None
    importance_cap: float | None = None  # of a stored answer: truncates its importance weights; None: fresh
    expected: float | None = None  # chance of being right that a stored answer is judged against; None: its group

    @property
    def ids(self) -> list[int]:
        """The generated tokens."""
        return self.response_ids[self.prefix_len :]

    @property
    def written(self) -> int:
        """How many tokens the policy has generated."""
        return len(self.logprobs) if self.response_mask is None else sum(self.response_mask[self.prefix_len :])

    def become(self, copy: "Rollout") -> None:
        """Takes over what another process has generated in its copy."""
        self.response_ids, self.logprobs, self.finish_reason = copy.response_ids, copy.logprobs, copy.finish_reason
        self.response_mask, self.episode = copy.response_mask, copy.episode

    def said(self, text: str) -> str | Messages:
        """The completion that reward functions get, where ``text`` is all of the response."""
        return self.episode.messages if self.episode and self.episode.messages else text

    def judged(self, example: Example) -> Example:
        """The example, with what the environment says of this answer as a further column."""
        if self.episode is None:
            return example
        return replace(example, columns=example.columns | {"environment_reward": self.episode.reward})


def fresh_ones(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Those that the policy has just begun and finished by itself."""
    return [rollout for rollout in rollouts if rollout.importance_cap is None and not rollout.prefix_len]


def merits(answers: Iterable[Rollout]) -> list[float]:
    """What filters compare: accuracies, or raw rewards where nothing is right or wrong."""
    return [answer.accuracy if answer.merit is None else answer.merit for answer in answers]


def good_ones(answers: Sequence[Rollout]) -> list[Rollout]:
    """Of a group those that are right, or where nothing is right or wrong those of more than the mean raw reward."""
    if all(answer.merit is None for answer in answers):
        return [answer for answer in answers if answer.accuracy > 0.5]
    worth = merits(answers)
    mean = statistics.mean(worth)  # exact: no answer of a group without spread is above it
    return [answer for answer, merit in zip(answers, worth) if merit > mean]


def by_group(rollouts: Iterable[Rollout]) -> dict[int, list[Rollout]]:
    """The answers of each group, in their order."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return groups
