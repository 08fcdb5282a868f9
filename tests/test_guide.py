"""Every file and command of docs/guide.md, in its order."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from python_trainer.__main__ import main

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(python|yaml|console)\n(.*?)^```", (ROOT / "docs/guide.md").read_text(), re.S | re.M)


def console(text):
    """(command, what it prints) of a block."""
    return [(c.strip(), out.strip()) for c, out in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.M)]


@pytest.mark.slow
def test_guide(tmp_path, monkeypatch, capsys):
    (tmp_path / "python_trainer").symlink_to(ROOT / "python_trainer")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    commands = 0
    for kind, text in BLOCKS:
        if kind != "console":
            Path(text.split("\n")[0].removeprefix("# ")).write_text(text)
            continue
        for command, printed in console(text):
            python, *arguments = shlex.split(command)
            assert python == "../.venv/bin/python"
            commands += 1
            if arguments[:2] == ["-m", "python_trainer"]:
                code = main(arguments[2:])
                said = capsys.readouterr()
                assert code == (2 if printed.startswith("error: ") else 0), (command, said.err[-2000:])
                assert said.err.strip() == printed if code else (Path("runs/first/summary.json").exists())
            else:
                done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                assert done.stdout.strip() == printed
    assert commands == 12  # none was overlooked
    del sys.modules["my_rewards"]


def test_files_of_users_are_not_linted():
    """ruff leaves out what git ignores."""
    text = (ROOT / "docs/guide.md").read_text()
    assert "`mkdir mine && cd mine`" in text and "/mine/" in (ROOT / ".gitignore").read_text().split("\n")
