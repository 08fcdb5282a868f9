"""Rivals of extrapolated weights: averages, stretches, candidates judged on training batches, and the tables."""

import json
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from bench.studies import alpha_rivals_report as report
from bench.studies.alpha import leading_parts
from bench.studies.alpha_rivals import Averages, attempts, average, averages_file, settings, shares_of, stretched
from bench.studies.on_batches import CAP, OnBatches, OnBatchesSettings
from python_trainer.data import Rollout
from python_trainer.model.optimizer import PolicyOptimizer
from python_trainer.model.settings import OptimizerConfig


def test_averages_of_weights():
    steps = [{"w": torch.tensor([float(i), 1.0])} for i in range(1, 25)]
    assert average(steps, [1.0] * 8)["w"].tolist() == pytest.approx([20.5, 1.0])
    assert average(steps, [3.0, 1.0])["w"].tolist() == pytest.approx([23.25, 1.0])
    moving = torch.tensor(1.0)
    for i in range(2, 25):
        moving = 0.8 * moving + 0.2 * i
    found = average(steps, shares_of(report.AVERAGES[1], 24))["w"]
    assert found.tolist() == pytest.approx([float(moving), 1.0], abs=0.1)  # but for the share of the first weights
    assert average(steps, shares_of(report.AVERAGES[0], 24))["w"][0] == 20.5
    with pytest.raises(ValueError, match="at least 8, as many as shares, got 3"):
        average(steps[:3], shares_of(report.AVERAGES[0], 3))


def test_averages_are_kept_when_the_last_step_is_done(tmp_path):
    model = torch.nn.Linear(2, 1, bias=False)
    trainer = SimpleNamespace(policy=SimpleNamespace(model=model), config=SimpleNamespace(max_steps=9), folder=tmp_path)
    for step in range(1, 10):
        assert len(list(tmp_path.iterdir())) == step - 1
        model.weight.data.fill_(step)
        Averages().on_step(trainer, step, {})  # another one after an interruption
    assert len(list(tmp_path.iterdir())) == len(report.AVERAGES)
    for name, mean in zip(
        report.AVERAGES, (5.5, sum(0.8**i * (9 - i) for i in range(9)) / sum(0.8**i for i in range(9)))
    ):
        assert load_file(averages_file(tmp_path, name, 9))["weight"].tolist() == [[pytest.approx(mean)] * 2]


def test_stretches():
    generator = torch.Generator().manual_seed(0)
    base = {"proj": torch.randn(12, 20, generator=generator)}
    final = {"proj": base["proj"] + 0.1 * torch.randn(12, 20, generator=generator), "rest": torch.ones(3)}
    whole = {"proj": final["proj"] - base["proj"]}
    for rank in (1, 4, 12):
        parts = leading_parts(final, base, rank)
        assert int(torch.linalg.matrix_rank(parts["proj"], rtol=1e-4)) == rank
        assert torch.equal(stretched(final, parts, 1.0)["proj"], final["proj"])
        apart = (stretched(final, parts, 2.5)["proj"] - stretched(final, whole, 2.5)["proj"]).norm()
        assert (apart < 1e-5) == (rank == 12) and apart < 1.5 * whole["proj"].norm()
    assert torch.allclose(stretched(final, whole, 2.5)["proj"], base["proj"] + 2.5 * whole["proj"], atol=1e-6)


def test_settings_say_what_differs():
    low, tuned = (settings(rate, 1, 24, []) for rate in (report.LOW, report.TUNED))
    assert (low.optimizer.learning_rate, tuned.optimizer.learning_rate, tuned.seed) == (3e-5, 2e-4, 1)
    assert low.callbacks and not settings("6e-5", 1, 24, []).callbacks
    for name, margin in report.GATES.items():
        config = settings(report.TUNED, 0, 48, [], *attempts(name), "callbacks=[]")
        (chosen,) = config.accelerators.chosen()
        assert (chosen.first_step, chosen.every, chosen.horizon, chosen.track_steps) == (6, 12, 2.0, 2)
        assert getattr(chosen, "margin", None) == margin and not config.callbacks


def batch(rates):
    """Four answers to each prompt, of which such a share is right."""
    return [
        Rollout([1], [2], logprobs=[0.0], group=group, prompt_key=group, accuracy=float(i < 4 * rate))
        for group, rate in enumerate(rates)
        for i in range(4)
    ]


@pytest.fixture
def waiting():
    """waiting(margin) -> an accelerator whose candidate waits for its batch, its context, the weights before."""

    def make(margin, steps=6):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"proj": torch.nn.Linear(24, 16), "embed": torch.nn.Embedding(5, 24)})
        optimizer = PolicyOptimizer(model, OptimizerConfig())
        context = SimpleNamespace(optimizer=optimizer, telemetry={}, step=0, max_steps=steps + 1, updates=0)
        context.engine = SimpleNamespace(policy_updated=lambda: setattr(context, "updates", context.updates + 1))
        alpha = OnBatches(OnBatchesSettings(track_steps=1, first_step=6, smoothing=4, margin=margin))
        direction = torch.outer(torch.linspace(-1, 1, 16), torch.linspace(1, 2, 24))
        for step in range(1, steps + 1):
            context.step = step
            alpha.plan(context, [])
            alpha.collect(context, batch([0.25, 0.5, 0.5, 0.25] if step < 4 else [0.5, 0.75, 0.5, 0.75]))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step(1e-3)
            optimizer.write({"proj.weight": model["proj"].weight.detach() + 1e-2 * direction})
            before = model["proj"].weight.detach().clone()
            alpha.after_update(context)
        context.step, context.model = steps + 1, model
        return alpha, context, before

    return make


