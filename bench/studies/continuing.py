"""An accelerator of the study of answers continued: answers go on where the policy leaves those of the visit before.

A prompt's sample keeps its random numbers from visit to visit, and the engine checks the earlier answer as one draft.
It stands up to the first token that the numbers no longer draw; all tokens are those that the numbers draw of the
present policy, and so are their log-probabilities.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from python_trainer.accelerators.base import Accelerator, StepContext
from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.data import Group, Rollout, by_group
from python_trainer.keyed import keyed_seed
from python_trainer.rollout.decoding import Decoding
from python_trainer.rollout.drafting import Drafter


class EarlierAnswers(Drafter):
    """Offers all that is left of an earlier answer, as long as the new one is the same.

    Args:
        answers: tokens by sample id.
    """

    def __init__(self, answers: Mapping[int, list[int]]):
        self.answers, self.news = dict(answers), ()

    def start(self, samples: Sequence[Decoding]) -> None: ...

    def draft(self, samples: Sequence[Decoding], budget: int) -> None:
        for sample in samples:
            if (answer := self.answers.get(sample.sample_id)) is None:
                continue
            done = sample.rollout.response_ids
            if answer[: len(done)] != done:
                del self.answers[sample.sample_id]
                continue
            count = min(budget, sample.max_new_tokens - sample.drawn - 1)
            sample.draft = answer[len(done) : len(done) + count]
            budget -= len(sample.draft)

    def learn(self, samples: Sequence[Decoding], accepted: Sequence[int], new: Sequence[Sequence[int]]) -> None: ...

    def stop(self, samples: Sequence[Decoding]) -> None: ...

    def close(self) -> None: ...


class Continued(Accelerator):
    """Attributes: answers: to each prompt those of its last visit, as tokens."""

    settings: "ContinuedSettings"

    def __init__(self, settings: "ContinuedSettings"):
        super().__init__(settings)
        self.answers: dict[int, list[list[int]]] = {}
        self.before: dict[str, float] = {}  # the engine's counters when the step began

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        self.before = context.engine.stats
        if self.settings.reuse:
            context.seed = keyed_seed(context.facts["settings"]["seed"], "continued")  # instead of that of the step
            for group in groups:
                group.sample_id = group.prompt_key * group.num_samples
            context.engine.drafter = EarlierAnswers({
                group.sample_id + i: answer
                for group in groups for i, answer in enumerate(self.answers.get(group.prompt_key, ()))
            })  # fmt: skip
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        context.engine.drafter = None  # evaluations have prompts of their own
        if self.settings.reuse:
            for group in by_group(rollouts).values():
                self.answers[group[0].prompt_key] = [list(answer.response_ids) for answer in group]
        spent = {name: count - self.before[name] for name, count in context.engine.stats.items()}
        context.telemetry |= {
            "continued/forward_passes": spent["forward_passes"],
            "continued/taken_over": spent["accepted_tokens"],
        }
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        return {"answers": self.answers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.answers = state["answers"]


class ContinuedSettings(AcceleratorSettings):
    """Settings of answers continued."""

    name = "continued"
    accelerator = "bench.studies.continuing:Continued"

    reuse: bool = True
    """False: plain training, whose forward passes are counted."""
