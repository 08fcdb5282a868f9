"""What an accelerator says about itself before anything heavy is loaded: its settings and what belongs to them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from python_trainer.errors import UserError
from python_trainer.settings import Section, load

if TYPE_CHECKING:
    from python_trainer.tasks.base import Task

LONGEST_VLLM_DRAFT = 128  # its MAX_SPEC_LEN


class AcceleratorSettings(Section):
    """Settings of an accelerator: the section ``accelerators.NAME`` of a configuration.

    A subclass is the whole plug-in. It names the class that does the work and imports nothing heavy, so that settings
    are checked, and finished runs reported, without torch. All settings have defaults.
    """

    name: ClassVar[str]
    accelerator: ClassVar[Any]
    """An :class:`~python_trainer.accelerators.base.Accelerator` that is made with these settings: the class, or its
    ``module:Class``."""
    divisible: ClassVar[bool] = False
    """Whether several ranks, each of which generates a part of the answers, can run it side by side."""
    multi_turn: ClassVar[bool] = False
    """Whether it leaves answers alone that are given in turns with an environment, or can deal with them."""
    ops: ClassVar[tuple[str, ...]] = ()
    """Ops of rlkernels that it needs beyond those of every run; a run on a GPU proves their kernels."""
    counters: ClassVar[Mapping[str, str]] = {}
    """Metrics whose sum over a run shows what was done in it -> the words of their row in tables."""

    @property
    def records(self) -> bool:
        """Returns whether it takes part without being enabled, to record something for later runs."""
        return False

    @property
    def prefix_in_loss(self) -> bool:
        """Returns whether the loss includes the prefixes that it gives to answers."""
        return False

    def conflicts(self, config: Any) -> str | None:
        """Names a setting of the whole configuration that it cannot go with, and its value; None: there is none."""
        return None

    def splits(self, task: "Task") -> list[str]:
        """Returns the splits of the task that it needs besides "train" and "test"; UserError: one holds too little."""
        return []

    def longest_draft(self) -> int:
        """Returns the most tokens of a draft that the engine verifies at once; 0: there are no drafts."""
        return 0

    def make(self, *, enabled: bool = True) -> Any:
        """Makes the accelerator; one that is not enabled only if it ``records``."""
        accelerator = (load(self.accelerator) if isinstance(self.accelerator, str) else self.accelerator)(self)
        accelerator.enabled = enabled
        return accelerator


class RPOSettings(AcceleratorSettings):
    """Suffix rollouts."""

    name = "rpo"
    accelerator = "python_trainer.accelerators.rpo:RPO"
    divisible = True
    counters: ClassVar = {"rpo/given_tokens": "tokens given, not generated (rpo)"}

    cut_share: float = Field(1.0, gt=0, le=1)
    """Longest cut as a share of the remembered answer. Cuts are uniform from 0.2 of it (preset paper: a token) on."""
    cut_tokens: int | None = Field(None, ge=1)
    """Longest cut in tokens instead (the paper: 300, 500 or 800)."""
    preset: Literal["ours", "paper"] = "ours"
    """ours: remember right answers only, and leave the prefix out of the loss. paper: remember any answer, the first
    policy's before the first step, train on the prefix too, prefer short answers by the paper's length reward, and cut
    every remembered answer."""
    whole_share: float = Field(0.25, ge=0, le=1)
    """Share of the groups that are drawn to be answered whole, as cuts alone unlearn what they do not train. Cutting
    ends if these groups become clearly worse. 0: none, and nothing is watched; always with preset paper."""
    fill: int = Field(0, ge=0)
    """Before the first step, tries of the first policy at every prompt until there is an answer to remember. 0: none,
    the first visit to a prompt is answered from its start; one with preset paper."""

    @property
    def prefix_in_loss(self) -> bool:
        return self.preset == "paper"


class DraftsSettings(AcceleratorSettings):
    """Lossless speculative rollouts from earlier answers."""

    name = "drafts"
    accelerator = "python_trainer.accelerators.drafts:Drafts"
    ops = ("verify_drafts",)
    divisible = True
    multi_turn = True
    counters: ClassVar = {"drafts/accepted_tokens": "draft tokens accepted (drafts)"}

    max_draft_tokens: int = Field(16, ge=1)
    """Longest draft; at most 128 with rollout.engine vllm."""

    def conflicts(self, config: Any) -> str | None:
        if config.rollout.servers:
            return (
                f"the accelerator drafts needs rollout.vllm_server null, got {', '.join(config.rollout.servers)}; "
                "leave it out, and let the server draft by itself as docs/integrations.md says"
            )
        asked, most = self.max_draft_tokens, LONGEST_VLLM_DRAFT
        if config.rollout.by_vllm and asked > most:
            return f"accelerators.drafts.max_draft_tokens must be at most {most} with rollout.engine vllm, got {asked}"
        return None

    def longest_draft(self) -> int:
        return self.max_draft_tokens


class AlphaSettings(AcceleratorSettings):
    """Gated extrapolation of the weights."""

    name = "alpha"
    accelerator = "python_trainer.accelerators.alpha:Alpha"
    ops = ("top1_deltas", "top1_delta", "delta_matvec", "add_rank1_")
    divisible = True
    multi_turn = True
    counters: ClassVar = {
        "alpha/tried": "extrapolations tried (alpha)",
        "alpha/accepted": "extrapolations accepted (alpha)",
    }

    track_steps: int = Field(2, ge=1)
    """Keep rank-4 factors of the update every so many steps."""
    preset: Literal["ours", "paper"] = "ours"
    """paper: after `first_step` go once to an accuracy of 1 by pls, with nothing beyond rank 1 and the norm of the
    whole update, whatever the other settings say; no gate, and no gate prompts."""
    first_step: int = Field(6, ge=1)
    """First step after which to extrapolate. When it is refused, the next tracked step tries again."""
    every: int = Field(20, ge=0)
    """Steps from one decision of the gate to the next attempt; 0: one decision in a run."""
    predictor: Literal["pls", "secant", "temporal", "full"] = "secant"
    """pls goes to an accuracy of 1, the others to `horizon` times the tracked steps. secant follows the line through
    the latest update and the one at half its step, temporal one through all, of rank 1. full stretches every rank."""
    horizon: float = Field(2.0, gt=1)
    """Extrapolate to this many times the steps that were tracked."""
    refuse: bool = True
    """Do not even try where the tracked steps give no reason to: the accuracy rose by less than 0.02, directions turned
    since half of them (cosine below 0.7), or a back-test on the last third does no better than staying."""

    def conflicts(self, config: Any) -> str | None:
        if config.parallel == "fsdp2":
            return "accelerators.enabled: alpha needs all weights on every rank, parallel none or ddp, got fsdp2"
        if config.model.lora is None:
            return None
        return (
            "accelerators.enabled: alpha follows whole weight matrices, model.lora must be null, got "
            f"{config.model.lora.model_dump()}"
        )

    def splits(self, task: "Task") -> list[str]:
        if self.preset == "paper":
            return []
        if not task.gate:
            raise UserError(
                "the accelerator alpha needs prompts that training has not seen, and the task has 0: set some aside by "
                "task.gate_size, such as 512"
            )
        return ["gate"]
