"""Every command of bench answers ``--help``: argparse formats its texts only then, and a bare % ends in a traceback."""

import importlib
import sys

import pytest

from bench.studies.__main__ import STUDIES

PACKAGES = ("bench", "bench.faults", "bench.gpu", "bench.soak", "bench.studies", "bench.sweep")
COMMANDS = [(f"{package}.__main__",) for package in PACKAGES] + [("bench.gpu.records",)]
COMMANDS += [("bench.studies.__main__", name) for name in STUDIES]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command, monkeypatch, capsys):
    module, *arguments = command
    monkeypatch.setattr(sys, "argv", [module, *arguments, "--help"])
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(module).main()
    said = capsys.readouterr().out
    assert exit.value.code == 0 and "usage: " in said and "%%" not in said
