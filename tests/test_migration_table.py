"""The table of settings in docs/other_trainers.md: what it names exists here and in TRL, with the defaults it gives.

And what is said to have no counterpart has none; and the reward function that calls verl's.
"""

import dataclasses
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from python_trainer.algorithms.settings import ADVANTAGES, LOSS_TYPES
from python_trainer.data import Example
from python_trainer.describe import describe_settings
from python_trainer.tasks import Task
from python_trainer.tasks.rewards import score

PAGE = Path(__file__).parents[1] / "docs" / "other_trainers.md"
TABLE = PAGE.read_text(encoding="utf-8").partition("## Settings of TRL and verl, and ours\n")[2].partition("\n## ")[0]
MISSING = re.findall(r"^- \*\*(\w+) of (TRL|verl)\*\*: (.*?)$(?=\n- |\n\n)", TABLE, re.M | re.S)
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


def test_what_has_no_counterpart_exists_in_trl_alone():
    trl = pytest.importorskip("trl")
    theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    ours = {key.rpartition(".")[2] for key, *_ in describe_settings()}
    values = {"cispo", "sapo", "vespo", "normalize_then_sum"}  # of loss_type and multi_objective_aggregation
    named = {name for _, of, text in MISSING if of == "TRL" for name, _ in NAME.findall(text) if "." not in name}
    assert len(named) >= 13 and values < named and named - values <= theirs
    assert named & ours == {"loss_type"}, "there is a counterpart now"
    losses = {name for _, of, text in MISSING for name, _ in NAME.findall(text) if of == "verl"} | values
    assert len(MISSING) == 5 and {"clip_cov", "geo_mean", "remax"} < losses
    assert not losses & {*LOSS_TYPES.names(), *ADVANTAGES.names()}


def test_a_reward_function_of_verl_may_give_a_dict(monkeypatch):
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(# my_rewards.py\n.*?)^```", text, re.S | re.M)

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        right = solution_str == ground_truth
        number = 1.0 if right else -1.0
        return {"score": number, "acc": right, "pred": solution_str} if data_source == "math_dapo" else number

    compute = types.ModuleType("compute")
    monkeypatch.setattr(compute, "compute_score", compute_score, raising=False)
    monkeypatch.setitem(sys.modules, "compute", compute)
    names: dict[str, Any] = {}
    exec(compile(block, "my_rewards.py", "exec"), names)
    rows = [
        Example([{"role": "user", "content": "1+1?"}],
                {"data_source": source, "reward_model": {"ground_truth": "2"}, "extra_info": {}, "ability": "math"})
        for source in ("math_dapo", "math_dapo", "own")
    ]  # fmt: skip
    task = Task("t", rows, [], {"score": names["score"]}, accuracy="score")
    scores = score(task, rows, ["2", "3", "2"], [[1], [1], [1]])
    assert scores.total == [1.0, -1.0, 1.0] and scores.accuracy == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("found", "written", "equal"),
    [("1.0e-05", "1e-05", True), (1e-6, "1e-05", False), (None, "null", True), ("false", "true", False)],
)
def test_defaults_are_compared_by_value(found, written, equal):
    assert same(found, written) == equal
