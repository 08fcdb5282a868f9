"""The study of all accelerators: its runs, and its tables from runs made up by hand."""

import argparse
import json
import re
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from bench.studies import PAPERS, profile, together, together_report, trl
from bench.studies.profile import OTHER, kind_of

PROMPTS = 400


def make_run(folder: Path, name: str, seed: int, *, seconds: float, right: float, accelerators=()) -> None:
    """A run of four steps whose accuracy goes straight from 0.5 to 0.9."""
    home = folder / name / f"seed-{seed}"
    home.mkdir(parents=True)
    rows = [
        {"step": step, "eval/accuracy": 0.5 + 0.1 * step, "time/training_s": step * seconds,
         "total/generated_tokens": 1000.0 * step, "rhyme/stored_answers": 2.0 * ("rhyme" in accelerators)}
        for step in range(5)
    ]  # fmt: skip
    (home / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "steps": 4, "training_s": 4 * seconds, "rollout_s": 2 * seconds, "train_s": seconds,
        "accelerator_s": {name: 0.5 * seconds for name in accelerators}, "target_accuracy": 0.85,
        "accelerators": {"rhyme": {"earlier_generated_tokens": 5000}} if "rhyme" in accelerators else {},
    }  # fmt: skip
    (home / "summary.json").write_text(json.dumps(summary))
    answers = numpy.arange(PROMPTS) < right * PROMPTS
    save_file({"final": answers.astype(numpy.uint8)}, home / "eval_test.safetensors")


@pytest.fixture
def runs(tmp_path):
    for seed in range(2):
        make_run(tmp_path / "short", "baseline", seed, seconds=10.0, right=0.9)
        make_run(tmp_path / "short", "rpo", seed, seconds=5.0, right=0.85, accelerators=["rpo"])
        make_run(tmp_path / "short", "rhyme", seed, seconds=8.0, right=0.9, accelerators=["rhyme"])
        make_run(tmp_path / "short", "rhyme+rpo", seed, seconds=4.0, right=0.8, accelerators=["rhyme", "rpo"])
    return tmp_path


def cells(lines, start):
    (line,) = (line for line in lines if line.startswith(f"| **{start}**"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_outcomes_compare_with_plain_training(runs):
    groups = together_report.grouped(runs / "short")
    assert list(groups) == ["baseline", "rpo", "rhyme", "rhyme+rpo"]
    lines = together_report.outcome_lines(groups, [0.85])
    assert cells(lines, "baseline")[:7] == ["**baseline**", "2", "10.00", "1.00x", "35.0", "1.00x", "3,500"]
    assert cells(lines, "rpo")[2:6] == ["5.00", "2.00x", "17.5", "2.00x"]
    assert cells(lines, "rpo")[-2] == "0.8500" and cells(lines, "rpo")[-1].startswith("-0.0500 [")
    assert cells(lines, "rhyme")[-1].endswith("not resolved")
    never = cells(together_report.outcome_lines(groups, [0.95]), "rpo")
    assert never[4:7] == ["0 of 2 seeds", "-", "-"]


def test_pairs_are_held_against_the_sum_of_their_parts(runs):
    lines = together_report.pair_lines(together_report.grouped(runs / "short"))
    found = cells(lines, "rhyme+rpo")
    assert found[1:5] == ["2", "1.25x and 2.00x", "2.50x", "2.50x"]
    assert found[5:8] == ["+0.0000 and -0.0500", "-0.0500", "-0.1000"] and found[8].startswith("-0.0500 [")
    assert len(lines) == 3, "only pairs whose parts are there"


def test_ratios_are_of_the_same_seeds(runs):
    make_run(runs / "short", "baseline", 2, seconds=100.0, right=0.1)
    lines = together_report.outcome_lines(together_report.grouped(runs / "short"), [0.85])
    assert cells(lines, "rpo")[3] == "2.00x" and cells(lines, "rpo")[-1].startswith("-0.0500 [")


def test_time_and_counters_are_means_over_seeds(runs):
    lines = together_report.time_lines(together_report.grouped(runs / "short"))
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    found = dict(zip(head, cells(lines, "rhyme"), strict=True))
    assert [found[name] for name in ("generation", "training", "rhyme", "rpo")] == ["50 %", "25 %", "12 %", "0 %"]
    assert found["stored answers used (rhyme)"] == "10" and found[head[-1]] == "5,000"
    assert "curriculum" not in lines[0], "columns are of the four"


def test_report_of_what_there_is(runs, capsys):
    together_report.write(runs, runs / "results")
    text = (runs / "results" / "together.md").read_text()
    assert "## Short sums, pairs" in text and "Long sums" not in text
    assert (runs / "results" / "together_short.png").stat().st_size > 5000


def test_settings_of_every_run():
    configs = {
        (home, variant): together.settings(home, variant, 1, Path("history.db"))
        for home, variants in together.PARTS.values()
        for variant in variants
    }
    assert all(config.seed == 1 for config in configs.values())
    assert configs["short", "all"].accelerators.enabled == ["rpo", "rhyme", "drafts", "alpha"]
    assert configs["long", "all"].task.variant == "long"
    assert configs["short", "all, database"].accelerators.rhyme.database == "history.db"
    assert configs["short", "baseline, half the prompts"].rollout.prompts_per_step == 16
    names = [together.folder_name(variant) for _, variant in configs]
    assert len(set(names)) == len(set(variant for _, variant in configs))


def test_names_are_those_of_the_recorded_tables():
    tables = (Path(together.__file__).parent / "results" / "together.md").read_text()
    recorded = set(re.findall(r"^\| \*\*(.*?)\*\*", tables, re.M))
    made = {together.folder_name(variant) for _, variants in together.PARTS.values() for variant in variants}
    assert made == recorded


def test_all_is_the_four_of_the_papers_in_other_studies_too():
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    profiled = profile.settings(parser.parse_args(["--accelerators", "all"]))
    for config in (profiled, trl.settings("python_trainer, all accelerators", 0)):
        assert sorted(config.accelerators.enabled) == sorted(PAPERS)


def test_kinds_of_operations():
    assert kind_of("aten::addmm") == "matrix products" and kind_of("rlkernels::paged_attention") == "attention"
    assert kind_of("rlkernels::silu_mul_backward") == "norms, rotary, SwiGLU" and kind_of("aten::copy_") == OTHER
