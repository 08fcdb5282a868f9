"""Settings of drafts."""

from typing import Any, ClassVar

from pydantic import Field

from python_trainer.accelerators.settings import AcceleratorSettings


class DraftsSettings(AcceleratorSettings):
    """Lossless speculative rollouts from earlier answers."""

    name = "drafts"
    accelerator = "python_trainer.accelerators.drafts.accelerator:Drafts"
    divisible = True
    multi_turn = True
    counters: ClassVar = {"drafts/accepted_tokens": "draft tokens accepted (drafts)"}
    advice: ClassVar = {
        "drafts/accepted_tokens": "no draft was accepted: a prompt has to come back, and its answers to be alike"
    }

    max_draft_tokens: int = Field(16, ge=1)
    """Longest draft."""
    history_tokens: int = Field(10_000_000, ge=1)
    """Answer tokens kept; the oldest and least rewarded go first."""
    pass_overhead: float | None = Field(None, ge=0)
    """What a forward pass costs on top of its tokens, in tokens. null: measured in the first step and kept."""

    def conflicts(self, config: Any) -> str | None:
        if not config.rollout.by_vllm:
            return None
        return (
            "the accelerator drafts needs rollout.engine paged, got vllm; vLLM itself drafts from "
            "a history by rlkernels.integrations.vllm.HistoryProposer (docs/vllm.md)"
        )
