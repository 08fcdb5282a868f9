"""What a training step is made of, as plain data: prompts, groups of answers to come, completions, scored answers."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, str]]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class Example:
    """One prompt and whatever columns its reward functions need."""

    prompt: str | Messages  # plain text, or chat messages for the tokenizer's template
    columns: dict[str, Any] = field(default_factory=dict)  # answer, difficulty, ...


@dataclass
class PlannedGroup:
    """One prompt of a step and how its group of answers is to be generated."""

    example: Example
    prompt_key: int  # index of the prompt in the task's training set
    prompt_ids: list[int]
    num_samples: int
    max_new_tokens: int  # new tokens, after the prefix
    sample_id: int  # noise key of the first sample; sample j uses sample_id + j
    prefix_ids: list[int] = field(default_factory=list)  # the start of the answer, shared by the whole group


@dataclass
class Completion:
    """The tokens that were generated for one sample, the EOS token included when there is one."""

    ids: list[int]
    logprobs: list[float]  # log-probability of each token under the distribution it was sampled from
    finish_reason: str  # "stop" (EOS or stop string) or "length"


@dataclass
class Rollout:
    """One answer, scored."""

    prompt_key: int
    group: int  # index of its group in the step
    prompt_ids: list[int]
    response_ids: list[int]  # prefix and generated tokens
    prefix_len: int  # how many of response_ids were given, not generated
    logprobs: list[float]  # sampler's log-probabilities of the generated tokens: response_ids[prefix_len:]
    finish_reason: str
    text: str  # the decoded response
    reward: float  # shaped reward that advantages are made of
    rewards: dict[str, float | None]  # raw value of every reward function
    accuracy: float  # raw task accuracy, 0 or 1; filters use this, never the shaped reward
    policy_version: int = 0
    importance_cap: float | None = None  # of a stored answer: truncates its importance weights; None: fresh
    # False for each token of response_ids that others wrote (tool output, the user's next turn): context and nothing
    # else, whatever stands in logprobs for it; None: all tokens are the policy's. Accelerators do not keep it.
    response_mask: list[bool] | None = None


def by_group(rollouts: Iterable[Rollout]) -> dict[int, list[Rollout]]:
    """The answers of each group, in their order."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return groups
