"""Every file and command of pages that are to be followed, in their order."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from python_trainer.__main__ import main

ROOT = Path(__file__).parents[1]


def console(text):
    """(command, what it prints) of a block."""
    return [(c.strip(), out.strip()) for c, out in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.M)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "count"), [("guide", 12), ("data", 4)])
def test_page(tmp_path, monkeypatch, capsys, page, count):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```(python|yaml|console)\n(# \S+\.(?:py|yaml)\n.*?|\$ .*?)^```", text, re.S | re.M)
    (tmp_path / "python_trainer").symlink_to(ROOT / "python_trainer")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setattr(sys, "path", [*sys.path])
    commands = 0
    for kind, text in blocks:
        if kind != "console":
            file = Path(text.split("\n")[0].removeprefix("# "))
            file.write_text(text)
            sys.modules.pop(file.stem, None)
            continue
        for command, printed in console(text):
            python, *arguments = shlex.split(command)
            assert python == "../.venv/bin/python"
            commands += 1
            if arguments[:2] == ["-m", "python_trainer"]:
                code = main(arguments[2:])
                said = capsys.readouterr()
                assert code == (2 if printed.startswith("error: ") else 0), (command, said.err[-2000:])
                folder = Path(arguments[arguments.index("--output-dir") + 1])
                assert said.err.strip() == printed if code else (folder / "summary.json").exists()
            else:
                done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                assert done.stdout.strip() == printed
    assert commands == count  # none was overlooked
    for file in Path.cwd().glob("*.py"):
        sys.modules.pop(file.stem, None)


def test_files_of_users_are_not_linted():
    """ruff leaves out what git ignores."""
    text = (ROOT / "docs/guide.md").read_text()
    assert "`mkdir mine && cd mine`" in text and "/mine/" in (ROOT / ".gitignore").read_text().split("\n")
