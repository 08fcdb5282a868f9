"""One run of the database for one folder: what a kill before the first checkpoint leaves behind is no history."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from python_trainer.accelerators.rhyme.records import RunFacts
from python_trainer.errors import tell
from python_trainer.run_directory import write_text

if TYPE_CHECKING:
    from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase

NOTE = "rhyme_run.json"


def begin_run(database: "RetrospectiveDatabase", facts: RunFacts, folder: Path, name: str = NOTE) -> tuple[int, float]:
    """Adds a run that begins in a folder to the database -> its id, and when it was added.

    The folder is among what is recorded of its settings, as ``output_dir``.
    An earlier attempt in the same folder leaves the database with all that it stored: the run that takes its place
    would find itself there. Which one that was is in the file ``name`` of the folder. Ids are used again, so the moment
    at which the run began must agree; a copy of the folder has no claim on the run.
    """
    note, here, created = folder / name, str(folder.resolve()), time.time()
    try:
        before = json.loads(note.read_text())
        attempt = (int(before["run"]), float(before["created"])) if before["folder"] == here else None
    except (OSError, ValueError, KeyError, TypeError):  # none there, or not one of ours
        attempt = None
    if attempt is not None:
        database.remove_run(attempt[0], created=attempt[1])
    facts = replace(facts, settings={**facts.settings, "output_dir": here})
    run_id = database.add_run(facts, created=created)
    write_text(note, json.dumps({"folder": here, "run": run_id, "created": created}) + "\n")
    return run_id, created


def resume_run(database: "RetrospectiveDatabase", run_id: int, done: int, *, created: float, lost: str) -> bool:
    """Forgets the steps of a resumed run beyond ``done``, as :meth:`RetrospectiveDatabase.cut_run`.

    Where the run is not in the database that is said, and ``lost``, what else follows from it.
    """
    there = database.cut_run(run_id, done, created=created)
    if not there:
        tell(f"note: this run is not recorded in {database.name}: it began without it, or was removed from it; {lost}")
    return there
