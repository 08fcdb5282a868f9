"""RPO: only the last part of an answer is generated, after a prefix of an answer from an earlier visit.

"Suffix rollouts" of arXiv 2601.19404. Changes the objective: the policy learns to finish answers that it (or an
earlier version of it) began. What differs from the paper (``preset: paper`` undoes the last two, and brings the paper's
length reward):

- The cut is drawn once per prompt and step and shared by its group; different cuts would confound the advantages.
- New tokens are limited by ``max_completion_length`` alone, so that answers need not shrink.
- Token ids are kept, never text: decoding and encoding again would drift. Answers that hit the limit are not kept:
  a few tokens do not bring them to an end.
- Only right answers are remembered, and the prefix itself is not trained on.
- Short cuts unlearn what they do not train, and their groups agree: a share of the groups is answered whole, cuts have
  a least length, and cutting ends if whole answers become clearly worse.
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
from python_trainer.data import Group, Rollout, by_group, good_ones, merits
from python_trainer.keyed import keyed_choice, keyed_seed, keyed_unit

FILL_BATCH = 256  # answers generated at a time
LENGTH_ALPHA = 0.01  # steepness of the length reward per token (the paper)
LEAST_CUT = 0.2  # of an answer
WATCHED = 8  # steps whose whole groups are compared with the best as many steps before
ENOUGH = 16  # of these groups, to know how good they are
CLEAR = 3.0  # standard errors of a fall that ends all cuts
FACTS = "whole", "best", "ended"  # in checkpoints as they are
EPSILON = 0.5  # chance that the best answer of a group is remembered, and not another one


def length_factors(lengths: list[int], *, alpha: float = LENGTH_ALPHA) -> list[float]:
    """Returns max(1 / (1 + exp(-alpha (mean length - length))), 0.5) of the rewarded answers of a group.

    RPO, section 3. Its formula gives wrong answers 0.5 too; the authors' code leaves them without reward, as we do."""
    mean = sum(lengths) / max(len(lengths), 1)
    return [0.5 + 0.5 * max(math.tanh(alpha * (mean - length) / 2), 0) for length in lengths]  # the logistic function


def complete(rollout: Rollout) -> bool:
    return rollout.finish_reason != "length" and bool(rollout.response_ids)


