"""What a run writes into the retrospective database: facts about it, its steps, and a few right answers of each."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.rhyme.records import RunFacts, StepRecord, StoredAnswer, prompt_key
from python_trainer.accelerators.rhyme.sketch import sketch_of
from python_trainer.data import Rollout, fresh_ones, good_ones
from python_trainer.keyed import keyed_seed

STORED_OF_GROUP = 2  # most right answers of a group that are stored at each visit


def run_facts(context: StepContext, fingerprint: str) -> RunFacts:
    """Of the run whose step this is; the fingerprint is that of its tokenizer."""
    return RunFacts(
        family=str(context.policy.model.config.model_type),
        parameters=sum(p.numel() for p in context.policy.model.parameters()),
        tokenizer=fingerprint,
        task=context.task.name,
        **context.facts,
    )


class Shown(NamedTuple):
    """What the answers of a step show of the policy."""

    reward: float  # mean
    accuracy: float  # mean
    sketch: dict[str, torch.Tensor]  # as of :func:`sketch_of`


class GatheredStep:
    """The fresh answers of a step, and what is stored of them, over all rounds of dynamic sampling.

    Answers that go on from a given beginning say little of what the policy can do: what is shown is that of the others.
    Where there are none it is that of the step before, and in the first one of all.
    """

    def __init__(self) -> None:
        self.step = 0
        self.groups: list[list[Rollout]] = []
        self.kept: list[StoredAnswer] = []
        self.shown: Shown | None = None  # so far
        self.before: Shown | None = None  # by the steps before

    def add(
        self, context: StepContext, groups: Sequence[list[Rollout]], kept: Sequence[StoredAnswer]
    ) -> tuple[StepRecord, list[StoredAnswer]]:
        """A round -> the step as far as it has come, and all that is stored of it."""
        if context.step != self.step:
            self.step, self.groups, self.kept, self.before = context.step, [], [], self.shown
        self.groups += groups
        self.kept += kept
        fresh = [rollout for group in self.groups for rollout in group]
        begun = [answers for group in self.groups if (answers := fresh_ones(group))]
        self.shown = shown_by(begun) if begun else self.before or shown_by(self.groups)
        record = StepRecord(
            self.step,
            fresh[0].policy_version,
            *self.shown,
            sum(len(r.logprobs) for r in fresh),
            outcomes_of(context, self.groups),
        )
        return record, self.kept


def shown_by(groups: Sequence[Sequence[Rollout]]) -> Shown:
    answers = [rollout for group in groups for rollout in group]
    return Shown(fmean(r.reward for r in answers), fmean(r.accuracy for r in answers), sketch_of(groups))


def outcomes_of(context: StepContext, groups: Sequence[Sequence[Rollout]]) -> dict[str, torch.Tensor]:
    """How many answers to each prompt there were, and how many right ones, see :class:`StepRecord`."""
    whole = [fresh for group in groups if (fresh := fresh_ones(group))]
    if not whole or any(answer.merit is not None for group in whole for answer in group):
        return {}
    keys = b"".join(bytes.fromhex(prompt_key(context.task.train[group[0].prompt_key].prompt)) for group in whole)
    return {
        "prompts": torch.frombuffer(bytearray(keys), dtype=torch.uint8).reshape(len(whole), -1),
        "answers": torch.tensor([len(group) for group in whole], dtype=torch.int32),
        "right": torch.tensor([sum(answer.accuracy > 0.5 for answer in group) for group in whole], dtype=torch.int32),
    }


def right_answers(
    context: StepContext, groups: Sequence[Sequence[Rollout]], run_id: int, fingerprint: str
) -> list[StoredAnswer]:
    """Of each group a few different good ones, see :func:`good_ones`; best reward first, then at random."""
    kept = []
    for number, fresh in enumerate(groups):
        right = {r.text: r for r in good_ones(fresh) if r.response_ids}
        draw = {text: keyed_seed(context.seed, "rhyme store", number, text) for text in right}
        order = sorted(right, key=lambda text: (-right[text].reward, draw[text]))
        for rollout in (right[text] for text in order[:STORED_OF_GROUP]):
            kept.append(
                StoredAnswer(
                    run_id,
                    context.step,
                    rollout.policy_version,
                    prompt_key(context.task.train[rollout.prompt_key].prompt),
                    rollout.text,
                    rollout.finish_reason == "stop",
                    rollout.reward,
                    list(rollout.response_ids),
                    [float("nan")] * rollout.prefix_len + list(rollout.logprobs),
                    fingerprint,
                )
            )
    return kept
