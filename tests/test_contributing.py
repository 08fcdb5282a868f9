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


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(FILES[name])


def run(folder: Path, *arguments: str) -> None:
    ended = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ["root_length", "fewer"])
def test_a_plug_in_is_one_file(name, tmp_path):
    write(tmp_path, f"{name}.py")
    (command,) = (shlex.split(command) for command in COMMANDS if f"{name}:" in command)
    command[command.index("--config") + 1] = str(ROOT / "configs" / "sums.yaml")
    folder = tmp_path / command[command.index("--output-dir") + 1]
    run(tmp_path, *command, *QUICK)
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert summary["steps"] == 2 and name in (folder / "config.yaml").read_text()
    if name == "fewer":
        assert "reward" in rows[-1] and "fewer" in summary["accelerator_s"]


def test_examples_pass_the_linter(tmp_path):
    write(tmp_path, *FILES)
    ours = 'lint.isort.known-first-party = ["python_trainer", "rlkernels"]'
    run(tmp_path, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), "--config", ours, ".")


def test_every_file_of_a_step_is_there():
    table = TEXT[TEXT.index("## Follow one step") : TEXT.index("## Add a loss aggregation")]
    named = re.findall(r"`([a-z_/]+\.py)`", table)
    assert len(set(named)) >= 10
    for name in named:
        assert (ROOT / "python_trainer" / name).is_file(), name
