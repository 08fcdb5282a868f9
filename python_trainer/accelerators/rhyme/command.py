"""The command ``history``."""

import argparse
from collections.abc import Callable
from pathlib import Path


def add(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds it to the command line."""
    parser = add_parser(
        "history",
        help="look into a retrospective database",
        examples=["history runs/history.db --run 1"],
        description="Lists the runs in a database, draws how their stages rhyme, and shows the best matches of one.\n"
        "Every run is recorded in history.db beside its directory, unless accelerators.curriculum.database, or with\n"
        "rhyme accelerators.rhyme.database, names another.",
    )
    parser.add_argument("url", metavar="URL", help="a path, sqlite:/// or postgresql:// URL")
    parser.add_argument("--run", type=int, metavar="ID", help="show what each stage of this run rhymes with")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="default: rhyme.png beside a SQLite file")
    parser.add_argument("--window", type=int, default=8, metavar="N", help="steps of a stage (default: 8)")
    parser.set_defaults(call="python_trainer.accelerators.rhyme.browse:run")
