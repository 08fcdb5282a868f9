"""Drafts: earlier answers guess the new ones, and a forward pass verifies many tokens of an answer at once.

Lossless, after RhymeRL's HistoSpec (arXiv 2508.18588): the noise of every position is keyed, so the tokens are those
that plain decoding draws, and training is what it is without drafts. Only the number of forward passes changes. vLLM
verifies by a rule of its own, which keeps the distribution and draws other tokens.
"""

from typing import Any

from python_trainer.accelerators.base import Accelerator, StepContext
from python_trainer.accelerators.settings import DraftsSettings
from python_trainer.data import Group, Rollout
from python_trainer.rollout.drafting import Drafter, pass_overhead
from python_trainer.rollout.engine import Engine
from rlkernels.history import HISTORY_TOKENS, RolloutHistory

MEASURED_PASSES = ((32, 8), (8, 8), (8, 1))  # sequences, tokens of each; the largest first


class Drafts(Accelerator):
    """A history of all answers, by prompt; an answer's epoch is the number of earlier visits to its prompt."""

    settings: DraftsSettings

    def __init__(self, settings: DraftsSettings):
        super().__init__(settings)
        self.history = RolloutHistory(max_tokens=HISTORY_TOKENS)
        self.visits: dict[int, int] = {}  # prompt index -> steps with this prompt
        # cost of a forward pass beside that of its tokens, in tokens; None: the engine cannot measure it
        self.pass_overhead: float | None = None
        self.counted_step = 0
        self.stats_before: dict[str, float] = {}  # the engine's counters when that step began

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        engine = context.run.engine
        if self.pass_overhead is None:
            self.pass_overhead = measure_overhead(engine)
        if context.step != self.counted_step:  # not a further round of dynamic sampling
            self.counted_step = context.step
            self.stats_before = engine.stats
        max_tokens = self.settings.max_draft_tokens
        engine.drafter = Drafter(self.history, max_tokens=max_tokens, pass_overhead=self.pass_overhead)
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        context.run.engine.drafter = None  # evaluations have prompts of their own
        for rollout in rollouts:
            epoch = self.visits.get(rollout.prompt_index, 0)
            self.history.add(rollout.prompt_ids, rollout.response_ids, reward=rollout.reward, epoch=epoch)
        for prompt in {rollout.prompt_index for rollout in rollouts}:
            self.visits[prompt] = self.visits.get(prompt, 0) + 1
        spent = {name: count - self.stats_before[name] for name, count in context.run.engine.stats.items()}
        context.telemetry |= {
            "drafts/tokens_per_step": spent["generated_tokens"] / max(spent["sample_steps"], 1),
            "drafts/acceptance": spent["accepted_tokens"] / max(spent["draft_tokens"], 1),
            "drafts/offered_tokens": spent["draft_tokens"],
            "drafts/accepted_tokens": spent["accepted_tokens"],
            "drafts/off_share": 1 - spent["draft_steps"] / max(spent["sample_steps"], 1),
            "drafts/forward_passes": spent["forward_passes"],
            "drafts/history_tokens": self.history.stats["tokens"],
        }
        if self.pass_overhead is not None:
            context.telemetry["drafts/pass_overhead"] = self.pass_overhead
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history.to_bytes(), "visits": self.visits, "pass_overhead": self.pass_overhead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = RolloutHistory.from_bytes(state["history"])
        self.history.resize(HISTORY_TOKENS)
        self.visits = state["visits"]
        self.pass_overhead = state["pass_overhead"]


def measure_overhead(engine: Engine) -> float | None:
    """Measure the cost of a forward pass beside that of its tokens, in tokens; None: the engine cannot measure."""
    seconds: dict[int, float] = {}
    for sequences, tokens in MEASURED_PASSES:
        pass_seconds = engine.pass_seconds(sequences, tokens)
        if pass_seconds is None:  # stop before timing the rest
            return None
        seconds[sequences * tokens] = pass_seconds
    return pass_overhead(seconds)
