"""Reads the pages of the documentation and runs the blocks on them."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from python_trainer.__main__ import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:^<!-- needs: (\w+) -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = ("python", "yaml", "console")  # kinds of blocks that run_page runs; test_shell_commands runs those of sh


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        kind: language of the fence.
        needs: "gpu", or a module without which the block cannot run; empty: nothing.
    """

    kind: str
    text: str
    needs: str = ""

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, from a comment on its first line."""
        found = re.match(r"# (\S+\.(?:py|yaml))\n", self.text)
        return found and found[1]

    @property
    def commands(self) -> list[tuple[str, str]]:
        """(command, what it prints) of a console block."""
        found = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", self.text, re.MULTILINE)
        return [(re.sub(r"\\\n\s*", "", command), printed.strip()) for command, printed in found]

    @property
    def lines(self) -> list[str]:
        """The commands of an sh block, without comments."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line))]


def read_blocks(path: Path) -> list[Block]:
    return [Block(kind, text, needs) for needs, kind, text in FENCE.findall(path.read_text(encoding="utf-8"))]


def has(needs: str) -> bool:
    """Whether this machine has what a block needs."""
    return torch.cuda.is_available() if needs == "gpu" else not needs or find_spec(needs) is not None


def run_page(path: Path, capsys: Any) -> int:
    """Runs the blocks of a page in the current folder, in their order -> how many ran.

    A block of Python or YAML that begins with the name of a file is written there. Other Python is executed, and the
    next blocks see its names. Of a console block each command is run and its output compared.
    """
    names: dict[str, Any] = {"__name__": "page"}
    done = 0
    for block in read_blocks(path):
        if block.kind not in RUN or not has(block.needs):
            continue
        done += 1
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
            sys.modules.pop(Path(block.file).stem, None)
        elif block.kind == "python":
            exec(compile(block.text, path.name, "exec"), names)
        for command, printed in block.commands if block.kind == "console" else ():
            check_command(command, printed, capsys)
    return done


def check_command(command: str, printed: str, capsys: Any) -> None:
    """Runs a command of a page, and compares its exit code and output with the page; ``...`` stands for anything."""
    arguments = shlex.split(command)
    if arguments[:3] == ["python", "-m", "python_trainer"] and "|" not in arguments:
        capsys.readouterr()
        try:
            code = main(arguments[3:])
        except SystemExit as left:  # of --help-settings and the like
            code = left.code or 0
        said = "".join(capsys.readouterr())
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}."}
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
        code, said = done.returncode, done.stdout + done.stderr
    wanted = 2 if printed.startswith("error: ") else 0
    assert code == wanted, f"{command} ended with {code}, not {wanted}:\n{said[-3000:]}"
    pattern = ".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", printed)))
    assert re.search(pattern, said, re.DOTALL), f"{command} printed\n{said[-3000:]}\nand the page says\n{printed}"
