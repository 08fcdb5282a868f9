"""RPO: the policy generates only the last part of an answer, after a prefix of an answer from an earlier visit.

"Suffix rollouts" of arXiv 2601.19404. Changes the objective: the policy learns to finish answers that it (or an
earlier version of it) began. Differences from the paper (``preset: paper`` undoes the last two, and brings the paper's
length reward):

- The cut is drawn once per prompt and step and shared by its group; different cuts would confound the advantages.
- New tokens are limited by ``max_completion_length`` alone, so that answers need not shrink.
- The cache holds token ids, never text: decoding and encoding again would drift. It drops answers that hit the limit:
  a few more tokens do not end them.
- Only right answers are remembered, and the prefix itself is not trained on.
- Short cuts unlearn the part that they skip, and their groups have little spread. So a share of the groups is answered
  whole, cuts have a least length, and cutting ends if whole answers become clearly worse.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable
from statistics import fmean, variance
from typing import Any

import torch

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.settings import RPOSettings
from python_trainer.data import Group, Rollout, by_group, filter_scores, has_spread, select_good
from python_trainer.keyed import keyed_choice, keyed_seed, keyed_unit

FILL_BATCH = 256  # answers generated at a time
LENGTH_ALPHA = 0.01  # steepness of the length reward per token (the paper)
MIN_CUT_SHARE = 0.2  # of an answer
WATCHED_STEPS = 8  # whose whole groups are compared with the best as many steps before
MIN_GROUPS_TO_JUDGE = 16  # whole groups in the watched steps
MAX_FALL = 3.0  # standard errors by which whole answers may fall before cutting ends
BEST_ANSWER_PROBABILITY = 0.5  # of remembering the best answer of a group, and not another one


def length_factors(lengths: list[int], *, alpha: float = LENGTH_ALPHA) -> list[float]:
    """Return max(1 / (1 + exp(-alpha (mean length - length))), 0.5) of the rewarded answers of a group.

    RPO, section 3. Its formula gives wrong answers 0.5 too; the authors' code leaves them without reward, as we do.
    """
    mean = sum(lengths) / max(len(lengths), 1)
    return [0.5 + 0.5 * max(math.tanh(alpha * (mean - length) / 2), 0) for length in lengths]  # the logistic function


def is_complete(rollout: Rollout) -> bool:
    """Return whether an answer has an end, so that it can be cut."""
    return rollout.finish_reason != "length" and bool(rollout.response_ids)


class RPO(Accelerator):
    """A cache of one answer per prompt, which is cut at a random place."""

    settings: RPOSettings

    def __init__(self, settings: RPOSettings):
        super().__init__(settings)
        self.as_in_paper = settings.preset == "paper"
        self.answers: dict[int, list[int]] = {}  # prompt index -> token ids of a whole answer
        self.whole_scores: list[list[float]] = []  # of the watched steps: mean filter scores of the whole groups
        self.best: list[float] = []  # the best mean so far, and the square of its standard error
        self.ended = False  # whether cutting has ended
        self.counted_step = 0
        self.counts = Counter[str]()

    def begin(self, run: RunContext) -> None:
        """Let the first policy answer every prompt, and again those without an answer to remember."""
        attempts = self.settings.fill or int(self.as_in_paper)
        if not attempts:
            return
        start = time.perf_counter()
        total = len(run.prompts)
        for attempt in range(attempts):
            prompts = [prompt for prompt in range(total) if prompt not in self.answers]
            for first in range(0, len(prompts), FILL_BATCH):
                for rollout in run.answer(prompts[first : first + FILL_BATCH], attempt):
                    # a single answer has no group mean to beat, so accept it if the task has no right and wrong
                    good = rollout.right or rollout.filter_score is not None
                    if is_complete(rollout) and (good or self.as_in_paper):
                        self.answers[rollout.prompt_index] = list(rollout.response_ids)
        seconds = time.perf_counter() - start
        run.note(f"rpo: first answers to {len(self.answers)} of {total} prompts remembered, {seconds:.1f} s")

    def is_whole(self, context: StepContext, prompt: int) -> bool:
        """Return whether the group of this prompt generates whole answers in this step, even with one to cut."""
        share = 0.0 if self.as_in_paper else self.settings.whole_share
        return keyed_unit(context.seed, "rpo whole", prompt) < share

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        if self.ended:
            return groups
        for group in groups:
            answer = self.answers.get(group.prompt_index)
            if not answer or group.prefix_ids or self.is_whole(context, group.prompt_index):
                continue
            if len(answer) > group.max_new_tokens:  # the run allowed longer answers before it was resumed
                continue
            cut = self.draw_cut(context, group.prompt_index, len(answer))
            group.prefix_ids = answer[: len(answer) - cut]
            group.max_new_tokens -= len(group.prefix_ids)
        return groups

    def draw_cut(self, context: StepContext, prompt: int, length: int) -> int:
        """Return how many last tokens of an answer of this length are generated anew."""
        longest = min(math.ceil(self.settings.cut_tokens or self.settings.cut_share * length), length)
        shortest = 1 if self.as_in_paper else min(math.ceil(MIN_CUT_SHARE * length), longest)
        return shortest + keyed_seed(context.seed, "rpo cut", prompt) % (longest - shortest + 1)

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """Shape and remember groups, with the answers that other accelerators mixed in."""
        groups = by_group(rollout for rollout in rollouts if rollout.success_rate is None).values()
        self.report(context, groups)
        for group in groups:
            if self.as_in_paper:
                rewarded = [rollout for rollout in group if rollout.reward > 0]
                for rollout, factor in zip(rewarded, length_factors([len(r.response_ids) for r in rewarded])):
                    rollout.reward *= factor
            self.remember(context.seed, group)
        return rollouts

    def report(self, context: StepContext, groups: Iterable[list[Rollout]]) -> None:
        """Report on all rounds of the step so far, before any of these groups is remembered."""
        if context.step != self.counted_step:
            self.counted_step = context.step
            self.counts = Counter()
            self.whole_scores = [*self.whole_scores, []][-WATCHED_STEPS:]
        for group in groups:
            prefix = group[0].prefix_len
            fresh = [rollout for rollout in group if rollout.importance_cap is None]  # the others are stored answers
            if self.is_whole(context, group[0].prompt_index):
                self.whole_scores[-1].append(fmean(filter_scores(fresh)))
            self.counts.update(
                groups=1,
                informative=int(has_spread(group)),
                continued=int(prefix > 0),
                prefix_tokens=prefix,
                given=prefix * len(fresh),
                tokens=sum(len(rollout.response_ids) for rollout in fresh),
            )
        counts = self.counts
        num_groups = max(counts["groups"], 1)
        context.telemetry |= {
            "rpo/given_tokens": float(counts["given"]),
            "rpo/hit_rate": counts["continued"] / num_groups,
            "rpo/prefix_share": counts["given"] / max(counts["tokens"], 1),
            "rpo/prefix_tokens": counts["prefix_tokens"] / num_groups,
            "rpo/informative": counts["informative"] / num_groups,
            "rpo/remembered": len(self.answers),
        }

    def remember(self, seed: int, group: list[Rollout]) -> None:
        """Remember the best answer or, with the rest of the probability, another one (epsilon-greedy)."""
        prompt = group[0].prompt_index
        candidates = group if self.as_in_paper else select_good(group)
        candidates = [rollout for rollout in candidates if is_complete(rollout)]
        if not candidates:
            return
        best_reward = max(rollout.reward for rollout in candidates)
        best = [rollout for rollout in candidates if rollout.reward == best_reward]
        chosen = keyed_choice(best, seed, "rpo best", prompt)
        others = [rollout for rollout in candidates if rollout is not chosen]
        if others and keyed_unit(seed, "rpo greedy", prompt) >= BEST_ANSWER_PROBABILITY:
            chosen = keyed_choice(others, seed, "rpo other", prompt)
        self.answers[prompt] = list(chosen.response_ids)

    def after_update(self, context: StepContext) -> None:
        """End cutting if whole answers have become clearly worse."""
        scores = [score for step in self.whole_scores for score in step]
        if self.ended or len(self.whole_scores) < WATCHED_STEPS or len(scores) < MIN_GROUPS_TO_JUDGE:
            return
        mean = fmean(scores)
        squared_error = variance(scores) / len(scores)
        if self.best and self.best[0] - mean > MAX_FALL * math.sqrt(self.best[1] + squared_error):
            self.ended = True
            fall = f"whole answers fell from {self.best[0]:.3f} to {mean:.3f} (means over {WATCHED_STEPS} steps)"
            context.run.note(f"rpo: {fall}: every answer is generated whole from now on")
        elif not self.best or mean > self.best[0]:
            self.best = [mean, squared_error]

    def state_dict(self) -> dict[str, Any]:
        """Return ``keys`` int64 [N] (prompts), ``lengths`` int64 [N] and all ``ids`` int32, answer after answer."""
        return {
            "keys": torch.tensor(list(self.answers), dtype=torch.int64),
            "lengths": torch.tensor([len(answer) for answer in self.answers.values()], dtype=torch.int64),
            "ids": torch.tensor([token for answer in self.answers.values() for token in answer], dtype=torch.int32),
            "whole": self.whole_scores,
            "best": self.best,
            "ended": self.ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        answers = state["ids"].split(state["lengths"].tolist())
        self.answers = {prompt: ids.tolist() for prompt, ids in zip(state["keys"].tolist(), answers)}
        self.whole_scores = state["whole"]
        self.best = state["best"]
        self.ended = state["ended"]
