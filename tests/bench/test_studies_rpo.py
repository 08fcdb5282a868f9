"""The study of suffix rollouts, on a few steps of a small policy."""

import argparse
import json

import pytest

from bench.studies import rpo
from python_trainer.trainer import Trainer

SMALL = [
    "model.path=small", "rollout.prompts_per_step=2", "rollout.num_generations=4", "task.variant=short",
    "rollout.max_completion_length=64",
]  # fmt: skip


@pytest.mark.slow
def test_study_writes_its_results_and_does_nothing_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(rpo, "TEST_PROMPTS", 8)
    monkeypatch.setattr(rpo, "UNSHARED_STEPS", 2)
    monkeypatch.setattr(rpo, "COMMON", [*rpo.COMMON, *SMALL, "max_steps=3", "evaluation.eval_limit=8"])
    kept = {name: rpo.VARIANTS[name] for name in ("grpo", "grpo+rpo")}
    monkeypatch.setattr(rpo, "VARIANTS", kept)
    monkeypatch.setattr(rpo, "MAIN", tuple(kept))
    args = argparse.Namespace(output_dir=tmp_path / "runs", results=tmp_path / "results", seeds=1)
    rpo.run(args)
    record = json.loads((args.results / "rpo.json").read_text())
    assert set(record["variants"]) == set(kept)
    assert all(one["steps"] == 3 and len(one["accuracy"]) == 1 for one in record["variants"].values())
    assert record["variants"]["grpo+rpo"]["fill_s"] > 0
    twice = record["repeated_prefixes"]
    assert twice["shared"]["trained_tokens"] < twice["repeated"]["trained_tokens"]
    text = (args.results / "rpo.md").read_text()
    assert "**grpo+rpo**" in text and "| repeated |" in text
    assert (args.results / "rpo.png").stat().st_size > 10_000
    monkeypatch.setattr(Trainer, "step", None)
    rpo.run(args)


def test_target_is_crossed_between_evaluations():
    evaluations = [(0, 0.5), (10, 0.6), (20, 0.9), (30, 0.7)]
    rows = [{"time/training_s": s, "eval/accuracy": a} for s, a in evaluations]
    rows.insert(2, {"time/training_s": 12, "accuracy": 0.8})  # a step without an evaluation
    assert rpo.reached(rows, 0.75, "time/training_s") == pytest.approx(15)
    assert rpo.reached(rows, 0.4, "time/training_s") == 0
    assert rpo.reached(rows, 0.95, "time/training_s") is None
    assert rpo.versus([1.0, 3.0], [4.0, 4.0], "{:.0f}") == "2 (-50 %)"
    assert rpo.versus([1.0, None], [4.0, 4.0], "{:.0f}") == "1 of 2 seeds"
