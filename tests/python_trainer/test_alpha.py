"""Gated extrapolation: what the gate accepts, what a rejection leaves behind, what a resumed run repeats."""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import QUIET, same, train

from bench.faults.training import differences
from python_trainer.accelerators.alpha import Alpha
from python_trainer.accelerators.settings import AlphaSettings
from python_trainer.data import Rollout
from python_trainer.errors import UserError
from python_trainer.model.optimizer import MasterWeightAdamW
from python_trainer.model.settings import OptimizerConfig
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer
from rlkernels.extrapolation import PREDICTORS, Attempt, Comparison, Gate

GATE = 800
HARDNESS = torch.randperm(GATE, generator=torch.Generator().manual_seed(0)).div(GATE).tolist()  # of gate prompts
DIRECTION = torch.outer(torch.linspace(-1, 1, 16), torch.linspace(1, 2, 24))


def progress(model, start):
    """Return how far the projection has come along DIRECTION."""
    return float(((model.proj.weight.detach().float() - start) * DIRECTION).sum() / DIRECTION.square().sum())


def trained(quality, *, dtype=torch.float32, rise=0.03, **settings):
    """Return an accelerator, its context and the model's start, after 12 real Adam steps along one direction.

    The accuracies of the steps are made up: by default they would reach 1 at step 24. That at the gate is ``quality``
    of how far the weights have come.
    """
    torch.manual_seed(0)  # a projection is tracked, an embedding and a vector are not
    layers = {"proj": torch.nn.Linear(24, 16, dtype=dtype), "embed": torch.nn.Embedding(5, 24, dtype=dtype)}
    model = torch.nn.ModuleDict(layers)
    optimizer = MasterWeightAdamW(model, OptimizerConfig(learning_rate=1e-3))
    start = model.proj.weight.detach().float().clone()

    def evaluate_each(split, rows):
        assert split == "gate"
        share = quality(progress(model, start))
        return [float(HARDNESS[i] < share) for i in rows]

    context = SimpleNamespace(
        policy=model, optimizer=optimizer, engine=Mock(), evaluate_each=Mock(side_effect=evaluate_each),
        task=SimpleNamespace(gate=range(GATE)), on_rank0=lambda function: function(), note=Mock(),
    )  # fmt: skip
    context.run = context
    options = {"first_step": 1000, "track_steps": 1, "horizon": 2.0} | settings
    alpha = Alpha(AlphaSettings(**options))
    alpha.begin(context.run)
    for step in range(1, 13):
        context.step = step
        context.telemetry = {}
        alpha.extrapolator.answered = [[step, 0.28 + rise * step, 1.0]]  # of one step alone: nothing is smoothed
        noise = 0.02 * torch.randn(16, 24, generator=torch.Generator().manual_seed(step))
        model.proj.weight.grad = (-DIRECTION + noise).to(dtype)
        model.proj.bias.grad = torch.ones(16, dtype=dtype)
        model.embed.weight.grad = torch.ones(5, 24, dtype=dtype)
        # the update itself, without Adam's signs: the moments still are real
        update = optimizer.masters["proj.weight"].detach() + 1e-3 * (DIRECTION - noise)
        optimizer.clip_gradients()
        optimizer.step(1.0)
        with torch.no_grad():
            for parameter in optimizer.places("proj.weight"):
                parameter.copy_(update)
        alpha.after_update(context)
    return alpha, context, start


