"""The study of gradients: seconds by tokens, costs in seconds, what a kind of batch brings."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from bench.studies.gradients import (
    BY_SECONDS,
    BY_TOKENS,
    OURS,
    UNIFORM,
    Batch,
    as_broad,
    breadth,
    explained,
    fit,
    gradient_by_token,
    look,
    over_uniform,
    seconds_of,
    table,
)
from python_trainer.accelerators.curriculum.accelerator import Curriculum
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.config import load_config
from python_trainer.data import Rollout
from python_trainer.run import Trainer

TOKENS, TRAINED = "tokens/generated", "tokens/trained"


def test_seconds_are_explained_by_what_makes_them():
    rows = [
        {TOKENS: 1000.0 + 7 * i, TRAINED: 300.0 + 211 * (i % 5), "time/rollout_s": 0.1 + 7e-4 * i, "time/train_s": 0.0}
        for i in range(40)
    ]
    for row in rows:
        row["time/train_s"] = 3e-4 * row[TRAINED]
    assert fit(rows, [TOKENS, TRAINED]).tolist() == pytest.approx([1e-4, 3e-4])
    assert explained(rows, [TOKENS, TRAINED]) == pytest.approx(1.0)
    assert explained(rows, [TOKENS]) < 0.2


def curriculum_of(outcomes):
    """After groups of 8 of which so many were right, prompt by prompt."""
    curriculum = Curriculum(CurriculumSettings(database=None))
    curriculum.begin(SimpleNamespace(prompts=[[1] * 9] * len(outcomes), output_dir=Path(), console=None))
    for _ in range(4):
        for key, right in enumerate(outcomes):
            group = [Rollout([1], [5] * 20, prompt_key=key, accuracy=float(i < right)) for i in range(8)]
            curriculum.outcomes.learn(group)
    return curriculum


def test_what_teaches_nothing_costs_its_generation_only():
    curriculum = curriculum_of([0, 8, 4, 4])
    keys = torch.arange(4)
    tokens = curriculum.outcomes.cost(keys)
    sure, open_ = (seconds_of(curriculum, [1e-3, 2e-3], 8)(keys) / tokens).tolist()[::2]
    assert 1e-3 < sure < 1.8e-3 and 2.7e-3 < open_ <= 3e-3


def test_a_choice_by_another_cost_is_as_broad():
    curriculum = curriculum_of([0, 1, 4, 8] * 10)
    own, keys = curriculum.settings, torch.arange(40)
    cost = seconds_of(curriculum, [1e-3, 2e-3], 8)
    signal = curriculum.outcomes.signal(keys)
    wanted = breadth(curriculum.shares(signal, curriculum.outcomes.cost(keys)))
    sharpness = as_broad(curriculum, cost)
    assert curriculum.settings is own and sharpness > own.sharpness  # what teaches costs more
    curriculum.settings = own.model_copy(update={"sharpness": sharpness})
    assert breadth(curriculum.shares(signal, cost(keys))) == pytest.approx(wanted, rel=1e-3)


def batches(mean, tokens, noise, count=100, width=30):
    generator = torch.Generator().manual_seed(tokens)
    direction = torch.zeros(width)
    direction[0] = mean
    return [
        Batch(direction + noise * torch.randn(width, generator=generator), tokens, tokens // 2, 1.0, 2.0, 16)
        for _ in range(count)
    ]


def test_what_gradients_bring_is_their_part_along_that_of_uniform_prompts():
    found = {UNIFORM: batches(1.0, 1000, 0.5), "half": batches(1.0, 500, 0.5), "steep": batches(2.0, 999, 0.5)}
    gains = over_uniform(found, gradient_by_token(found))
    assert gains[UNIFORM] == (1.0, 0.0)
    assert gains["half"][0] == pytest.approx(2.0, abs=4 * gains["half"][1]) and 0.02 < gains["half"][1] < 0.4
    square = 30 * 0.25
    assert gains["steep"][0] == pytest.approx(4 * (1 + square) / (4 + square), rel=0.2)
    aside = {UNIFORM: found[UNIFORM], "against": batches(-1.0, 1001, 0.5)}
    assert over_uniform(aside, gradient_by_token(aside))["against"][0] == pytest.approx(-1.0, rel=0.2)
    rows = table(found)
    assert rows[2] == "| uniform | 16.0 | 1,000 | 500 | 1.00 | 1.00 +- 0.00 | 1.00 +- 0.00 | 1.00 +- 0.00 |"
    assert rows[3].startswith("| half | 16.0 | 500 | 250 | 1.00 | 2.00 +- 0.00 | 1.00 +- 0.00 | ")


@pytest.mark.slow
def test_looking_changes_no_weight(tmp_path):
    sizes = ["model.path=small", "task.train_size=8", "task.test_size=8", "rollout.prompts_per_step=4",
             "rollout.num_generations=4", "rollout.max_completion_length=24", "max_steps=3"]  # fmt: skip
    config = load_config("configs/sums.yaml", [*OURS, *sizes])
    options = {"resume": True, "console": Console(quiet=True)}
    Trainer(config, tmp_path / "run", **options).run()
    trainer = Trainer(config, tmp_path / "run", **options)
    state = {name: value.clone() for name, value in trainer.policy.model.state_dict().items()}
    found = look(trainer, 2, [1e-4, 1e-4])
    assert [*found] == [UNIFORM, BY_TOKENS, BY_SECONDS] and all(len(kind) == 2 for kind in found.values())
    assert all(torch.equal(value, state[name]) for name, value in trainer.policy.model.state_dict().items())
    assert all(batch.prompts == 4 and batch.tokens > 0 for batch in found[UNIFORM])
    assert not torch.equal(found[UNIFORM][0].gradient, found[UNIFORM][1].gradient)
    assert all(master.grad is None for master in trainer.learner.optimizer.masters.values())
