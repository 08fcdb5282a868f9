"""Settings of drafts."""

from typing import Any, ClassVar

from pydantic import Field

from python_trainer.accelerators.settings import AcceleratorSettings

LONGEST_IN_VLLM = 128  # its MAX_SPEC_LEN


class DraftsSettings(AcceleratorSettings):
    """Lossless speculative rollouts from earlier answers."""

    name = "drafts"
    accelerator = "python_trainer.accelerators.drafts.accelerator:Drafts"
    divisible = True
    multi_turn = True
    counters: ClassVar = {"drafts/accepted_tokens": "draft tokens accepted (drafts)"}
    advice = "no draft was accepted: a prompt has to come back, and its answers to be alike"

    max_draft_tokens: int = Field(16, ge=1)
    """Longest draft; at most 128 with rollout.engine vllm."""
    history_tokens: int = Field(10_000_000, ge=1)
    """Answer tokens kept; the oldest and least rewarded go first."""
    pass_overhead: float | None = Field(None, ge=0)
    """What a forward pass costs on top of its tokens, in tokens. null: measured in the first step and kept; with
    rollout.engine vllm a draft token then costs 0.02 of a step, whatever the batch."""

    def conflicts(self, config: Any) -> str | None:
        if config.rollout.servers:
            return (
                f"the accelerator drafts needs rollout.vllm_server null, got {', '.join(config.rollout.servers)}; "
                "leave it out, and let the server itself draft from a file as docs/vllm.md says"
            )
        if config.rollout.by_vllm and self.max_draft_tokens > LONGEST_IN_VLLM:
            return (
                f"accelerators.drafts.max_draft_tokens must be at most {LONGEST_IN_VLLM} with rollout.engine vllm, got "
                f"{self.max_draft_tokens}"
            )
        return None

    def longest_draft(self) -> int:
        return self.max_draft_tokens