def everything(context):
    state = copy.deepcopy(context.optimizer.state_dict())
    return state | {"weights": {n: p.detach().clone() for n, p in context.policy.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
def test_a_better_edit_is_accepted(predictor, dtype):
    alpha, context, start = trained(lambda p: 0.5 + 10 * p, dtype=dtype, predictor=predictor)
    start_progress = progress(context.policy, start)
    state_before = everything(context)
    assert start_progress == pytest.approx(0.012, rel=0.1)
    event = alpha.attempt(context)
    assert event["accepted"] and [t["factor"] for t in event["tries"]] == [1.0] and "refused" not in event
    assert progress(context.policy, start) == pytest.approx(0.024, rel=0.1)
    assert event["tries"][0]["after"] > event["tries"][0]["before"]
    assert context.engine.policy_updated.call_count == context.evaluate_each.call_count, "no cache outlives weights"
    state_after = everything(context)
    assert not state_after["proj.weight"]["exp_avg"].any() and state_before["proj.weight"]["exp_avg"].any()
    for name, key in (("proj.weight", "exp_avg_sq"), ("proj.weight", "step"), ("embed.weight", "exp_avg")):
        assert torch.equal(state_after[name][key], state_before[name][key])
    for name in ("embed.weight", "proj.bias"):
        assert torch.equal(state_after["weights"][name], state_before["weights"][name]), "not a projection: as trained"
    assert alpha.extrapolator.anchor == 12
    assert len(alpha.extrapolator.trajectory) == 0, "tracking starts again from there"
    param = context.policy.proj.weight
    master = context.optimizer.masters["proj.weight"]
    edited = master.detach().clone()
    assert torch.equal(master.to(dtype), param)
    assert dtype == torch.float32 or not torch.equal(master, param.float()), "far below the spacing of bfloat16"
    param.grad = torch.zeros_like(param)
    context.optimizer.clip_gradients()
    context.optimizer.step(1.0)
    assert torch.equal(master, edited), "no gradient, no momentum: the master stays where the edit put it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_one_parameter_are_tracked_and_changed_each_by_itself(dtype):
    model = torch.nn.ParameterDict({"experts": torch.zeros(3, 16, 24, dtype=dtype)})
    optimizer = MasterWeightAdamW(model, OptimizerConfig(learning_rate=1e-3))
    run = SimpleNamespace(optimizer=optimizer, note=Mock())
    alpha = Alpha(AlphaSettings(track_steps=1, first_step=1000))
    alpha.begin(run)
    model["experts"].grad = torch.ones_like(model["experts"])
    optimizer.clip_gradients()
    optimizer.step(1.0)
    alpha.extrapolator.answered = [[1, 0.5, 1.0]]
    alpha.after_update(SimpleNamespace(run=run, step=1, telemetry={}))
    assert [*alpha.extrapolator.trajectory.base] == ["experts[0]", "experts[1]", "experts[2]"]
    for place in optimizer.places("experts[1]"):
        with torch.no_grad():
            place.fill_(7)
    optimizer.forget_momentum(["experts[1]"])
    moments = optimizer.adamw.state[optimizer.masters["experts"]]["exp_avg"]
    for tensor in (optimizer.masters["experts"], model["experts"]):
        assert (tensor[1] == 7).all() and not (tensor[[0, 2]] == 7).any()
    assert not moments[1].any() and moments[[0, 2]].all()
    run.note.assert_called_once_with("alpha: every weight is a projection")


def test_too_far_is_shrunk_until_it_helps():
    alpha, context, start = trained(lambda p: 0.9 - 0.5 * abs(p - 0.018) / 0.006)
    event = alpha.attempt(context)
    assert event["accepted"] and [t["factor"] for t in event["tries"]] == [1.0, 0.5]
    assert progress(context.policy, start) == pytest.approx(0.018, rel=0.1)


def test_refusals_cost_no_evaluation_and_are_tried_again():
    alpha, context, _ = trained(lambda p: 0.5, rise=0.0027, first_step=9, every=50)  # 0.02 within eight steps
    assert [e.get("refused") for e in alpha.extrapolator.events] == ["flat accuracy"] * 2 + [None]
    assert alpha.extrapolator.events[0]["detail"].startswith("rose by") and context.evaluate_each.call_count == 4
    assert [e["step"] for e in alpha.extrapolator.events] == [9, 10, 11] and alpha.extrapolator.next_attempt == 61


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_papers_preset_goes_once_and_keeps_rank_1_alone(dtype):
    """It extrapolates without a gate to accuracy 1, at twice the steps; the scale is that of the whole update."""
    alpha, context, start = trained(lambda p: 1 / 0, dtype=dtype, preset="paper", first_step=12)
    (event,) = alpha.extrapolator.events
    assert event["accepted"] and event["tries"] == [] and context.telemetry["alpha/accepted"] == 1
    context.evaluate_each.assert_not_called()
    assert context.engine.policy_updated.call_count == 1 and alpha.extrapolator.next_attempt > 1000
    u, s, vh = torch.linalg.svd(context.optimizer.masters["proj.weight"].detach() - start)
    noise = torch.stack([torch.randn(16, 24, generator=torch.Generator().manual_seed(i)) for i in range(1, 13)])
    moved = 1e-3 * (12 * DIRECTION - 0.02 * noise.sum(0))
    assert s[1] < 1e-5 * s[0] and float(s[0]) == pytest.approx(2 * float(moved.norm()), rel=0.02)
    leading = torch.linalg.svd(moved)
    assert abs(float(u[:, 0] @ leading.U[:, 0])) > 0.999 and abs(float(vh[0] @ leading.Vh[0])) > 0.999
    assert not everything(context)["proj.weight"]["exp_avg"].any() and alpha.extrapolator.anchor == 12
    AlphaSettings(preset="paper").check_task(SimpleNamespace(gate=()))


def test_the_papers_preset_goes_nowhere_where_the_accuracy_is_flat():
    """It would divide by the slope of the accuracy, which is 0."""
    alpha, context, start = trained(lambda p: 1 / 0, rise=0.0, preset="paper", first_step=11)
    assert [(e["step"], e["refused"]) for e in alpha.extrapolator.events] == [(11, "no skill"), (12, "no skill")]
    assert context.telemetry["alpha/refused"] == 1 and not context.engine.policy_updated.called
    assert progress(context.policy, start) == pytest.approx(0.012, rel=0.1)


def test_rounds_of_one_step_count_as_one_and_stored_answers_do_not():
    """Stored answers are right ones only: they would pass for a rise of the accuracy."""
    alpha, context, _ = trained(lambda p: 0.5)
    right = alpha.extrapolator.answered[-1][1]
    for accuracies, cap in (([1.0, 0.0], None), ([1.0, 1.0], None), ([1.0] * 9, 2.0)):
        alpha.collect(context, [Rollout([], [], accuracy=a, importance_cap=cap) for a in accuracies])
    assert alpha.extrapolator.answered == [[12, right + 3, 1 + 4]]


def test_rewards_that_take_the_place_of_accuracies_start_a_new_trajectory():
    alpha, context, _ = trained(lambda p: 0.5)
    assert len(alpha.extrapolator.trajectory) > 3
    for _ in range(2):
        alpha.collect(context, [Rollout([], [], accuracy=1.0, filter_score=0.25)])
    assert len(alpha.extrapolator.trajectory) == 0 and alpha.extrapolator.anchor == 11
    assert alpha.extrapolator.answered == [[12, 0.5, 2]]


def test_the_level_adds_up_over_all_comparisons():
    gate = Gate(0.05)
    after = [1.0] * 9 + [0.0] * 4
    before = [0.0] * 9 + [0.0] * 4  # e = (2^10 - 1) / 10
    outcomes = [gate.compare(after, before) for _ in range(200)]
    assert outcomes[0].accepted and not outcomes[1].accepted and outcomes[0].e_value == 102.3
    assert outcomes[0].needed == 40 and sum(1 / o.needed for o in outcomes) <= 0.05


def test_the_gate_rarely_accepts_what_is_no_better():
    generator = torch.Generator().manual_seed(0)
    accepted = 0
    for _ in range(300):
        gate = Gate(0.05)
        current, *draws = (torch.rand(4, 500, generator=generator) < 0.7).tolist()
        changed = (torch.rand(3, 500, generator=generator) < 0.2).tolist()
        candidates = [[n if c else b for b, n, c in zip(current, *rows)] for rows in zip(draws, changed)]
        accepted += any(
            gate.compare_in_parts(
                lambda n, candidate=candidate: candidate[:n], lambda n, current=current: current[:n], 500
            ).accepted
            for candidate in candidates
        )
    assert accepted <= 0.05 * 300


def test_the_gate_looks_no_further_than_it_must():
    hard = torch.randperm(2048, generator=torch.Generator().manual_seed(1)).div(2048).tolist()

    def compare(share_before, share_after):
        looked_at = []

        def answers(share):
            return lambda n: looked_at.append(n) or [float(value < share) for value in hard[:n]]

        comparison = Gate(0.05).compare_in_parts(answers(share_after), answers(share_before), 2048)
        looks = (256, 512, 768, 1024, 1536, 2048)
        assert looked_at == [n for n in looks[: len(looked_at) // 2] for _ in "ab"]
        return comparison.accepted, comparison.prompts

    assert compare(0.5, 0.6) == (True, 256)
    assert compare(0.5, 0.5) == (False, 256) and compare(0.5, 0.4) == (False, 256)
    assert compare(0.5, 0.515)[1] > 256, "not yet enough, and on the way to it"


@pytest.mark.parametrize(("prompts", "available"), [(1, 1), (6, 6), (80, 3), (800, 800), (80, 85), (512, 2048)])
def test_candidates_share_the_answers_of_the_present_weights(prompts, available):
    """Weights in the model are always those that answer; an attempt begins where the one before it ended, and goes on
    over all that are available."""
    gate = Gate(0.05, position=available - 1)
    weight = torch.tensor(0.0)
    evaluated = []

    def evaluate(rows):
        evaluated.extend((weight.item(), row) for row in rows)
        return [0.0] * len(rows)

    judge = partial(Attempt(prompts=prompts).judge, gate, {"w": torch.tensor(8.0)}, {"w": [weight]})
    tries = judge(evaluate, available=available)
    assert [t["factor"] for t in tries] == [1.0, 0.5, 0.25] and gate.comparisons == 3
    count = -(-min(prompts, available) // 8)  # no prompt is evidence twice
    rows = [(available - 1 + i) % available for i in range(count)]
    rows_by_weight = {
        value: [row for weight_value, row in evaluated if weight_value == value] for value, _ in evaluated
    }
    assert rows_by_weight == dict.fromkeys((0.0, 8.0, 4.0, 2.0), rows)
    assert gate.position == (available - 1 + count) % available
    with pytest.raises(ValueError, match="one number for each"):
        judge(lambda rows: [1.0] * (len(rows) + 1), available=available)


def accept(gate, evaluate_after, evaluate_before, prompts):
    """Evaluate all answers, and accept any candidate."""
    assert len(evaluate_after(prompts)) == len(evaluate_before(prompts)) == prompts
    return Comparison(0.0, 1.0, prompts, 1.0, 1.0, True)


@pytest.fixture
def alpha_config(make_config, gate_task):
    def make(**changes):
        settings = {"track_steps": 1, "first_step": 4, "every": 2, "refuse": False} | changes.pop("alpha", {})
        return make_config(**changes, task=gate_task, accelerators={"enabled": ["alpha"], "alpha": settings})

    return make


def test_tracking_and_rejected_attempts_change_nothing(alpha_config, make_config, gate_task, tmp_path):
    plain = train(make_config(max_steps=5, task=gate_task), tmp_path / "plain")
    trainer = Trainer(alpha_config(max_steps=5), tmp_path / "alpha", console=QUIET)
    trainer.run_context.evaluate_each = lambda split, rows=None: [0.0] * (len(rows) if rows else 6)  # never better
    trainer.run()
    assert same(plain, trainer)
    alpha = trainer.accelerators[0]
    assert [len(e["tries"]) for e in alpha.extrapolator.events] == [3] and alpha.extrapolator.events[0]["step"] == 4
    assert alpha.extrapolator.anchor == 0 and len(alpha.extrapolator.trajectory) == 5, "it goes on where it was"
    rows = read_metrics(tmp_path / "alpha")
    assert rows[4]["alpha/accepted"] == 0 and rows[4]["alpha/gate_s"] > 0 and rows[1]["alpha/track_s"] > 0


@pytest.mark.parametrize(
    ("steps", "interrupted_at", "changes", "jumps", "tracked"),
    [(8, 5, {}, [4, 7], [1]), (4, 2, {"track_steps": 3, "first_step": 99}, [], [3])],
    ids=["across a jump, with the trajectory half full", "before anything is tracked"],
)
def test_an_interrupted_run_resumes_to_the_same_state(
    alpha_config, tmp_path, monkeypatch, steps, interrupted_at, changes, jumps, tracked
):
    """The base is what the weights were at the start, not where the run was interrupted."""
    monkeypatch.setattr(Gate, "compare_in_parts", accept)
    config = alpha_config(max_steps=steps, alpha=changes)
    uninterrupted = train(config, tmp_path / "whole").accelerators[0]
    assert [e["step"] for e in uninterrupted.extrapolator.events if e["accepted"]] == jumps
    assert uninterrupted.extrapolator.anchor == max([0, *jumps])
    assert uninterrupted.extrapolator.trajectory.state_dict()["steps"].tolist() == tracked
    train(config.model_copy(update={"max_steps": interrupted_at}), tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    sections = [text.split()[0] for text in differences(tmp_path / "whole", tmp_path / "parts")]
    assert sections == ["evaluations", "rows"], "the one at the end of the first part"


def test_answers_at_the_gate_count_as_generated(alpha_config, tmp_path):
    config = alpha_config(max_steps=4, evaluation={"temperature": 0.0})
    generated = []  # tokens by call, each of which takes a second
    trainer = Trainer(config, tmp_path / "run", console=QUIET, timer=lambda: float(len(generated)))
    generate = trainer.engine.generate

    def record(requests, sampling):
        rollouts = generate(requests, sampling)
        if sampling.temperature:  # else it is an evaluation
            generated.append(sum(len(rollout.ids) for rollout in rollouts))
        return rollouts

    trainer.engine.generate = record
    summary = trainer.run()
    assert len(generated) > 4 and summary["accelerators"]["alpha"]["attempts"], "four steps and a gate"
    assert summary["generated_tokens"] == sum(generated)
    rows = read_metrics(tmp_path / "run")
    assert [row["tokens/generated"] for row in rows[1:]] == [*generated[:3], sum(generated[3:])]
    assert rows[4]["time/rollout_s"] == len(generated) - 3, "a rate has their tokens and their seconds"


def test_a_task_without_gate_prompts_is_named_before_anything_is_loaded(make_config, tmp_path):
    config = make_config(accelerators={"enabled": ["alpha"]}, model={"path": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match=r"alpha needs prompts .* the task has 0: .*task\.gate_size"):
        Trainer(config, tmp_path / "run", console=QUIET)


def test_gate_prompts_that_are_too_long_are_named_before_the_run(alpha_config, tmp_path):
    config = alpha_config()
    path, _, line = config.task.load().gate[3].place.rpartition(":")
    lines = Path(path).read_text().splitlines()
    lines[int(line) - 1] = '{"prompt": "' + "A" * 117 + '"}'  # of 128 tokens 12 are for the answer
    Path(path).write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=rf"with_gate\.jsonl:{line} has 117 tokens"):
        Trainer(config, tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()
