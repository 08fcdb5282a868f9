"""Whether the current folder exists."""

import os


def folder_problem() -> str | None:
    """Say that somebody has deleted the current folder; None: it exists.

    MKL, part of torch, ends a process there, with a message that torch's own library cannot be loaded.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder no longer exists: change to one that does, by cd"
    return None