# the four steps before have 0.56 in the mean, the batch 0.5 +- 0.16
@pytest.mark.parametrize(("margin", "accepted"), [(-1.0, True), (0.0, False), (1.0, False)])
def test_the_next_batch_judges(waiting, margin, accepted):
    alpha, context, before = waiting(margin)
    weight, moments = context.model["proj"].weight, context.optimizer.state_dict()
    candidate = weight.detach().clone()
    assert not torch.equal(candidate, before) and context.updates == 1
    copied = OnBatches(alpha.settings)
    copied.load_state_dict(alpha.state_dict())
    rollouts = batch([0.25, 0.5, 0.25, 1.0])
    assert alpha.collect(context, rollouts) is rollouts
    (event,) = alpha.events
    assert event["accepted"] == accepted
    assert event["tries"] == [{"factor": 1.0, "before": 0.5625, "after": 0.5, "batches": 4}]
    assert torch.equal(weight, candidate if accepted else before)
    assert {r.importance_cap for r in rollouts} == ({None} if accepted else {CAP})
    assert bool(moments["proj.weight"]["exp_avg"].any()) != accepted and moments["embed.weight"]["exp_avg"].any()
    assert (alpha.anchor, len(alpha.trajectory)) == ((6, 0) if accepted else (0, 6))
    assert alpha.answered[-1][0] == (7 if accepted else 6), "answers that a candidate has drawn tell of nobody else"
    assert alpha.before is None
    with torch.no_grad():
        weight.copy_(candidate)
    copied.collect(context, batch([0.25, 0.5, 0.25, 1.0]))  # as after a resume
    assert torch.equal(weight, candidate if accepted else before) and copied.events == alpha.events


def test_no_candidate_is_left_unjudged(waiting):
    alpha, context, _ = waiting(-1.0, steps=6)
    alpha.next_attempt, alpha.before = 7, None
    context.step = context.max_steps
    alpha.after_update(context)
    assert alpha.before is None and len(alpha.events) == 1


def cost(attempts, seconds=30.0):
    return {"cpu_s": seconds, "gate_cpu_s": 4.0, "counts": {"generated_tokens": 12345}, "attempts": attempts}


def made(folder, name, seed, rights, numbers):
    """A part whose answers are right for the first so many of 2,000 prompts."""
    home = folder / name / f"seed-{seed}"
    (home / "run").mkdir(parents=True)
    answers = {key: (numpy.arange(2000) < right).astype(numpy.uint8) for key, right in rights.items()}
    save_file(answers, home / "answers.safetensors")
    (home / "results.json").write_text(json.dumps({"commit": "abc"} | numbers))
    rows = [
        {"step": step, "eval/accuracy": accuracy} for step, accuracy in ((0, 0.5), (12, 0.75), (24, 0.8), (48, 0.9))
    ]
    (home / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_tables(tmp_path):
    ranks = {f"rank {k}": right for k, right in ((1, 1560), (4, 1580), (16, 1600))} | {"whole update": 1600}
    stretches = {f"{name}, {factor} times": right for name, right in ranks.items() for factor in report.STRETCHES}
    norms = {f"norm, {name}": 0.7 for name in ranks}
    averages = {f"24 steps, {name}": 1450 for name in report.AVERAGES}
    refused = [{"step": step, "accepted": False, "refused": "flat accuracy"} for step in (18, 20)]
    judged = {"step": 6, "accepted": True, "tries": [{"factor": 1.0, "before": 0.5, "after": 0.6}]}
    for seed in (0, 1):
        made(tmp_path, "rate-3e-5", seed, {"24 steps": 1500 + seed, **averages, **stretches},
             {"24 steps_cost": cost([]), **norms})  # fmt: skip
        made(tmp_path, "rate-2e-4", seed, {"24 steps": 1800, "48 steps": 1900},
             {"24 steps_cost": cost([]), "48 steps_cost": cost([], 35.0)})  # fmt: skip
        made(tmp_path, "a free gate", seed, {"48 steps": 1880}, {"48 steps_cost": cost([judged, *refused], 60.0)})
    report.write(tmp_path, tmp_path / "results")
    page = (tmp_path / "results" / "alpha_rivals.md").read_text()
    for words in (
        "commit abc.",
        "| at 3e-5 | 0: 0.750, 1: 0.750 | 0.750 | 30, 30 |",
        "| ... moving average, 0.8 a step | 0: 0.725, 1: 0.725 | 0.725 |  |",
        "| ... the whole update stretched 2.5 times | 0: 0.800, 1: 0.800 | 0.800 |  |",
        "| rank 1, 2.5 times | 70 % | 0: 0.780, 1: 0.780 | 0.780 | 60 % |",
        "| 1 | plain | 12: 0.750, 24: 1.000 | 0.950 | 57 | 12,345 | - |",
        "| 0 | a free gate | 12: 0.750, 24: 0.800 | 0.940 | 56 | 12,345 | step 6: accepted at 1 (gate 0.500 -> 0.600); "
        "step 18: refused: flat accuracy (2 times) |",
    ):
        assert words in page, words
    assert "at 6e-5" not in page and "lattice_paths" not in page and "Averages of" in page
