"""Settings of the curriculum."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from python_trainer.accelerators.settings import AcceleratorSettings, Picture

AUTO = "auto"


class CurriculumSettings(AcceleratorSettings):
    """Rare right answers are trained on more than once; prompts are chosen by what they can teach, where asked for."""

    name = "curriculum"
    accelerator = "python_trainer.accelerators.curriculum.accelerator:Curriculum"
    divisible = True  # every rank sees all answers and chooses alike
    modest = (
        "right answers are trained on again where most groups have none, those of better runs first where a database "
        "is named"
    )
    counters: ClassVar = {
        "curriculum/rehearsed_answers": "right answers of better runs trained on first (curriculum)",
        "curriculum/chosen_prompts": "prompts chosen by what they can teach (curriculum)",
        "curriculum/stored_answers": "right answers trained on again (curriculum)",
    }
    advice = (
        "no right answer was trained on again: too many groups had one (rare_share), or none was to a prompt that is "
        "answered right less than once in a group; and no run of a database that is named was clearly better than this"
    )
    pictures: ClassVar = (
        Picture(
            "python_trainer.accelerators.curriculum.picture:draw_chosen", "chosen.png",
            "expected chance of the prompts that were asked, over the steps", ("curriculum/asked_",),
        ),
    )  # fmt: skip

    sharpness: float = Field(2.0, ge=0)
    """Prompts are drawn in proportion to this power of the signal that they are expected to bring per token."""
    floor: float = Field(0.1, gt=0, le=1)
    """Share of the draws that any prompt may get, so that none is forgotten."""
    least_gain: float | None = Field(None, ge=0)
    """Plain order is left where signal per token is expected to be this many times its own, with 95 % certainty: 1.5,
    say, since steps of chosen prompts are smaller and less mixed; 0: from the first step on; null: never."""
    same_signal: bool = True
    """A step has as many prompts as bring the signal of a step in plain order, three quarters of
    `rollout.prompts_per_step` at least; false: all of them."""
    memory: float = Field(60, gt=0)
    """Steps after which what a prompt alone has shown is forgotten to 1/e."""
    stored_share: float = Field(0.5, ge=0)
    """Right answers of earlier steps to prompts that are hardly ever answered right are trained on again: of at most so
    many tokens per token of fresh answers that teach something; 0: none."""
    rare_share: float = Field(0.55, ge=0, le=1)
    """They are where at least this share of the first 128 groups has no right answer, and where a better run had right
    ones: where they are not as rare it did not pay. 0: always, from the first step on."""
    stored_uses: int = Field(8, ge=1)
    """How often a stored answer is trained on again; none is older than `memory` steps."""
    database: str | None = AUTO
    """Retrospective database: a path (SQLite), sqlite:/// or postgresql:// URL. What runs that are clearly better than
    this one answered right to these prompts is trained on; with `rehearsals` 0 beliefs begin with how hard each prompt
    was to earlier runs. This run is added, also where `curriculum` is not enabled. auto: it is added to `history.db`
    beside its directory where SQLAlchemy is installed, and nothing is read. null: neither."""
    rehearsals: int = Field(3, ge=0)
    """How often the right answers of better runs are trained on, as soon as it is told which are; 0: never."""
    rehearsed: int = Field(4, ge=1)
    """Most of them for one prompt, the newest."""
    rehearsal_batch: int = Field(16, ge=1)
    """Answers in an update on nothing else; those to one prompt stay together, so that it is computed once."""
    rehearsal_share: float = Field(0.2, ge=0)
    """Answers in all these updates for each that the run is to generate, at most."""

    @property
    def reads(self) -> bool:
        """Whether what earlier runs have left is used."""
        return self.database not in (None, AUTO)

    def default_database(self, output_dir: Path) -> str:
        """Where a run of this directory is recorded unless another place is named."""
        return str(output_dir.resolve().parent / "history.db")

    def settle(self, config: Any) -> None:
        if self.database == AUTO and (
            config.task.environment is not None
            or recorded_by_rhyme(config)
            or importlib.util.find_spec("sqlalchemy") is None
        ):
            self.database = None

    def conflicts(self, config: Any) -> str | None:
        if self.database is None:
            return None
        if config.task.environment is not None:
            return f"accelerators.curriculum.database needs task.environment null, got {config.task.environment}"
        if recorded_by_rhyme(config) and self.database == config.accelerators.rhyme.database:
            return (
                "accelerators.curriculum.database must not be that of rhyme, which records this run there already, got "
                f"{self.database} for both"
            )
        return None

    def idle(self) -> str | None:
        return None if self.database is None else "python_trainer.accelerators.curriculum.recorder:Recorder"

    @classmethod
    def columns(cls, summary: Mapping[str, Any]) -> dict[str, float]:
        earlier = summary["accelerators"].get(cls.name, {}).get("earlier_generated_tokens", 0)
        return {"tokens generated by earlier runs (curriculum)": float(earlier)}


def recorded_by_rhyme(config: Any) -> bool:
    """Whether `rhyme` adds the run to a database: twice in one, it would find itself there."""
    rhyme = config.accelerators.rhyme
    return (
        any(chosen is rhyme for chosen in config.accelerators.chosen()) and rhyme.database is not None and rhyme.record
    )
