"""Group sizes, cuts and signals of the ablations of the curriculum."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.studies.curriculum import RUNS, smaller_policy
from bench.studies.cuts import GUESS, fitted
from bench.studies.ground import Ground
from bench.studies.group_sizes import FEWEST, MOST, sizes
from bench.studies.signals import FreeOutcomes, WeighedOutcomes, gradient_weight
from python_trainer.accelerators.curriculum.outcomes import Outcomes
from python_trainer.config import load_config
from python_trainer.data import Rollout
from python_trainer.run import Trainer
from python_trainer.run_directory import read_metrics

SHORT = [
    "task.train_size=12", "rollout.prompts_per_step=6", "rollout.num_generations=4", "evaluation.eval_limit=4",
    "evaluation.eval_steps=0", "save.save_steps=1", "save.save_model=false",
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """run(name, folder, steps) -> the trainer of a run that is over, and its metrics."""

    def make(name, folder, steps, resume=False):
        overrides = [f"{key}={value}" for key, value in RUNS[name].items()]
        overrides = [text.replace("['", "[").replace("']", "]") for text in overrides]
        config = load_config("configs/lattice_paths.yaml", [*SHORT, *overrides, f"max_steps={steps}"])
        trainer = Trainer(config, tmp_path / folder, console=Console(quiet=True), resume=resume)
        trainer.run()
        return trainer, read_metrics(tmp_path / folder)[1:]

    return make


def weights(trainer):
    return list(trainer.policy.model.parameters())


def test_a_smaller_policy_is_made_once(tmp_path, monkeypatch):
    asked = []

    def make(argv):
        asked.append(argv)
        (tmp_path / "lattice_paths" / "small-policy").mkdir(parents=True)

    monkeypatch.setattr("tools.policies.lattice_paths.main", make)
    ground = Ground("lattice_paths", tmp_path, tmp_path / "records")
    folder = str(tmp_path / "lattice_paths" / "small-policy")
    assert smaller_policy(ground) == smaller_policy(ground) == folder
    assert asked == [["--size", "small", "--output", folder]]
    assert smaller_policy(Ground("sums", tmp_path, tmp_path / "records")) == "small"


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40),
    st.integers(2, 32),
    st.sampled_from(["value", "rarity"]),
)
def test_sizes_share_the_answers_of_a_step(chances, each, rule):
    found = sizes(chances, each * len(chances), rule)
    assert sum(found) == each * len(chances) and all(FEWEST <= size <= MOST for size in found)
    assert sizes([chances[0]] * 5, 5 * each, rule) == [each] * 5


def test_answers_go_where_they_are_worth_most():
    assert sizes([0.5, 0.99, 0.5], 24, "value") == [11, 2, 11]
    assert sizes([0.1, 0.2, 0.4], 28, "rarity") == [16, 8, 4]
    assert sizes([0.0001, 0.5], 100, "rarity") == [MOST, MOST]


@pytest.mark.parametrize("name", ["sizes by value", "sizes by value, p known"])
def test_groups_of_a_step_are_of_unlike_size(run, name):
    trainer, rows = run(name, "run", 3)
    assert all(row["tokens/generated"] <= 24 * 120 for row in rows)
    if name == "sizes by value":
        trainer.accelerators[0].outcomes.p = lambda keys: torch.linspace(0.01, 0.5, len(keys), dtype=torch.float64)
    asked = trainer.accelerators[0].choose(trainer.context(4), 6)
    counts = [group.num_samples for group in asked]
    assert sum(counts) == 24 and len(set(counts)) > 1


def test_the_curve_of_cuts_is_where_groups_were_right():
    assert fitted(torch.zeros(0, 3, dtype=torch.float64)).tolist() == GUESS.tolist()
    shares = torch.linspace(0.05, 1, 20, dtype=torch.float64)
    seen = torch.stack([shares, torch.full_like(shares, 1000), 1000 * (1 - 6 * shares).sigmoid()], dim=1)
    assert torch.allclose(fitted(seen), torch.tensor([1.0, -6.0], dtype=torch.float64), atol=0.05)


def test_a_group_begins_behind_a_right_answers_first_part(run):
    for name in ("a cut where p is 1/2", "a random cut", "one more visit, no cut"):
        trainer, _ = run(name, name, 4)
        curriculum = trainer.accelerators[0]
        right = Rollout([1], list(range(100)), prompt_key=3, accuracy=1.0)
        curriculum.outcomes.p = lambda keys: torch.where(keys == 3, 0.1, 0.5)
        curriculum.stored.by_prompt = {}
        curriculum.stored.add([right], 4)
        curriculum.seen = torch.tensor([[0.5, 1000, 500], [0.25, 1000, 750]], dtype=torch.float64)
        *plain, last = curriculum.choose(trainer.context(5), 6)
        assert last.prompt_key == 3 and list(last.prefix_ids) == list(range(len(last.prefix_ids)))
        assert last.max_new_tokens == 120 - len(last.prefix_ids) and not any(group.prefix_ids for group in plain)
        if name == "a cut where p is 1/2":
            assert abs(len(last.prefix_ids) - 50) <= 5
        assert (len(last.prefix_ids) == 0) == (name == "one more visit, no cut")


def test_cuts_go_on_as_if_they_had_not_been_interrupted(run):
    whole, _ = run("a random cut", "whole", 6)
    run("a random cut", "parts", 3)
    parts, _ = run("a random cut", "parts", 6, resume=True)
    assert all(torch.equal(x, y) for x, y in zip(weights(whole), weights(parts), strict=True))
    assert torch.equal(whole.accelerators[0].visited, parts.accelerators[0].visited)
    assert torch.equal(whole.accelerators[0].seen, parts.accelerators[0].seen)


def test_undecided_answers_weigh_more():
    sure, torn = ([math.log(p)] * 10 for p in (0.99, 0.5))
    assert gradient_weight(Rollout([1], [2] * 10, logprobs=sure)) == pytest.approx(10 * 0.01**2, rel=1e-3)
    assert gradient_weight(Rollout([1], [2] * 10, logprobs=torn)) == pytest.approx(2.5)
    weighed, plain, keys = WeighedOutcomes([5, 50], 60), Outcomes([5, 50], 60), torch.tensor([0, 1])
    for step in range(1, 9):
        for outcomes in (weighed, plain):
            outcomes.advance(step)
            for key, logprobs in enumerate([sure, torn]):
                answers = [Rollout([1], [2] * 10, logprobs=logprobs, prompt_key=key, accuracy=i % 2) for i in range(4)]
                outcomes.learn(answers)
    weight = weighed.signal(keys) / plain.signal(keys)
    assert weight[1] > 100 * weight[0]
    assert FreeOutcomes([5, 50], 60).cost(keys).tolist() == [1, 1]


def test_signals_choose_from_the_first_step(run):
    for name in ("from the first step, no cost", "from the first step, weighed by G"):
        _, rows = run(name, name, 2)
        assert all(row["curriculum/chosen_prompts"] > 0 for row in rows)
