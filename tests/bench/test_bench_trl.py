"""Steps against TRL's trainer: both trainers run, on equal settings, and every figure gets its row."""

import argparse
import importlib.util
import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
from support import lacks
from transformers import LlamaConfig

from bench import _trl, trl
from bench._trl import Step
from bench.studies import trl as study
from python_trainer.config import load_config
from python_trainer.run_directory import read_metrics

SMALL = ["model.path=small", "task.train_size=8", "rollout.prompts_per_step=2", "rollout.num_generations=4",
         "rollout.max_completion_length=16", "task.test_size=8"]  # fmt: skip


@pytest.fixture
def has_trl(monkeypatch):
    if importlib.util.find_spec("trl") is None:
        lacks("TRL (pip install '.[trl]')")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


class Parent:
    """The other end of a worker's pipe: allows so many steps."""

    def __init__(self, steps):
        self.left, self.got = steps, []

    def recv(self):
        self.left -= 1
        return self.left >= 0

    def send(self, item):
        if item is not None:
            self.got.append(item)


@pytest.mark.parametrize(("run", "options"), [(_trl.run_ours, {}), (_trl.run_trl, {"batch": 4})])
def test_a_trainer_does_the_steps_that_it_is_told_to(has_trl, tmp_path, run, options):
    config, parent = load_config("configs/ppo.yaml", [*trl.COMMON, *SMALL]), Parent(2)
    with pytest.raises(_trl.Finished):
        run(config, tmp_path, _trl.Meter(parent), **options)
    assert len(parent.got) == 2
    for step in parent.got:
        assert 0 < step.rollout_s < step.seconds and 8 <= step.generated_tokens <= 8 * 16


def test_trl_gets_the_settings_of_the_run(has_trl, tmp_path):
    changes = ["optimizer.weight_decay=0.1", "algorithm.epsilon_high=0.28", "algorithm.delta=1.5", "rollout.top_k=7",
               "optimizer.warmup_steps=5"]  # fmt: skip
    config = load_config("configs/ppo.yaml", [*SMALL, *changes])
    trainer = _trl.make_grpo_trainer(config, tmp_path, batch=4)
    wanted = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "top_k": 7,
        "max_completion_length": 16, "temperature": 1.0, "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28,
        "delta": 1.5, "beta": 0.0, "learning_rate": 2e-4, "weight_decay": 0.1, "max_grad_norm": 1.0, "bf16": False,
        "warmup_steps": 5,
    }  # fmt: skip
    assert {name: getattr(trainer.args, name) for name in wanted} == wanted
    assert trainer.model.dtype.itemsize == 4 and len(trainer.train_dataset) == 8
    prompt = trainer.train_dataset[0]
    assert trainer.reward_funcs[0]([prompt["prompt"]], [f"A:{prompt['answer']}"], [[1]], answer=[prompt["answer"]]) == [
        1.0
    ]


def test_rows(tmp_path):
    work = replace(trl.small(tmp_path), name="some")
    taken = {"a": [Step(2.0, 0.5, 1.9, 100, 60), Step(4.0, 1.0, 3.9, 300, 60)]}
    whole, rollout, update = trl.rows(work, taken)
    assert [table[0].median_s for table in (whole, rollout, update)] == [3.0, 0.75, 2.25]
    assert whole[0].peak_bytes == 300 and rollout[0].peak_bytes is None and whole[0].extra == "20 tokens/s"
    assert whole[0].shape == "some: 16 x 8, up to 64"


def given_values(config, folder, meter, *, want):
    meter.begin()
    meter.end(float(config.model_dump(mode="json") == want), 0)
    meter.begin()


def test_the_settings_reach_the_process_of_a_trainer(tmp_path):
    config = trl.small(tmp_path).config
    worker = _trl.Worker(given_values, config, want=config.model_dump(mode="json"))
    worker.wait()
    assert worker.step().rollout_s == 1.0
    worker.stop()


def test_rows_of_real_size_say_what_share_of_the_rate_they_reach(tmp_path, monkeypatch):
    sizes = {"num_hidden_layers": 1, "vocab_size": 1000, "intermediate_size": 64}
    monkeypatch.setattr(trl, "LlamaConfig", lambda **shape: LlamaConfig(**shape | sizes))
    monkeypatch.setattr(trl, "product_rate", lambda: 1e9)
    work = trl.real_size(tmp_path)
    assert work.config.model.dtype == "bfloat16" and len(trl.providers(work)) == 1 + (find_spec("trl") is not None)
    body = 576 * (576 + 2 * 192 + 576) + 3 * 576 * 64 + 2 * 576
    assert work.weights == 1000 * 576 + body + 576, "the tied ones once"
    work = replace(work, weights=10**6)
    tables = trl.rows(work, {"a": [Step(2.0, 0.5, 1.9, 100, 125)]})
    assert [table[0].extra for table in tables] == [
        "62 tokens/s, 0 GFLOP/s, 50% of a large product",
        "250 tokens/s, 0 GFLOP/s, 50% of a large product",
        "83 tokens/s, 0 GFLOP/s, 50% of a large product",
    ]


@pytest.mark.slow
def test_study_writes_its_table_and_does_nothing_twice(has_trl, tmp_path, monkeypatch):
    special = [*SMALL, "max_steps=2", "evaluation.eval_limit=4", "evaluation.eval_limit_during=4"]
    monkeypatch.setattr(study, "COMMON", [*study.COMMON, *special])
    monkeypatch.setattr(study, "TRL_BATCH", 4)
    args = argparse.Namespace(output_dir=tmp_path / "runs", results=tmp_path / "results", seeds=1)
    study.run(args)
    lines = (args.results / "trl.md").read_text().splitlines()
    assert sum(line.startswith("| ") and "not reached" in line for line in lines) == len(study.VARIANTS)
    rows = read_metrics(args.output_dir / "TRL-0")
    assert [row["step"] for row in rows] == [0, 2] and rows[1]["time/training_s"] > 0
    summary = json.loads((args.output_dir / "TRL-0" / "summary.json").read_text())
    assert summary["steps"] == 2
    monkeypatch.setattr(study, "train_trl", None)
    study.run(args)
