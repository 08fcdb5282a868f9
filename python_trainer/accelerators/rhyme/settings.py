"""Settings of training guided by history."""

from typing import Literal

from pydantic import Field, model_validator

from python_trainer.accelerators.settings import Settings


class RhymeSettings(Settings):
    """Training guided by history."""

    database: str | None = None
    """Retrospective database: a path (SQLite), sqlite:/// or postgresql:// URL. null: only this run's own answers."""
    record: bool = True
    """Write this run into the database."""
    max_database_bytes: int = Field(1 << 30, ge=1)
    """Bound on the database; beyond it the worst, then the oldest answers go."""
    history_ratio: float = Field(0.34, ge=0)
    """Stored answers per fresh one, at most: with 0.34 a group of 8 has 6 fresh ones, and up to 2 stored ones, where
    there are any; otherwise 8 fresh ones. 0: only rescue."""
    rescue: bool = True
    """Give a group in which every fresh answer failed a stored one, whatever the ratio."""
    fraction: float = Field(0.2, gt=0, le=1)
    """Share of all historical stages that stage 1 keeps."""
    threshold: float = Field(0.7, ge=0, le=1)
    """C_rhyme that a stage must reach to be trusted."""
    window: int = Field(8, ge=2)
    """Steps of this run that are compared; stages are sought in stretches of twice as many."""
    lookahead: int = Field(4, ge=0)
    """Steps just beyond a stage whose answers are candidates too."""
    min_steps: int = Field(2, ge=1)
    """Steps of this run before any stage is trusted."""
    reward_weight: float = Field(0.5, ge=0, le=1)
    """Share of the reward curves in C_rhyme; the rest is what the policy did (text, lengths, entropy, success)."""
    reward_scale: float = Field(0.25, gt=0)
    """Difference of rewards, mapped to [0, 1], that counts as far."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward of the task; mapped to [0, 1]."""
    max_staleness: int = Field(32, ge=0)
    """Policy versions after which this run's own answers are candidates no more; 0: never use them."""
    importance_cap: float = Field(1.0, gt=0)
    """Truncates the importance weights pi / pi_behaviour of stored answers, token by token."""
    min_weight: float = Field(0.1, ge=0)
    """Stored answers whose weights are lower in the mean are too far from the current policy."""
    candidates: int = Field(4, ge=1)
    """Stored answers of a prompt that stage 2 looks at."""
    selection: Literal["retrodiction", "likelihood", "reward", "recent", "random", "oracle"] = "likelihood"
    """What stage 2 ranks by; oracle is hindsight: the true alignment with this step's held-out gradient."""
    retrodiction_steps: int = Field(0, ge=0)
    """Train the retrodiction network and measure its ranking every so many steps; 0: there is none."""
    held_out: int = Field(64, ge=8)
    """Fresh answers whose gradient is its target."""
    bank_size: int = Field(8192, ge=1)
    """Most stored answers in memory (and in a checkpoint)."""
    bank_per_prompt: int = Field(16, ge=1)
    """Most of them for one prompt."""
    store_per_group: int = Field(2, ge=1)
    """Most right answers of a group that are stored at each visit."""
    refresh_steps: int = Field(0, ge=0)
    """Read the database again every so many steps, to see what other trainers write meanwhile; 0: only at the start."""

    @model_validator(mode="after")
    def consistent(self) -> "RhymeSettings":
        low, high = self.reward_range
        if low >= high:
            raise ValueError(f"reward_range must ascend, got [{low:g}, {high:g}]")
        if self.selection == "retrodiction" and not self.retrodiction_steps:
            raise ValueError("selection retrodiction needs retrodiction_steps above 0, got 0")
        return self
