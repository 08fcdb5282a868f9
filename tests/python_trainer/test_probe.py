"""What a sample of answers tells: difficulty, spread within groups, where time goes."""

import json

import pytest
import yaml
from conftest import merged

from python_trainer.__main__ import main
from python_trainer.command_line.probe import lines, probe
from python_trainer.config import load_config
from python_trainer.loop.learner import Learner
from python_trainer.rollout.paged.engine import PagedEngine


def test_the_command(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("python_trainer.run.logger.LINE_SECONDS", 0.0)
    changes = {"task": {"reward": "conftest:even"}, "accelerators": {"enabled": ["drafts"]}}
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(merged(settings, changes)))
    assert main(["probe", "--config", str(path), "--seconds", "5", "--json", str(tmp_path / "found.json")]) == 0
    (said, progress), seen = capsys.readouterr(), json.loads((tmp_path / "found.json").read_text())
    assert "probe 0/1  answers 16/16" in progress
    assert progress.index("answers 16/16") < progress.index("probe 0/1  update 0/1")
    count = len(seen["p"])
    assert 4 <= count <= 12 and len(seen["lengths"]) == count and seen["group_size"] == 4
    assert len(set(seen["prompts"])) == count and set(seen["prompts"]) <= set(range(12))
    assert all(x * 4 == pytest.approx(round(x * 4)) for x in seen["p"])
    assert seen["spread"] == pytest.approx(sum(0 < x < 1 for x in seen["p"]) / count) == seen["reward_spread"]
    assert seen["all_wrong"] == pytest.approx(seen["p"].count(0) / count)
    assert seen["mean_length"] == pytest.approx(sum(seen["lengths"]) / count) and seen["mean_length"] <= 12
    assert seen["epochs"] == 4 * 4 / 12 and min(seen["seconds"].values()) > 0
    assert 0 <= seen["truncated"] <= 1 and seen["tokens_per_second"] > 0
    assert f"{count} prompts, 4 answers each" in said and "groups of 4 with right and wrong answers: " in said


def test_p_does_not_depend_on_how_prompts_are_parted(settings):
    config = load_config(merged(settings, {"task": {"reward": "conftest:even"}}))
    few, many = (probe(config, seconds=seconds) for seconds in (-1, float("inf")))
    assert len(few["p"]) == 4 and len(many["p"]) == 12 and many["p"][:4] == few["p"]


def test_where_nothing_is_right_or_wrong_groups_go_by_rewards(settings):
    found = probe(load_config(settings), seconds=30)  # the share of digits
    assert not found["judged"] and found["spread"] == found["reward_spread"] > 0.5 and found["all_wrong"] == 0
    assert "nothing is right or wrong in this task" in "\n".join(lines(found))


def test_vllm_gives_its_memory_up_before_the_update(settings, monkeypatch):
    calls = []
    monkeypatch.setattr(PagedEngine, "sleep", lambda engine: calls.append("sleep"))
    monkeypatch.setattr(Learner, "update", lambda *arguments: calls.append("update"))
    probe(load_config(settings), seconds=0.1)
    assert calls[:2] == ["sleep", "update"]


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    for file in (tmp_path, tmp_path / "none" / "p.json"):
        assert main(["probe", "--config", "smoke", "--json", str(file)]) == 2
        assert "--json must be a file in a folder that exists" in capsys.readouterr().err
