"""Settings of drafts."""

from pydantic import Field

from python_trainer.accelerators.settings import Settings


class DraftsSettings(Settings):
    """Lossless speculative rollouts from earlier answers."""

    max_draft_tokens: int = Field(16, ge=1)
    """Longest draft."""
    history_tokens: int = Field(10_000_000, ge=1)
    """Answer tokens kept; the oldest and least rewarded go first."""
    pass_overhead: float | None = Field(None, ge=0)
    """What a forward pass costs on top of its tokens, in tokens. null: measured in the first step and kept."""
