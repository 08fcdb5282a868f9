"""RPO: the policy generates only the last part of an answer, after a prefix of an answer from an earlier visit.

:mod:`rlkernels.history.suffixes` has the method, "suffix rollouts" of arXiv 2601.19404, and its differences from the
paper. Further differences here (``preset: paper`` undoes the last one, and brings the paper's length reward):

- New tokens are limited by ``max_completion_length`` alone, so that answers need not shrink.
- Only right answers are remembered, and the prefix itself is not trained on.
"""

import time
from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import torch

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.settings import RPOSettings
from python_trainer.data import Group, Rollout, by_group, filter_scores, has_spread, select_good
from rlkernels.history.suffixes import SuffixMemory, length_factors

FILL_BATCH = 256  # answers generated at a time


def is_complete(rollout: Rollout) -> bool:
    """Return whether an answer has an end, so that it can be cut."""
    return rollout.finish_reason != "length" and bool(rollout.response_ids)


class RPO(Accelerator):
    """Give groups a prefix from the memory of answers, and fill the memory."""

    settings: RPOSettings

    def __init__(self, settings: RPOSettings):
        super().__init__(settings)
        self.as_in_paper = settings.preset == "paper"
        paper = {"min_cut_share": 0.0, "whole_share": 0.0}
        shares = paper if self.as_in_paper else {"whole_share": settings.whole_share}
        self.memory = SuffixMemory(cut_share=settings.cut_share, cut_tokens=settings.cut_tokens, **shares)
        self.judged = True
        self.counted_step = 0
        self.counts = Counter[str]()

    def begin(self, run: RunContext) -> None:
        """Let the first policy answer every prompt, and again those without an answer to remember."""
        attempts = self.settings.fill or int(self.as_in_paper)
        if not attempts:
            return
        start = time.perf_counter()
        total = len(run.prompts)
        answers = self.memory.answers
        for attempt in range(attempts):
            prompts = [prompt for prompt in range(total) if prompt not in answers]
            for first in range(0, len(prompts), FILL_BATCH):
                for rollout in run.answer(prompts[first : first + FILL_BATCH], attempt):
                    # a single answer has no group mean to beat, so accept it if the task has no right and wrong
                    good = rollout.right or rollout.filter_score is not None
                    if is_complete(rollout) and (good or self.as_in_paper):
                        answers[rollout.prompt_index] = list(rollout.response_ids)
        seconds = time.perf_counter() - start
        run.note(f"rpo: first answers to {len(answers)} of {total} prompts remembered, {seconds:.1f} s")

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        for group in groups:
            if not group.prefix_ids:
                group.prefix_ids = self.memory.draw_prefix(group.prompt_index, context.seed, group.max_new_tokens)
                group.max_new_tokens -= len(group.prefix_ids)
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """Shape and remember groups, with the answers that other accelerators mixed in."""
        if self.judged and any(rollout.filter_score is not None for rollout in rollouts):
            self.judged = False  # rewards take the place of accuracies
            self.memory.forget_scores()
        groups = by_group(rollout for rollout in rollouts if rollout.success_rate is None).values()
        self.report(context, groups)
        for group in groups:
            if self.as_in_paper:
                rewarded = [rollout for rollout in group if rollout.reward > 0]
                for rollout, factor in zip(rewarded, length_factors([len(r.response_ids) for r in rewarded])):
                    rollout.reward *= factor
            candidates = [r for r in (group if self.as_in_paper else select_good(group)) if is_complete(r)]
            answers = [rollout.response_ids for rollout in candidates]
            rewards = [rollout.reward for rollout in candidates]
            self.memory.remember(group[0].prompt_index, context.seed, answers, rewards)
        return rollouts

    def report(self, context: StepContext, groups: Iterable[list[Rollout]]) -> None:
        """Report on all rounds of the step so far, before any of these groups is remembered."""
        if context.step != self.counted_step:
            self.counted_step = context.step
            self.counts = Counter()
        whole_scores: list[float] = []
        for group in groups:
            prefix = group[0].prefix_len
            fresh = [rollout for rollout in group if rollout.importance_cap is None]  # the others are stored answers
            if self.memory.is_whole(group[0].prompt_index, context.seed):
                whole_scores.append(fmean(filter_scores(fresh)))
            self.counts.update(
                groups=1,
                informative=int(has_spread(group)),
                continued=int(prefix > 0),
                prefix_tokens=prefix,
                given=prefix * len(fresh),
                tokens=sum(len(rollout.response_ids) for rollout in fresh),
            )
        self.memory.watch(context.step, whole_scores)
        counts = self.counts
        num_groups = max(counts["groups"], 1)
        context.telemetry |= {
            "rpo/given_tokens": float(counts["given"]),
            "rpo/hit_rate": counts["continued"] / num_groups,
            "rpo/prefix_share": counts["given"] / max(counts["tokens"], 1),
            "rpo/prefix_tokens": counts["prefix_tokens"] / num_groups,
            "rpo/informative": counts["informative"] / num_groups,
            "rpo/remembered": len(self.memory.answers),
        }

    def after_update(self, context: StepContext) -> None:
        if (fall := self.memory.end_if_worse()) is not None:
            context.run.note(f"rpo: {fall}")

    def state_dict(self) -> dict[str, Any]:
        """Return ``keys`` int64 [N] (prompts), ``lengths`` int64 [N] and all ``ids`` int32, answer after answer."""
        answers = self.memory.answers
        return {
            "keys": torch.tensor(list(answers), dtype=torch.int64),
            "lengths": torch.tensor([len(answer) for answer in answers.values()], dtype=torch.int64),
            "ids": torch.tensor([token for answer in answers.values() for token in answer], dtype=torch.int32),
            "whole": self.memory.whole_scores,
            "best": self.memory.best,
            "ended": self.memory.ended,
            "judged": self.judged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        answers = state["ids"].split(state["lengths"].tolist())
        self.memory.answers = {prompt: ids.tolist() for prompt, ids in zip(state["keys"].tolist(), answers)}
        self.memory.whole_scores = state["whole"]
        self.memory.best = state["best"]
        self.memory.ended = state["ended"]
        self.judged = state["judged"]