class RPO(Accelerator):
    """A cache of one answer per prompt, cut at a random place."""

    settings: RPOSettings

    def __init__(self, settings: RPOSettings):
        super().__init__(settings)
        self.as_in_paper = settings.preset == "paper"
        self.answers: dict[int, list[int]] = {}  # prompt key -> token ids of a whole answer
        self.whole: list[list[float]] = []  # mean merits of the groups drawn to be whole, of the last steps
        self.best: list[float] = []  # the best mean so far, and the square of its standard error
        self.ended = False  # whether cuts have ended
        self.counted_step, self.counts = 0, Counter[str]()

    def begin(self, run: RunContext) -> None:
        """Asks the first policy for an answer to every prompt, and again where there is none to remember."""
        if not (tries := self.settings.fill or int(self.as_in_paper)):
            return
        start, total = time.perf_counter(), len(run.prompts)
        for attempt in range(tries):
            keys = [key for key in range(total) if key not in self.answers]
            for first in range(0, len(keys), FILL_BATCH):
                for rollout in run.answer(keys[first : first + FILL_BATCH], attempt):
                    right = rollout.accuracy > 0.5 or rollout.merit is not None  # which no group can be the mean of
                    if complete(rollout) and (right or self.as_in_paper):
                        self.answers[rollout.prompt_key] = list(rollout.response_ids)
        seconds = time.perf_counter() - start
        run.note(f"rpo: first answers to {len(self.answers)} of {total} prompts remembered, {seconds:.1f} s")

    def is_drawn(self, context: StepContext, key: int) -> bool:
        """Tells whether the group of this prompt is to be whole in this step, whatever is remembered."""
        share = 0.0 if self.as_in_paper else self.settings.whole_share
        return keyed_unit(context.seed, "rpo whole", key) < share

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        for group in [] if self.ended else groups:
            key, answer = group.prompt_key, self.answers.get(group.prompt_key)
            # the run may have allowed longer answers before it was resumed
            fits = answer and not group.prefix_ids and len(answer) <= group.max_new_tokens
            if answer and fits and not self.is_drawn(context, key):
                longest = min(math.ceil(self.settings.cut_tokens or self.settings.cut_share * len(answer)), len(answer))
                least = 1 if self.as_in_paper else min(math.ceil(LEAST_CUT * len(answer)), longest)
                cut = least + keyed_seed(context.seed, "rpo cut", key) % (longest - least + 1)
                group.prefix_ids = answer[: len(answer) - cut]
                group.max_new_tokens -= len(group.prefix_ids)
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """Shapes and remembers whole groups, with what others have mixed in."""
        groups = by_group(rollout for rollout in rollouts if rollout.expected is None).values()
        self.report(context, groups)
        for group in groups:
            if self.as_in_paper:
                rewarded = [rollout for rollout in group if rollout.reward > 0]
                for rollout, factor in zip(rewarded, length_factors([len(r.response_ids) for r in rewarded])):
                    rollout.reward *= factor
            self.remember(context.seed, group)
        return rollouts

    def report(self, context: StepContext, groups: Iterable[list[Rollout]]) -> None:
        """Sums up the step so far, of all rounds of dynamic sampling, before any of these groups is remembered."""
        if context.step != self.counted_step:
            self.counted_step, self.counts = context.step, Counter()
            self.whole = [*self.whole, []][-WATCHED:]
        for group in groups:
            prefix = group[0].prefix_len
            fresh = [rollout for rollout in group if rollout.importance_cap is None]  # others come from a store
            if self.is_drawn(context, group[0].prompt_key):
                self.whole[-1].append(fmean(merits(fresh)))
            self.counts.update(
                groups=1,
                informative=int(len(set(merits(group))) > 1),  # merits differ
                continued=int(prefix > 0),
                prefix_tokens=prefix,
                given=prefix * len(fresh),
                tokens=sum(len(rollout.response_ids) for rollout in fresh),
            )
        counts, size = self.counts, max(self.counts["groups"], 1)
        context.telemetry |= {
            "rpo/given_tokens": float(counts["given"]),
            "rpo/hit_rate": counts["continued"] / size,
            "rpo/prefix_share": counts["given"] / max(counts["tokens"], 1),
            "rpo/prefix_tokens": counts["prefix_tokens"] / size,
            "rpo/informative": counts["informative"] / size,
            "rpo/remembered": len(self.answers),
        }

    def remember(self, seed: int, group: list[Rollout]) -> None:
        """Remembers the best answer with probability epsilon, otherwise one of the others (epsilon-greedy)."""
        key, worth = group[0].prompt_key, group if self.as_in_paper else good_ones(group)
        options = [rollout for rollout in worth if complete(rollout)]
        if not options:
            return
        best = max(rollout.reward for rollout in options)
        chosen = keyed_choice([rollout for rollout in options if rollout.reward == best], seed, "rpo best", key)
        others = [rollout for rollout in options if rollout is not chosen]
        if others and keyed_unit(seed, "rpo greedy", key) >= EPSILON:
            chosen = keyed_choice(others, seed, "rpo other", key)
        self.answers[key] = list(chosen.response_ids)

    def after_update(self, context: StepContext) -> None:
        """Ends all cuts once whole answers are clearly worse than they were."""
        means = [mean for step in self.whole for mean in step]
        if self.ended or len(self.whole) < WATCHED or len(means) < ENOUGH:
            return
        mean, error = fmean(means), variance(means) / len(means)
        if self.best and self.best[0] - mean > CLEAR * math.sqrt(self.best[1] + error):
            self.ended = True
            fell = f"whole answers fell from {self.best[0]:.3f} to {mean:.3f} (means over {WATCHED} steps)"
            context.run.note(f"rpo: {fell}: every answer is generated whole from now on")
        elif not self.best or mean > self.best[0]:
            self.best = [mean, error]

    def state_dict(self) -> dict[str, Any]:
        """Returns ``keys`` int64 [N], ``lengths`` int64 [N] and all ``ids`` int32, one answer after the other."""
        return {
            "keys": torch.tensor(list(self.answers), dtype=torch.int64),
            "lengths": torch.tensor([len(answer) for answer in self.answers.values()], dtype=torch.int64),
            "ids": torch.tensor([token for answer in self.answers.values() for token in answer], dtype=torch.int32),
            **{name: getattr(self, name) for name in FACTS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = state["ids"].split(state["lengths"].tolist())
        self.answers = {key: part.tolist() for key, part in zip(state["keys"].tolist(), parts)}
        vars(self).update({name: state[name] for name in FACTS})
