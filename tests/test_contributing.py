"""The examples of CONTRIBUTING.md: each is written to a folder and run by the command beside it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TEXT, re.DOTALL))
COMMANDS = re.findall(r"```\npython (-m python_trainer train .*?)\n```", TEXT, re.DOTALL)
QUICK = ["max_steps=2", "max_seconds=null", "task.train_size=8", "task.test_size=4", "model.path=small",
         "rollout.prompts_per_step=4", "rollout.num_generations=2", "rollout.max_completion_length=16",
         "evaluation.eval_steps=0"]  # fmt: skip

# makes the new folder part of the package, as it would be in a clone, and adds its lines to the tables
CONFTEST = """
import pathlib, rlkernels, rlkernels.backend
rlkernels.__path__.append(str(pathlib.Path(__file__).parent / "rlkernels"))
rlkernels.backend.OPS["masked_mean"] = rlkernels.backend.Op()
rlkernels._EXPORTS["masked_mean"] = "rlkernels.means"
"""


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(FILES[name])


def run(folder: Path, *arguments: str) -> None:
    ended = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ["root_length", "largest", "unsolved"])
def test_a_plug_in_is_one_file(name, tmp_path):
    write(tmp_path, f"{name}.py")
    (command,) = (shlex.split(command) for command in COMMANDS if f"{name}:" in command)
    command[command.index("--config") + 1] = str(ROOT / "configs" / "sums.yaml")
    folder = tmp_path / command[command.index("--output-dir") + 1]
    run(tmp_path, *command, *QUICK)
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert summary["steps"] == 2 and name in (folder / "config.yaml").read_text()
    if name == "unsolved":
        assert "unsolved/spared" in rows[-1] and "unsolved" in summary["accelerator_s"]


def test_an_op_is_a_folder(tmp_path):
    write(tmp_path, *(name for name in FILES if "means" in name))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/rlkernels/test_means.py")


def test_examples_pass_the_linter(tmp_path):
    write(tmp_path, *FILES)
    ours = 'lint.isort.known-first-party = ["python_trainer", "rlkernels"]'
    run(tmp_path, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), "--config", ours, ".")


def test_every_file_of_a_step_is_there():
    table = TEXT[TEXT.index("## One step, followed") : TEXT.index("## Adding something")]
    named = re.findall(r"`([a-z_/]+\.py)`", table)
    assert len(set(named)) >= 12
    for name in named:
        assert (ROOT / "python_trainer" / name).is_file(), name
