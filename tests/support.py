"""Helpers that several test files share."""

import pytest


def lacks(what: str) -> None:
    """Skips the running test because this machine lacks ``what``; the summary names it."""
    pytest.skip(f"this machine lacks {what}")
