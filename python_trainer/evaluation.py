"""Evaluation: its settings, the prompts of a test set, and what the answers to them say."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field, model_validator

from python_trainer.data import Example
from python_trainer.settings import Section
from python_trainer.tasks.base import Task
from python_trainer.tasks.rewards import Scores


class EvaluationSampling(Section):
    """How test prompts are answered; always with the same noise."""

    temperature: float = Field(1.0, ge=0)
    """Softmax temperature; 0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Most tokens of an answer; null: rollout.max_completion_length."""
    samples: int = Field(1, ge=1)
    """Answers to each prompt; the accuracy is the mean over all of them."""
    pass_at: list[Annotated[int, Field(ge=1)]] = Field([])
    """Report pass@k for these k: how often at least one of k answers is right, estimated from all samples."""

    @model_validator(mode="after")
    def there_are_as_many_samples(self) -> "EvaluationSampling":
        if self.pass_at and max(self.pass_at) > self.samples:
            raise ValueError(f"samples must be >= {max(self.pass_at)} with pass_at {self.pass_at}, got {self.samples}")
        return self


class NamedSet(EvaluationSampling):
    """One more test set."""

    task: dict[str, Any] = Field({})
    """Settings of its task: those of the run's task, with these in their place, {test_path: FILE} for example; with
    another `name` none but these."""


class EvaluationConfig(EvaluationSampling):
    """Accuracy on the test set."""

    eval_steps: int = Field(0, ge=0)
    """Evaluate every so many steps, and after a first step that began with answers of earlier runs; 0: only before the
    first and after the last step."""
    eval_limit: int | None = Field(None, ge=1)
    """Test prompts in evaluations at the start and at the end, of each set; null for all."""
    eval_limit_during: int | None = Field(512, ge=1)
    """Test prompts in evaluations in between, of each set."""
    target_accuracy: float | None = Field(None, gt=0, le=1)
    """Note when an evaluation reaches this accuracy: seconds_to_target, tokens_to_target."""
    stop_at_target: bool = False
    """End the run there; needs target_accuracy and eval_steps."""
    sets: dict[str, NamedSet] = Field({})
    """More test sets by name, each with sampling of its own: metrics eval/NAME/accuracy and so on."""

    @model_validator(mode="after")
    def target_is_looked_for(self) -> "EvaluationConfig":
        if self.stop_at_target and self.target_accuracy is None:
            raise ValueError("stop_at_target needs target_accuracy, got null")
        if self.stop_at_target and not self.eval_steps:
            raise ValueError("stop_at_target needs eval_steps above 0, got 0")
        return self


# metrics of all test sets, and how often each prompt of the task's own was answered right
Evaluated = tuple[Mapping[str, float], Sequence[float]]


@dataclass(frozen=True)
class PromptSet:
    """Prompts to be answered and judged."""

    name: str  # what the noise is keyed by
    task: Task
    examples: Sequence[Example]
    prompts: Sequence[Sequence[int]]  # their token ids
    sampling: EvaluationSampling


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that one of ``k`` answers at least is right, without bias (Chen et al. 2021, arXiv 2107.03374).

    Args:
        samples: answers that were judged, at least ``k``.
        right: how many of them were right.
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def by_prompt(values: Sequence[float], samples: int) -> list[float]:
    """The mean over the ``samples`` answers to each prompt, which come one after the other."""
    return [fmean(values[i : i + samples]) for i in range(0, len(values), samples)]


def metrics_of(scores: Scores, sampling: EvaluationSampling) -> dict[str, float]:
    """``accuracy``, ``reward`` (raw) and ``pass@k`` of the answers to a test set."""
    size = sampling.samples
    counts = [round(share * size) for share in by_prompt(scores.accuracy, size)]
    passed = {f"pass@{k}": fmean(pass_at_k(size, right, k) for right in counts) for k in sampling.pass_at}
    return {"accuracy": fmean(scores.accuracy), "reward": fmean(scores.total)} | passed
