"""RPO: only the last part of an answer is generated, after a prefix of an answer from an earlier visit.

"Suffix rollouts" of arXiv 2601.19404. Changes the objective: the policy learns to finish answers that it (or an
earlier version of it) began. What differs from the paper:

- The cut is drawn once per prompt and step and shared by its group; different cuts would confound the advantages.
- New tokens are limited by ``max_completion_length`` alone, so that answers need not shrink.
- Token ids are kept, never text: decoding and encoding again would drift. Answers that hit the limit are not kept:
  a few tokens do not bring them to an end.
- By default only right answers are kept, and the prefix itself is not trained on (``algorithm.prefix_in_loss``).
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.rpo.answers import load_answers, pack_answers, save_answers, unpack_answers
from python_trainer.accelerators.rpo.settings import RPOSettings
from python_trainer.data import Group, Rollout, by_group, good_ones, merits
from python_trainer.keyed import keyed_choice, keyed_seed, keyed_unit

FILL_BATCH = 256  # answers generated at a time
CUT_BINS = 10  # of the cut as a share of the answer, in metrics


def length_reward(rewards: list[float], lengths: list[int], *, alpha: float, lift_wrong: bool) -> list[float]:
    """clip(r / (1 + exp(-alpha (mean length - length))), 0.5, 1) for one group (RPO, section 3).

    With ``lift_wrong`` False the clip applies to the factor, so that a reward of 0 stays 0.
    """
    mean = sum(lengths) / max(len(lengths), 1)
    factors = [0.5 * (1 + math.tanh(alpha * (mean - length) / 2)) for length in lengths]  # the logistic function
    if lift_wrong:
        return [min(max(reward * factor, 0.5), 1.0) for reward, factor in zip(rewards, factors)]
    return [reward * max(factor, 0.5) for reward, factor in zip(rewards, factors)]


def complete(rollout: Rollout) -> bool:
    return rollout.finish_reason != "length" and bool(rollout.response_ids)


class RPO(Accelerator):
    """A cache of one answer per prompt, cut at a random place.

    Attributes:
        answers: token ids of a whole answer by prompt key.
        shortest: length of the shortest answer of the group that it comes from.
    """

    settings: RPOSettings

    def __init__(self, settings: RPOSettings):
        super().__init__(settings)
        self.answers: dict[int, list[int]] = {}
        self.shortest: dict[int, int] = {}
        self.counted_step, self.counts = 0, Counter[str]()

    def begin(self, run: RunContext) -> None:
        """Fills the cache: from the file if there is one, else with the first policy's answers."""
        path = self.settings.cache_path
        if path is not None and Path(path).exists():
            self.answers = load_answers(Path(path), run.prompts, run.tokenizer)
            run.console.print(f"rpo: {len(self.answers)} remembered answers from {path}", highlight=False)
        elif self.settings.fill:
            self.fill(run)
            file = Path(path) if path else run.output_dir / "rpo_answers.safetensors"
            run.once(lambda: save_answers(file, self.answers, run.prompts, run.tokenizer))
        self.shortest = {key: len(answer) for key, answer in self.answers.items()}

    def fill(self, run: RunContext) -> None:
        start, total = time.perf_counter(), len(run.prompts)
        with Progress(console=run.console, disable=not run.console.is_terminal, transient=True) as progress:
            for attempt in range(self.settings.fill):
                keys = [key for key in range(total) if key not in self.answers]
                bar = progress.add_task("rpo: first answers", total=len(keys))
                for first in range(0, len(keys), FILL_BATCH):
                    batch = keys[first : first + FILL_BATCH]
                    for rollout in run.answer(batch, attempt):
                        right = rollout.accuracy > 0.5 or rollout.merit is not None  # which no group can be the mean of
                        if complete(rollout) and (right or self.settings.keep == "any"):
                            self.answers[rollout.prompt_key] = list(rollout.response_ids)
                    progress.advance(bar, len(batch))
        seconds = time.perf_counter() - start
        found = f"rpo: first answers to {len(self.answers)} of {total} prompts remembered, {seconds:.1f} s"
        run.console.print(found, highlight=False)

    def longest_cut(self, prompt_key: int, step: int) -> int:
        """Most tokens that may be taken off the remembered answer of a prompt, at least 1."""
        settings, length = self.settings, len(self.answers[prompt_key])
        base = self.shortest[prompt_key] if settings.cut_share_of == "shortest" else length
        longest = settings.cut_tokens or settings.cut_share * base
        if settings.cut_schedule_steps:
            done = min((step - 1) / settings.cut_schedule_steps, 1.0)
            longest *= 1 + (settings.cut_end_factor - 1) * done
        return max(min(math.ceil(longest), length), 1)

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        for group in groups:
            key, answer = group.prompt_key, self.answers.get(group.prompt_key)
            # an answer may come from a run that allowed longer ones
            if answer and not group.prefix_ids and len(answer) <= group.max_new_tokens:
                cut = 1 + keyed_seed(context.seed, "rpo cut", key) % self.longest_cut(key, context.step)
                group.prefix_ids = answer[: len(answer) - cut]
                group.max_new_tokens -= len(group.prefix_ids)
        return groups

    def replay(self, context: StepContext, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Shapes and remembers whole groups, with what others have mixed in; adds nothing."""
        groups = by_group(rollouts)
        if context.step != self.counted_step:
            self.counted_step, self.counts = context.step, Counter()
        self.count(list(groups.values()))
        context.telemetry |= self.metrics()
        for group in groups.values():
            if self.settings.length_reward != "none":
                shaped = length_reward(
                    [rollout.reward for rollout in group],
                    [len(rollout.response_ids) for rollout in group],
                    alpha=self.settings.length_alpha,
                    lift_wrong=self.settings.length_reward == "paper",
                )
                for rollout, reward in zip(group, shaped):
                    rollout.reward = reward
            self.remember(context.seed, group)
        return []

    def count(self, groups: list[list[Rollout]]) -> None:
        """Adds groups to the counts of the step, before anything of them is remembered."""
        for group in groups:
            prefix, answer = group[0].prefix_len, self.answers.get(group[0].prompt_key)
            cut_share = 1 - prefix / len(answer) if prefix and answer else 1.0
            upper = 100 // CUT_BINS * max(math.ceil(cut_share * CUT_BINS), 1)  # of its bin, in %
            informative = len(set(merits(group))) > 1
            fresh = [rollout for rollout in group if rollout.importance_cap is None]  # others come from a store
            self.counts.update(
                {
                    "groups": 1,
                    "informative": int(informative),
                    "continued": int(prefix > 0),
                    "prefix_tokens": prefix,
                    "given": prefix * len(fresh),
                    "tokens": sum(len(rollout.response_ids) for rollout in fresh),
                    f"groups_cut_{upper}": 1,
                    f"informative_cut_{upper}": int(informative),
                }
            )

    def metrics(self) -> dict[str, float]:
        """Of one step, over all rounds of dynamic sampling. A group is informative if its merits differ."""
        counts, size = self.counts, max(self.counts["groups"], 1)
        return {f"rpo/{name}": float(count) for name, count in counts.items() if "_cut_" in name} | {
            "rpo/given_tokens": float(counts["given"]),
            "rpo/hit_rate": counts["continued"] / size,
            "rpo/prefix_share": counts["given"] / max(counts["tokens"], 1),
            "rpo/prefix_tokens": counts["prefix_tokens"] / size,
            "rpo/informative": counts["informative"] / size,
            "rpo/remembered": len(self.answers),
        }

    def remember(self, seed: int, group: list[Rollout]) -> None:
        """Epsilon-greedy: the best answer with probability epsilon, otherwise one of the others."""
        key, worth = group[0].prompt_key, group if self.settings.keep == "any" else good_ones(group)
        options = [rollout for rollout in worth if complete(rollout)]
        if not options:
            return
        best = max(rollout.reward for rollout in options)
        chosen = keyed_choice([rollout for rollout in options if rollout.reward == best], seed, "rpo best", key)
        others = [rollout for rollout in options if rollout is not chosen]
        if others and keyed_unit(seed, "rpo greedy", key) >= self.settings.epsilon:
            chosen = keyed_choice(others, seed, "rpo other", key)
        self.answers[key] = list(chosen.response_ids)
        self.shortest[key] = min(len(rollout.response_ids) for rollout in group)

    def state_dict(self) -> dict[str, Any]:
        shortest = torch.tensor([self.shortest[key] for key in self.answers], dtype=torch.int64)
        return pack_answers(self.answers) | {"shortest": shortest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.answers = unpack_answers(state)
        self.shortest = dict(zip(self.answers, state["shortest"].tolist()))
