"""The study of training guided by history, with a few tokens of each of its parts."""

import argparse
import csv
from dataclasses import replace

import pytest

from bench.studies import rhyme
from tools.policies import arithmetic as pretrain

TINY = [
    "rollout.prompts_per_step=4", "rollout.num_generations=4", "rollout.max_completion_length=24", "model.path=small",
    "evaluation.eval_limit=8", "evaluation.eval_limit_during=8", "task.test_size=8", "task.gate_size=0",
]  # fmt: skip


@pytest.fixture
def study(tmp_path):
    def run(*variants, **options):
        parser = argparse.ArgumentParser()
        rhyme.add_arguments(parser)
        arguments = ["--output-dir", str(tmp_path / "study"), "--results", str(tmp_path / "results"), "--seeds", "0",
                     "--steps", "3", "--variants", *variants, "--set", *TINY]  # fmt: skip
        rhyme.run(argparse.Namespace(**vars(parser.parse_args(arguments)) | options))
        with (tmp_path / "results" / "rhyme.csv").open() as file:
            return {row["variant"]: row for row in csv.DictReader(file)}

    return run


def test_databases_are_filled_once_and_what_is_finished_is_kept(study, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    rows = study("rhyme", "from easy")
    assert list(rows) == ["history qwen2", "rhyme", "history easy", "from easy"]
    assert rows["history qwen2"]["steps"] == "6" and rows["rhyme"]["stored_share"] != ""
    monkeypatch.setattr(rhyme, "Trainer", None)  # nothing is trained again
    assert study("rhyme", "from easy") == rows
    assert "tokens to target" in capsys.readouterr().out


def test_no_run_is_started_after_its_time(study, tmp_path):
    study("baseline")
    assert list(study("baseline", "fresh-4", minutes=0)) == ["baseline"]


def test_rows_of_other_variants_and_seeds_stay(tmp_path):
    def rows(name, seed, accuracy):
        numbers = dict.fromkeys(["tokens_to_target", "seconds_to_target", "generated_tokens", "stored_share"], 0.1)
        row = {"variant": name, "seed": seed, "accuracy_final": accuracy, "rhyme_share": None, **numbers}
        return [row | {f"rank_{ranking}": 0.5 for ranking in rhyme.RANKINGS}]

    for name, seed, accuracy in (("baseline", 0, 0.1), ("baseline", 1, 0.2), ("ranking", 0, 0.3), ("baseline", 0, 0.4)):
        rhyme.write(rows(name, seed, accuracy), tmp_path)
    found = [(row["variant"], row["seed"], row["accuracy_final"]) for row in rhyme.read(tmp_path / "rhyme.csv")]
    assert found == [("baseline", "0", "0.4"), ("baseline", "1", "0.2"), ("ranking", "0", "0.3")]


def test_every_variant_has_valid_settings(tmp_path):
    for name, overrides in rhyme.VARIANTS.items():
        config = rhyme.load_config(rhyme.CONFIG, [value.format(databases=tmp_path) for value in overrides])
        databases = [history for history in rhyme.HISTORIES if f"/{history}.db" in str(config.accelerators.rhyme)]
        assert len(databases) == (name not in ("baseline", "fresh-4", "own answers")), name


def test_a_policy_of_another_family(tmp_path, monkeypatch):
    phases = [replace(phase, steps=1) for phase in pretrain.PHASES["small"][:1]]
    monkeypatch.setitem(pretrain.PHASES, "small", phases)
    rhyme.llama_policy(tmp_path / "llama")
    assert "llama" in (tmp_path / "llama" / "config.json").read_text()
