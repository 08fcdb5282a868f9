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
    (output, progress) = capsys.readouterr()
    figures = json.loads((tmp_path / "found.json").read_text())
    assert "probe 0/1  answers 16/16" in progress
    assert progress.index("answers 16/16") < progress.index("probe 0/1  update 0/1")
    count = len(figures["p"])
    assert 4 <= count <= 12 and len(figures["lengths"]) == count and figures["group_size"] == 4
    assert len(set(figures["prompts"])) == count and set(figures["prompts"]) <= set(range(12))
    assert [place.rpartition("/")[2] for place in figures["places"]] == [
        f"train.jsonl:{1 + number}" for number in figures["prompts"]
    ]
    assert all(x * 4 == pytest.approx(round(x * 4)) for x in figures["p"])
    assert figures["spread"] == pytest.approx(sum(0 < x < 1 for x in figures["p"]) / count) == figures["reward_spread"]
    assert figures["all_wrong"] == pytest.approx(figures["p"].count(0) / count)
    assert figures["mean_length"] == pytest.approx(sum(figures["lengths"]) / count) and figures["mean_length"] <= 12
    assert figures["epochs"] == 4 * 4 / 12 and min(figures["seconds"].values()) > 0
    assert 0 <= figures["truncated"] <= 1 and figures["tokens_per_second"] > 0
    assert f"{count} prompts, 4 answers each" in output and "groups of 4 with right and wrong answers: " in output


def test_p_does_not_depend_on_how_prompts_are_parted(settings):
    config = load_config(merged(settings, {"task": {"reward": "conftest:even"}}))
    short, full = (probe(config, seconds=seconds) for seconds in (-1, float("inf")))
    assert len(short["p"]) == 4 and len(full["p"]) == 12 and full["p"][:4] == short["p"]


def test_where_nothing_is_right_or_wrong_groups_go_by_rewards(settings):
    figures = probe(load_config(settings), seconds=30)  # the share of digits
    assert not figures["judged"] and figures["spread"] == figures["reward_spread"] > 0.5 and figures["all_wrong"] == 0
    assert "nothing is right or wrong in this task" in "\n".join(lines(figures))


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
