"""What makes training cheaper, by name. To add one: a module, and a line in ``ACCELERATORS``."""

from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model, field_validator

from python_trainer.accelerators.alpha.accelerator import Alpha
from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.drafts.accelerator import Drafts
from python_trainer.accelerators.rhyme.accelerator import Rhyme
from python_trainer.accelerators.rpo.accelerator import RPO
from python_trainer.accelerators.settings import Settings
from python_trainer.data import PlannedGroup, Rollout
from python_trainer.settings import Section

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "AcceleratorsConfig",
    "PlannedGroup",
    "Rollout",
    "RunContext",
    "Settings",
    "StepContext",
    "make_accelerators",
]

# In the order in which they run within a step: rhyme, rpo, drafts, alpha.
ACCELERATORS: dict[str, type[Accelerator]] = {kind.name: kind for kind in (Rhyme, RPO, Drafts, Alpha)}


class _Enabled(Section):
    enabled: list[str] = Field([])
    """Which of them take part; their order does not matter."""

    @field_validator("enabled")
    @classmethod
    def known_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in ACCELERATORS:
                raise ValueError(f"must hold names out of {', '.join(ACCELERATORS)}, got {name!r}")
        return [name for name in ACCELERATORS if name in names]


if TYPE_CHECKING:
    AcceleratorsConfig = _Enabled
else:
    _sections: dict[str, Any] = {
        name: (kind.Settings, Field(default=kind.Settings(), description=(kind.Settings.__doc__ or "").strip()))
        for name, kind in ACCELERATORS.items()
    }
    AcceleratorsConfig = create_model(
        "AcceleratorsConfig", __base__=_Enabled, __doc__="Which accelerators run, and their settings.", **_sections
    )


def make_accelerators(config: AcceleratorsConfig) -> list[Accelerator]:
    """The enabled ones, in the order in which they run."""
    return [ACCELERATORS[name](getattr(config, name)) for name in config.enabled]
