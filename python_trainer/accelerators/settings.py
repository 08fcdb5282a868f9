"""What an accelerator says about itself before anything heavy is loaded: its settings and what belongs to them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from python_trainer.registry import load
from python_trainer.settings import Section

if TYPE_CHECKING:
    from python_trainer.tasks.base import Task


@dataclass(frozen=True)
class Picture:
    """A picture of finished runs."""

    draw: str  # "module:function": (variant -> folders of its runs, path) -> whether there was anything to draw
    file: str  # name of the PNG
    words: str  # what it shows
    metrics: tuple[str, ...] = ()  # beginnings of names of metrics that need no chart beside it


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
    modest: ClassVar[str | None] = None
    """Why it costs next to nothing where it does not pay, so that ``enabled: auto`` turns it on; None: it does not."""
    counters: ClassVar[Mapping[str, str]] = {}
    """Metrics whose sum over a run shows what was done in it -> the words of their row in tables."""
    advice: ClassVar[str] = ""
    """What to do where all counters stayed 0 although the accelerator was on."""
    pictures: ClassVar[tuple[Picture, ...]] = ()

    def conflicts(self, config: Any) -> str | None:
        """What in the sections of the whole configuration it cannot go with, by name and value; None: nothing."""
        return None

    def settle(self, config: Any) -> None:
        """Replaces what is ``auto`` where the whole configuration decides what it stands for."""

    def splits(self, task: "Task") -> list[str]:
        """Splits of the task that the accelerator asks, beside train and test.

        Raises:
            UserError: one of them does not hold what it needs.
        """
        return []

    @classmethod
    def columns(cls, summary: Mapping[str, Any]) -> dict[str, float]:
        """Further rows of tables, from the summary of any run: words -> number."""
        return {}

    def longest_draft(self) -> int:
        """Most tokens of a draft that it has the engine verify at once; 0: it gives the engine no drafter."""
        return 0

    def idle(self) -> str | None:
        """``module:Class`` of what takes part where the accelerator is not enabled; None: nothing does."""
        return None

    def make(self) -> Any:
        """The accelerator."""
        return (load(self.accelerator) if isinstance(self.accelerator, str) else self.accelerator)(self)
