"""Settings of suffix rollouts."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from python_trainer.accelerators.settings import AcceleratorSettings, Picture


class RPOSettings(AcceleratorSettings):
    """Suffix rollouts."""

    name = "rpo"
    accelerator = "python_trainer.accelerators.rpo.accelerator:RPO"
    divisible = True
    counters: ClassVar = {"rpo/given_tokens": "tokens given, not generated (rpo)"}
    advice = (
        "no answer was begun from a remembered one: a prompt has to come back (more steps or fewer "
        "prompts), or set accelerators.rpo.fill"
    )
    pictures: ClassVar = (
        Picture(
            "python_trainer.accelerators.rpo.picture:draw_informative", "informative.png",
            "informative groups against the cut", ("rpo/groups_cut_", "rpo/informative_cut_"),
        ),
    )  # fmt: skip

    cut_share: float = Field(1.0, gt=0, le=1)
    """Longest cut as a share of the remembered answer; the cut is uniform between one token and this."""
    cut_tokens: int | None = Field(None, ge=1)
    """Longest cut in tokens instead (the paper: 300, 500 or 800)."""
    cut_share_of: Literal["answer", "shortest"] = "answer"
    """What `cut_share` is a share of: the remembered answer, or the shortest of its group (the paper)."""
    cut_end_factor: float = Field(1.0, gt=0)
    """The longest cut is multiplied by a factor that goes linearly from 1 to this over `cut_schedule_steps`."""
    cut_schedule_steps: int = Field(0, ge=0)
    """Steps of that schedule; 0 for none."""
    fill: int = Field(0, ge=0)
    """Before the first step, tries of the first policy at every prompt until there is an answer to `keep` (the paper);
    0: none, the first visit to a prompt is answered from its start."""
    keep: Literal["right", "any"] = "right"
    """Remember right answers only (a prompt without one is answered from its start), or any (the paper). Where nothing
    is right or wrong: those of more than the mean reward of their group."""
    epsilon: float = Field(0.5, ge=0, le=1)
    """Probability that the best answer of a group is remembered; otherwise it is another one of those to `keep`."""
    length_reward: Literal["none", "correct", "paper"] = "none"
    """Prefer short answers: `correct` scales the reward of right answers only, `paper` lifts wrong ones to 0.5 too."""
    length_alpha: float = Field(0.01, gt=0)
    """Steepness of the length reward per token."""
    cache_path: str | None = None
    """File of the first policy's answers: read instead of filling if it exists, else written. null: in OUTPUT_DIR."""

    @model_validator(mode="after")
    def schedule_has_steps(self) -> "RPOSettings":
        if self.cut_end_factor != 1.0 and not self.cut_schedule_steps:
            raise ValueError("cut_schedule_steps must be at least 1 with a cut_end_factor other than 1, got 0")
        return self
