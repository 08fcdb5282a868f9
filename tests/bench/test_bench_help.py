"""Every command of bench answers ``--help``: argparse formats its texts only then, and a bare % ends in a traceback."""

import importlib
import sys

import pytest

PACKAGES = ("bench", "bench.faults", "bench.gpu", "bench.soak", "bench.studies")
COMMANDS = [*(f"{package}.__main__" for package in PACKAGES), "bench.gpu.records", "bench.studies.lossless"]


@pytest.mark.parametrize("module", COMMANDS)
def test_help(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(module).main()
    said = capsys.readouterr().out
    assert exit.value.code == 0 and "usage: " in said and "%%" not in said
