"""Curriculum: rare right answers are trained on more than once, and prompts may be chosen by what they can teach.

A group whose answers are all right or all wrong teaches nothing; most groups of a real training set are. How often each
prompt is answered right by the present policy is believed from what the run has shown (:mod:`.outcomes`). Right answers
to prompts that are hardly ever answered right are trained on again (:mod:`.stored`) where that is so of most prompts
(:mod:`.rare`), those of better runs at first (:mod:`.earlier`).

With ``least_gain`` the next prompts may be those whose answers are expected to bring the most signal for their tokens:
the variance of the reward, p (1 - p), over the length. They are drawn, not sorted, so that a batch stays mixed; a floor
keeps all of them in the game. Plain order is left only where a choice is sure to gain. What is chosen is a function of
answers and seed alone: no clock is looked at. Related: DAPO's dynamic sampling (arXiv 2503.14476), which answers all
prompts and throws away groups without a spread; MoPPS (2507.04632), which samples prompts near p = 1/2 by Thompson
sampling, without costs or neighbours.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.curriculum.notes import say
from python_trainer.accelerators.curriculum.outcomes import Outcomes
from python_trainer.accelerators.curriculum.rare import FIRST, Rarity
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.accelerators.curriculum.stored import StoredAnswers, in_batches
from python_trainer.data import Group, Rollout, by_group, fresh_ones, merits
from python_trainer.keyed import keyed_seed

if TYPE_CHECKING:
    from rich.console import Console

    from python_trainer.accelerators.curriculum.earlier import EarlierRuns

CANDIDATES = 4096  # prompts of which the next ones are chosen; of more, so many are drawn
WORLDS = 64  # draws from the beliefs, whose gains tell how sure a gain is
CERTAINTY = 0.95
BINS = 10  # of the expected chance, in the reliability table
KEEP = 0.98  # from step to step, of what chosen groups have brought
SMALLEST = 0.75  # a step of chosen prompts, in steps of plain order: smaller ones throw a run back now and then
PRIOR = 4.0  # groups of the greatest signal that stand for the choice bringing what is expected


class Curriculum(Accelerator):
    """Beliefs about prompts, and what follows from them.

    Attributes:
        table: of all groups by their expected chance: answers, expected right ones, right ones, float64 [BINS, 3].
        signals: expected and seen signal of all chosen groups.
        recent: the same, of the last steps above all.
    """

    settings: CurriculumSettings
    console: "Console | None" = None  # of a run that is resumed

    def begin(self, run: RunContext) -> None:
        self.console = run.console
        self._start([len(prompt) for prompt in run.prompts], run.output_dir)
        if self.earlier is not None:
            self.earlier.reach(run)

    def _start(self, lengths: list[int], folder: Path) -> None:
        self.earlier: EarlierRuns | None = None
        if self.settings.database is not None:
            from python_trainer.accelerators.curriculum import earlier  # imports sqlalchemy

            self.earlier = earlier.runs_of(self.settings, folder)
        self.lengths, self.outcomes = lengths, Outcomes(lengths, self.settings.memory)
        self.table = torch.zeros(BINS, 3, dtype=torch.float64)
        self.signals = torch.zeros(2, dtype=torch.float64)
        self.recent = torch.zeros(2, dtype=torch.float64)
        self.stored = StoredAnswers(self.settings.stored_uses, self.settings.memory)
        self.rarity = Rarity(self.settings.rare_share if self.settings.stored_share else 0)
        self.counted_step, self.left_order = 0, False

    def rehearse(self, context: StepContext) -> list[list[Rollout]]:
        if self.earlier is None:
            return []
        settings, size = self.settings, context.generation.num_generations
        new, rehearses = not self.earlier.begun and self.earlier.begin(context), settings.rehearsals and size > 1
        # what was hard is so no more once its right answers were trained on
        if new and not rehearses and (known := self.earlier.difficulties(context, settings.memory)) is not None:
            self.outcomes.know(known)
        groups = self.earlier.answers(context, settings.rehearsed) if settings.reads and rehearses else []
        for group in groups:
            self.stored.add(group[::-1], context.step)  # the newest last
        most = settings.rehearsal_share * context.max_steps * context.generation.prompts_per_step * size
        batches = in_batches(groups, settings.rehearsal_batch, settings.rehearsals, context.seed)
        batches = [batch for batch, so_far in zip(batches, accumulate(map(len, batches))) if so_far <= most]
        if batches:
            context.telemetry["curriculum/rehearsed_answers"] = sum(map(len, batches))
        return batches

    def choose(self, context: StepContext, count: int) -> list[Group] | None:
        self._enter(context)
        if self.settings.least_gain is None:
            return None
        generator = torch.Generator().manual_seed(keyed_seed(context.seed, "curriculum", context.samples))
        keys = self._candidates(generator)
        signal, cost = self.outcomes.signal(keys), self.outcomes.cost(keys)
        share = self.shares(signal, cost)
        worlds = self.outcomes.signal_draws(keys, WORLDS, generator)
        gains = (worlds @ share) / (cost @ share) / (worlds.mean(1) / cost.mean())
        sure = gains.quantile(1 - CERTAINTY).item() * self.trust()
        self.left_order = sure >= self.settings.least_gain
        context.telemetry |= {"curriculum/expected_gain": gains.mean().item(), "curriculum/sure_gain": sure}
        if not self.left_order:
            return None
        gumbel = -torch.rand(len(keys), generator=generator, dtype=torch.float64).log().neg().log()
        order = (share.log() + gumbel).argsort(descending=True)[:count]
        if self.settings.same_signal:
            enough = int((signal[order].cumsum(0) < count * signal.mean()).sum()) + 1
            order = order[: max(enough, math.ceil(SMALLEST * count))]
        context.telemetry["curriculum/chosen_prompts"] += len(order)
        return context.groups_of(keys[order].tolist())

    def trust(self) -> float:
        """Of the signal that was expected of the groups chosen lately, the share that came; at most 1.

        Chosen are those that too much is expected of. While nothing is chosen, trust comes back.
        """
        if not self.outcomes.judged:  # signals have another unit
            return 1.0
        expected, seen = self.recent.tolist()
        return min((seen + PRIOR / 2) / (expected + PRIOR / 2), 1.0)

    def shares(self, signal: Tensor, cost: Tensor) -> Tensor:
        """How often each candidate is drawn, [K], from its expected signal and tokens; they sum to 1."""
        score = (signal / cost).log()
        chosen = ((score - score.max()) * self.settings.sharpness).exp()
        return (1 - self.settings.floor) * chosen / chosen.sum() + self.settings.floor / len(score)

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        self._enter(context)
        groups = list(by_group(fresh_ones(rollouts)).values())
        if groups:
            self._compare(context, groups)
        for group in groups:
            self.outcomes.learn(group)
        if self.earlier is not None and groups:
            self.earlier.record(context, groups)
        return rollouts

    @property
    def rare(self) -> bool:
        """Whether right answers are trained on again: they are known to be rare, or a better run has left some."""
        return self.rarity.rare or (self.earlier is not None and self.earlier.found > 0)

    def replay(self, context: StepContext, rollouts: Sequence[Rollout]) -> list[Rollout]:
        size, groups = context.generation.num_generations, list(by_group(fresh_ones(rollouts)).values())
        taken = []
        if size > 1 and self.outcomes.judged:
            self._count(groups)
        if size > 1 and self.outcomes.judged and self.rare:
            teaching = sum(len(answer.ids) for group in groups if difference(group) for answer in group)
            taken = self.stored.take(context.step, self.outcomes.p, size, self.settings.stored_share * teaching)
        for group in groups if self.rare or not self.rarity.known else ():
            self.stored.add(group, context.step)
        context.telemetry["curriculum/stored_answers"] += len(taken)
        first = 1 + max((rollout.group for rollout in rollouts), default=-1)
        return [replace(answer, group=first + i) for i, answer in enumerate(taken)]

    def _count(self, groups: Sequence[list[Rollout]]) -> None:
        """Decides whether right answers are rare, once enough groups were seen, and says so."""
        if self.rarity.count(groups) and self.rarity.rare == self.rare:
            say(self.console, self.rarity.words())
            if not self.rare:
                self.stored.clear()  # none of them will be used

    def _enter(self, context: StepContext) -> None:
        """Begins a step, once."""
        if context.step != self.counted_step:
            self.counted_step = context.step
            self.outcomes.advance(context.step)
            self.stored.advance(context.step)
            self.recent *= KEEP
            context.telemetry |= {"curriculum/chosen_prompts": 0.0, "curriculum/stored_answers": 0.0}

    def _candidates(self, generator: torch.Generator) -> Tensor:
        """Numbers of prompts, [K], in order."""
        if len(self.lengths) <= CANDIDATES:
            return torch.arange(len(self.lengths))
        return torch.randint(len(self.lengths), (CANDIDATES,), generator=generator).unique()

    def _compare(self, context: StepContext, groups: list[list[Rollout]]) -> None:
        """Holds what was expected of these groups against what came."""
        keys = torch.tensor([group[0].prompt_key for group in groups])
        expected = self.outcomes.signal(keys)
        if self.outcomes.judged and all(answer.merit is None for group in groups for answer in group):
            chances = self.outcomes.p(keys)
            counts = torch.tensor([[len(group), sum(merits(group))] for group in groups], dtype=torch.float64)
            rows = torch.stack([counts[:, 0], chances * counts[:, 0], counts[:, 1]], dim=1)
            self.table.index_add_(0, (chances * BINS).long().clamp_max(BINS - 1), rows)
            context.telemetry["curriculum/brier"] = (chances - counts[:, 1] / counts[:, 0]).square().mean().item()
            for name, level in zip(("low", "median", "high"), chances.quantile(torch.tensor([0.1, 0.5, 0.9]).double())):
                context.telemetry[f"curriculum/asked_{name}"] = level.item()
        if self.left_order:
            pairs = [
                (signal, seen)
                for signal, group in zip(expected.tolist(), groups)
                if (seen := difference(group)) is not None
            ]
            brought = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).sum(0)
            self.signals += brought
            self.recent += brought

    def summary(self) -> dict[str, Any]:
        """``reliability``: rows of [answers, expected share right, share right] by expected share;
        ``calibration_error``: their mean distance; ``signal_ratio``: signal seen over signal expected where it chose;
        ``earlier_answers``: right answers of better runs that were taken, and the tokens that those runs generated;
        ``earlier_weight``: how much their prompts' difficulty counts in what is believed.
        """
        rows = self.table[self.table[:, 0] > 0]
        share = rows[:, 1:] / rows[:, :1]
        error = ((share[:, 0] - share[:, 1]).abs() * rows[:, 0]).sum() / rows[:, 0].sum().clamp_min(1)
        reliability = [[int(n), round(e, 4), round(s, 4)] for n, (e, s) in zip(rows[:, 0].tolist(), share.tolist())]
        ratio = (self.signals[1] / self.signals[0]).item() if self.signals[0] else None
        found: dict[str, Any] = {
            "reliability": reliability,
            "calibration_error": round(error.item(), 4),
            "signal_ratio": ratio,
        }
        if self.earlier is not None and self.settings.reads:
            found |= {"earlier_answers": self.earlier.found, "earlier_generated_tokens": self.earlier.generated_tokens}
            found["earlier_weight"] = self.outcomes.weight
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "lengths": torch.tensor(self.lengths),
            "earlier": None if self.earlier is None else self.earlier.state_dict(),
            "outcomes": self.outcomes.state_dict(),
            "table": self.table.clone(),
            "signals": self.signals.clone(),
            "recent": self.recent.clone(),
            "stored": self.stored.state_dict(),
            "rarity": self.rarity.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start(state["lengths"].tolist(), Path())
        if state["earlier"] is None and not self.settings.reads:  # begun without being recorded
            self.earlier = None
        if self.earlier is not None:
            self.earlier.load_state_dict(state["earlier"] or {})
        self.outcomes.load_state_dict(state["outcomes"])
        self.table, self.signals, self.recent = (state[name].clone() for name in ("table", "signals", "recent"))
        self.stored.load_state_dict(state["stored"])
        # checkpoints of November 2026 and before do not say: right answers were always trained on again
        self.rarity.load_state_dict(state.get("rarity", {"groups": FIRST, "failed": FIRST}))


def difference(group: list[Rollout]) -> float | None:
    """Unbiased estimate from a group of what :meth:`Outcomes.signal` expects; None: one answer tells nothing."""
    if len(group) < 2:
        return None
    worth = merits(group)
    mean = sum(worth) / len(worth)
    variance = sum((value - mean) ** 2 for value in worth) / (len(worth) - 1)
    return 2 * variance if group[0].merit is None else variance
