"""The ceiling of the curriculum: prompts chosen by measured chances."""

import pytest
import torch
from rich.console import Console

from bench.studies.curriculum import RUNS
from python_trainer.config import load_config
from python_trainer.run import Trainer
from python_trainer.run_directory import read_metrics

SHORT = [
    "task.train_size=24", "rollout.prompts_per_step=6", "rollout.num_generations=2", "evaluation.eval_limit=4",
    "evaluation.eval_steps=0", "save.save_steps=1", "save.save_model=false", "accelerators.oracle.least_gain=0",
    "accelerators.oracle.every=3", "accelerators.oracle.tries=8", "accelerators.oracle.floor=0.01",
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """run(folder, steps) -> the trainer of a run that is over."""

    def make(folder, steps, resume=False):
        (name,) = RUNS["p known"]["accelerators.enabled"]
        overrides = [*SHORT, f"accelerators.enabled=[{name}]", f"max_steps={steps}"]
        config = load_config("configs/lattice_paths.yaml", overrides)
        trainer = Trainer(config, tmp_path / folder, console=Console(quiet=True), resume=resume)
        trainer.run()
        return trainer

    return make


def test_prompts_that_would_teach_nothing_are_not_asked(run, tmp_path):
    trainer = run("run", 2)
    known = trainer.accelerators[0].outcomes.known
    share = (known[0] * 8.6 - 0.3) / 8
    assert ((share * 8).round() / 8 - share).abs().max() < 1e-9  # of eight tries
    assert 0 < ((share == 0) | (share == 1)).sum() < 24 and (known[1] > 50).all()
    rows = read_metrics(tmp_path / "run")[1:]
    assert all(row["curriculum/chosen_prompts"] > 0 for row in rows)
    assert min(row["curriculum/asked_low"] for row in rows) > 0.03  # none that was never answered right
    assert rows[0]["tokens/generated"] < 12 * 120 * 1.1  # the tries are not among them


def test_goes_on_as_if_it_had_not_been_interrupted(run):
    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 4, resume=True)
    weights = [list(trainer.policy.model.parameters()) for trainer in (whole, parts)]
    assert all(torch.equal(x, y) for x, y in zip(*weights, strict=True))
