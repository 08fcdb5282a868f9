"""The table of settings in docs/other_trainers.md: what it names exists here and in TRL, with the defaults it gives."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from python_trainer.config import describe_settings

PAGE = Path(__file__).parents[1] / "docs" / "other_trainers.md"
TABLE = PAGE.read_text(encoding="utf-8").partition("## Settings of TRL and verl, and ours\n")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in TABLE.splitlines() if line[:1] == "|"][2:]
NAME = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*)`(?: \(([\w.+-]+))?")  # and in brackets the default
LOSSES = {"bnpo", "luspo"}  # values of TRL's that are named


def same(found: Any, written: str) -> bool:
    """Whether a default is what stands in the table."""
    try:
        return float(found) == float(written)
    except (TypeError, ValueError):
        return written == {None: "null", True: "true", False: "false"}.get(found, str(found))


def check(defaults: dict[str, Any], name: str, written: str) -> None:
    assert name in defaults, f"{name} is no setting"
    assert not written or same(defaults[name], written), f"{name} is {defaults[name]} by default, not {written}"


def test_every_setting_of_ours_exists():
    defaults = {key: default for key, _, default, _ in describe_settings()}
    assert len(ROWS) > 30 and {len(row) for row in ROWS} == {4}
    for row in ROWS:
        found = [(name, written) for name, written in NAME.findall(row[3]) if "." in name or name in defaults]
        assert found or "`--resume`" in row[3], row
        for name, written in found:
            check(defaults, name, written)


def test_every_setting_of_trl_exists():
    trl = pytest.importorskip("trl")
    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    defaults |= dict.fromkeys(inspect.signature(trl.GRPOTrainer.__init__).parameters)
    named = [one for row in ROWS for one in NAME.findall(row[1]) if one[0] not in LOSSES]
    assert len(named) > 40
    for name, written in named:
        check(defaults, name, written)


@pytest.mark.parametrize(
    ("found", "written", "equal"),
    [("1.0e-05", "1e-05", True), (1e-6, "1e-05", False), (None, "null", True), ("false", "true", False)],
)
def test_defaults_are_compared_by_value(found, written, equal):
    assert same(found, written) == equal
