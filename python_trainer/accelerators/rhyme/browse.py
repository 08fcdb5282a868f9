"""Looks into a retrospective database: ``python -m python_trainer history URL``."""

import argparse
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StepRecord, StoredRun, parse_url


def run(args: argparse.Namespace) -> None:
    """Lists the runs."""
    console, database = Console(), RetrospectiveDatabase(args.url, create=False)
    runs = {stored.id: stored for stored in database.runs()}
    steps = {key: database.trajectory(key) for key in runs}
    home = Path(parse_url(args.url).database or "").parent if database.is_sqlite else Path()
    console.print(make_run_table(list(runs.values()), steps, home.resolve()))
    console.print(f"{database.name}: {len(runs)} runs", highlight=False)


def make_run_table(runs: Sequence[StoredRun], steps: dict[int, list[StepRecord]], home: Path) -> Table:
    """Makes a row for each run, in 80 columns. Folders are named from ``home`` on, that of the database."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("run", "begun", "folder", "task", "seed", "steps", "tokens", "last\naccuracy"):
        if name == "folder":
            table.add_column(name, overflow="fold")
        else:
            left = name in ("begun", "task")
            table.add_column(name, justify="left" if left else "right", no_wrap=True, max_width=20)
    for stored in runs:
        records = steps[stored.id]
        table.add_row(
            str(stored.id),
            f"{datetime.fromtimestamp(stored.created):%Y-%m-%d %H:%M}",
            escape(folder_name(stored, home)),
            escape(stored.task),
            str(stored.settings.get("seed", "-")),
            str(len(records)),
            shorten(sum(record.generated_tokens for record in records)),
            f"{records[-1].accuracy:.3f}" if records else "-",
        )
    return table


def folder_name(stored: StoredRun, home: Path) -> str:
    """Names the folder of a run, from that of the database on if it lies there."""
    path = Path(str(stored.settings.get("output_dir", "-")))
    return str(path.relative_to(home)) if path != home and path.is_relative_to(home) else path.name


def shorten(count: int) -> str:
    """Writes a number as ``812``, ``506k`` or ``1.6M``."""
    if count < 1000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"
