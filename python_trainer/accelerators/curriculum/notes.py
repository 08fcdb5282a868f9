"""What a run is told of."""

from typing import TYPE_CHECKING

from python_trainer.errors import tell

if TYPE_CHECKING:
    from rich.console import Console


def say(console: "Console | None", text: str) -> None:
    """A note, where the run's other notes are; of a run that is resumed, which has no console here, on stderr."""
    if console is None:
        tell(f"note: {text}")
    else:
        console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)
