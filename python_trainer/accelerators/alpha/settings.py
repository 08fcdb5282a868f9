"""Settings of gated extrapolation."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.errors import UserError

if TYPE_CHECKING:
    from python_trainer.tasks import Task
    from rlkernels.extrapolation import Attempt


class AlphaSettings(AcceleratorSettings):
    """Gated extrapolation of the weights."""

    name = "alpha"
    accelerator = "python_trainer.accelerators.alpha.accelerator:Alpha"
    multi_turn = True
    counters: ClassVar = {
        "alpha/tried": "extrapolations tried (alpha)",
        "alpha/accepted": "extrapolations accepted (alpha)",
    }
    advice = "no extrapolation was tried: train for more steps than accelerators.alpha.first_step"

    track_steps: int = Field(2, ge=1)
    """Keep rank-4 factors of the update every so many steps."""
    first_step: int = Field(6, ge=1)
    """First step after which to extrapolate. When it is refused, the next tracked step tries again."""
    every: int = Field(20, ge=0)
    """Steps from one decision of the gate to the next attempt; 0: one decision in a run."""
    predictor: Literal["pls", "secant", "temporal", "full"] = "full"
    """pls goes to target_accuracy, the others to `horizon` times the tracked steps."""
    horizon: float = Field(2.0, gt=1)
    """Extrapolate to this many times the steps that were tracked."""
    target_accuracy: float = Field(1.0, gt=0, le=1)
    """Accuracy that pls goes to."""
    scale: float | Literal["alpha"] = 1.0
    """Factor on the predicted update along the direction; `alpha`: give it the norm of the whole update (AlphaRL)."""
    keep_rest: bool = True
    """Keep what the update holds beyond its leading direction; false drops it, as AlphaRL does."""
    smoothing: int = Field(5, ge=1)
    """Steps over which the training accuracy is averaged."""
    gate_prompts: int = Field(512, ge=1)
    """Held-out prompts of the paired comparison, at most; the task must have as many. More find smaller gains, and
    cost more than those are worth where a step has few answers."""
    gate_level: float = Field(0.05, gt=0, lt=1)
    """Chance per run of accepting weights that are no better, at most."""
    max_tries: int = Field(3, ge=1)
    """Candidates in one attempt."""
    shrink: float = Field(0.5, gt=0, lt=1)
    """Each further candidate takes this share of the way of the one before."""
    min_gap: float = Field(0.01, ge=0, lt=1)
    """Refuse modules whose leading direction stands out less: 1 - sigma2 / sigma1."""
    min_cosine: float = Field(0.7, ge=0, le=1)
    """Refuse modules whose direction has turned further since half of the tracked steps."""
    min_rise: float = 0.02
    """Refuse when the training accuracy (the reward, where nothing is right or wrong) rose less from the first third of
    the tracked steps to the last."""
    min_skill: float = 0.0
    """Refuse when the back-test on the last third of the tracked steps does no better than this."""

    def rules(self, holdout: int) -> "Attempt":
        """Of an attempt; ``holdout`` points are left out in the back-test."""
        from rlkernels.extrapolation import Attempt, Limits  # imports torch

        limits = Limits(
            min_gap=self.min_gap,
            min_rise=self.min_rise,
            min_cosine=self.min_cosine,
            min_skill=self.min_skill,
            holdout=holdout,
        )
        return Attempt(
            predictor=self.predictor,
            horizon=self.horizon,
            accuracy=self.target_accuracy,
            scale=self.scale,
            keep_rest=self.keep_rest,
            limits=limits,
            prompts=self.gate_prompts,
            max_tries=self.max_tries,
            shrink=self.shrink,
        )

    def conflicts(self, config: Any) -> str | None:
        if config.optimizer.offload:
            return "accelerators.enabled: alpha reads master weights between steps, optimizer.offload must be false"
        if config.model.lora is None:
            return None
        return (
            "accelerators.enabled: alpha follows whole weight matrices, model.lora must be null, got "
            f"{config.model.lora.model_dump()}"
        )

    def splits(self, task: "Task") -> list[str]:
        self.check_gate(len(task.gate))
        return ["gate"]

    def check_gate(self, size: int) -> None:
        """Raises UserError where the task has fewer gate prompts than are asked for."""
        if size < self.gate_prompts:
            raise UserError(
                f"accelerators.alpha.gate_prompts: {self.gate_prompts} held-out prompts are asked for, but the task "
                f"has {size}; set more aside by task.gate_size, or ask for fewer"
            )
