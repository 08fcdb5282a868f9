"""Steps against TRL's trainer: both trainers run, on equal settings, and every figure gets its row."""

import importlib
import itertools
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from bench import _runner, _trl, tree_attention, trl, trl_update
from bench.__main__ import main
from bench._trl import Step
from bench._turns import Turns
from bench.studies import trl as study
from bench.studies.harness import Harness
from python_trainer import load_config
from python_trainer.errors import UserError
from python_trainer.model.hub import SHIPPED
from rlkernels.prefix_cache import TreeLayout, reference

SMALL = ["task.variant=short", "task.train_size=8", "task.test_size=8", "model.path=small",
         "rollout.prompts_per_step=2", "rollout.num_generations=4", "rollout.max_completion_length=16"]  # fmt: skip


class EnoughSteps(Exception):
    """End a trainer that trains without end."""


@pytest.mark.parametrize("run", [_trl.run_ours, _trl.run_trl])
def test_each_turn_is_a_step_and_reports_it(trl_integration, tmp_path, run):
    config = load_config("configs/sums.yaml", [*trl.COMMON, *SMALL])
    pipe = Mock()
    pipe.send.side_effect = None, None, EnoughSteps  # after the reports of two steps
    with pytest.raises((EnoughSteps, UserError)):
        run(Turns(pipe), config.model_dump(mode="json"), tmp_path / "run")
    ready, *steps = (call.args[0] for call in pipe.send.call_args_list)
    assert ready is None and len(steps) == 2
    for step in steps:
        assert 0 < step.rollout_s < step.seconds and 8 <= step.generated_tokens <= 8 * 16


def test_trl_gets_the_settings_of_the_run(trl_integration, tmp_path):
    changes = ["optimizer.weight_decay=0.1", "algorithm.epsilon_high=0.28", "algorithm.delta=1.5", "rollout.top_k=7",
               "optimizer.warmup_steps=5", "optimizer.learning_rate=2e-4"]  # fmt: skip
    config = load_config("configs/sums.yaml", [*SMALL, *changes])
    trainer = _trl.make_grpo_trainer(config, tmp_path, batch=4)
    expected = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "top_k": 7,
        "max_completion_length": 16, "temperature": 1.0, "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28,
        "delta": 1.5, "beta": 0.0, "learning_rate": 2e-4, "weight_decay": 0.1, "max_grad_norm": 1.0, "bf16": False,
        "warmup_steps": 5,
    }  # fmt: skip
    assert {name: getattr(trainer.args, name) for name in expected} == expected
    assert trainer.model.dtype.itemsize == 4 and len(trainer.train_dataset) == 8
    prompt, answer = (trainer.train_dataset[0][name] for name in ("prompt", "answer"))
    assert trainer.reward_funcs[0]([prompt], [f"A:{answer}"], [[1]], answer=[answer]) == [1.0]


@pytest.fixture
def first_step(trl_integration, tmp_path, monkeypatch):
    """Return a function that runs the first step of a trainer of TRL with random answers, and what it computed."""
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    policy = AutoConfig.from_pretrained(SHIPPED / "sums", dtype="float32", **layers)
    settings = ["rollout.prompts_per_step=2", "rollout.max_completion_length=9"]
    values = trl.random_policy(tmp_path / "policy", policy, settings).model_dump(mode="json")
    utils, peer = (importlib.import_module(name) for name in ("trl.trainer.utils", "trl"))
    head = utils._ChunkedLogProbFunction
    score, train = peer.GRPOTrainer._get_per_token_logps_and_entropies, peer.GRPOTrainer.training_step

    def run(train_by_trl):
        seen = SimpleNamespace()

        def apply_head(hidden, *arguments):
            seen.head_rows = len(hidden)
            return head.apply(hidden, *arguments)

        def score_and_note(self, model, ids, *arguments, **options):
            seen.ids = ids
            seen.logprobs, *others = score(self, model, ids, *arguments, **options)
            return seen.logprobs, *others

        def train_and_note(self, *arguments):
            seen.loss = train(self, *arguments)
            seen.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
            return seen.loss

        monkeypatch.setattr(utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=apply_head))
        monkeypatch.setattr(peer.GRPOTrainer, "_get_per_token_logps_and_entropies", score_and_note)
        monkeypatch.setattr(peer.GRPOTrainer, "training_step", train_and_note)
        pipe = Mock()
        pipe.send.side_effect = None, EnoughSteps
        with pytest.raises(EnoughSteps):
            train_by_trl(Turns(pipe), values, tmp_path / train_by_trl.__name__)
        seen.step = pipe.send.call_args.args[0]
        return seen

    return run


def test_the_head_on_answers_changes_no_result_of_trl(first_step):
    plain, on_answers = first_step(_trl.run_trl), first_step(_trl.run_trl_on_answers)
    answer_tokens = plain.step.generated_tokens
    assert answer_tokens == on_answers.step.generated_tokens == on_answers.head_rows < plain.head_rows
    assert torch.equal(plain.ids, on_answers.ids)
    assert plain.logprobs.count_nonzero() == answer_tokens
    assert all(gradient.any() for gradient in plain.gradients.values())
    for name in ("logprobs", "loss", "gradients"):
        torch.testing.assert_close(getattr(on_answers, name), getattr(plain, name), rtol=1e-4, atol=1e-6)


def test_rows(tmp_path):
    work = replace(trl.small(tmp_path), name="some")
    step_reports = {"a": [Step(2.0, 0.5, 100, 60), Step(4.0, 1.0, 300, 60)]}
    step, rollout, update = (row for row in trl.rows(work, step_reports) if not row.missing)
    assert [row.op for row in (step, rollout, update)] == ["training step", "rollout of a step", "update of a step"]
    assert [row.median_s for row in (step, rollout, update)] == [3.0, 0.75, 2.25]
    assert step.peak_bytes == 300 and rollout.peak_bytes is None and step.extra == "20 tokens/s"
    assert step.shape == "some: 16 x 8, up to 64"


def test_only_workloads_that_are_picked_train(tmp_path, monkeypatch, capsys):
    works = [replace(trl.small(tmp_path / name), name=name) for name in ("first", "second")]
    trained = []
    monkeypatch.setattr(trl, "workloads", lambda folder, quick: works)
    monkeypatch.setattr(trl, "providers", lambda work, folder, server: trained.append(work.name))
    monkeypatch.setattr(trl, "measure", lambda *_: {"a trainer": [Step(2.0, 0.5, 100, 60)]})
    assert main(["trl", "--quick", "--only", "second: 16 x 8"]) == 0
    output = capsys.readouterr().out
    assert trained == ["second"] and output.count("second: 16 x 8, up to 64") == 3 and "first" not in output


def report_generations(turns, values, folder):
    turns.end_turn()
    turns.end_turn(Step(float(values["rollout"]["num_generations"]), 0.5, None, 1))


@pytest.mark.slow
def test_trainers_take_turns_and_their_settings_reach_them(tmp_path):
    config = trl.small(tmp_path).config
    workers = {name: trl.Worker(report_generations, config.model_dump(mode="json"), tmp_path / name) for name in "ab"}
    step_reports = trl.measure(workers, 0, 1)
    assert {name: [step.seconds for step in steps] for name, steps in step_reports.items()} == {"a": [8.0], "b": [8.0]}
    assert not any(worker.process.is_alive() for worker in workers.values())


def test_rows_of_real_size_say_what_share_of_the_rate_they_reach(tmp_path, monkeypatch):
    sizes = {"num_hidden_layers": 1, "vocab_size": 1000, "intermediate_size": 64}
    monkeypatch.setattr(trl, "LlamaConfig", lambda **shape: LlamaConfig(**shape | sizes))
    monkeypatch.setattr(trl, "matmul_rate", lambda dtype, n: 1e9)
    work = trl.real_size(tmp_path)
    by_trl = [] if find_spec("trl") is None else [f"TRL {version('trl')}", f"TRL {version('trl')}, head on answers"]
    assert work.config.model.dtype == "bfloat16" and [*trl.providers(work, tmp_path)] == [*by_trl, "python_trainer"]
    layer_weights = 576 * (576 + 2 * 192 + 576) + 3 * 576 * 64 + 2 * 576
    assert work.weights == 1000 * 576 + layer_weights + 576, "the tied ones once"
    work = replace(work, weights=10**6)
    rows = trl.rows(work, {"a": [Step(2.0, 0.5, 100, 125)]})
    extras = [f"{rate} tokens/s, 0 GFLOP/s, 50% of a large product" for rate in (62, 250, 83)]
    assert [row.extra for row in rows if not row.missing] == extras


@pytest.mark.slow
def test_the_study_trains_by_trl(trl_integration, tmp_path):
    quick_settings = ["max_steps=2", "evaluation.eval_steps=1", "task.test_size=4", "evaluation.eval_limit_during=4"]
    harness = Harness(study.STUDIES[0], tmp_path, [*SMALL, *quick_settings], ["TRL"])
    harness.run_all(1)
    (row,) = harness.rows(1)
    assert row["arm"] == "TRL" and row["tokens"] >= 16 and row["seconds"] > 0
    assert [evaluation[0] for evaluation in row["evaluations"]] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["system prompt 8, ", "1 rollouts of 2 turns"])
def test_all_arms_of_an_update_compute_the_gradients_of_trl(trl_integration, part):
    (case,) = (case for case in trl_update.cases(quick=True) if case.shape.startswith(part))
    gradients = {name: call() for name, call in case.providers.items()}
    assert gradients.keys() == trl_update.ARMS.keys() - {"TRL"}
    for name, arm_gradients in gradients.items():
        assert len(arm_gradients) == len(gradients[case.reference])
        for gradient, expected in zip(arm_gradients, gradients[case.reference]):
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5, msg=name)


def test_an_arm_that_leaves_its_batch_to_trl_fails(trl_integration, monkeypatch):
    wrong_attention = Mock(attend=lambda query, key, value: query * 0)
    monkeypatch.setattr(trl_update, "copied", lambda layout, scale: wrong_attention)
    (case,) = (case for case in trl_update.cases(quick=True) if case.shape.startswith("system prompt 8, "))
    with pytest.raises(RuntimeError, match="paths copied left the batch to TRL"):
        case.providers["paths copied"]()


def test_all_layouts_of_a_tree_have_the_same_results():
    """The first copy of a token counts, and the gradients of all copies are those of the token."""
    samples = tree_attention.make_turns(itertools.count(), 2, 3, 4, 3, 2)
    rows = {row.provider: row for row in _runner.run_case(tree_attention.tree_case("turns", samples), 0.001)}
    assert rows.pop("torch SDPA, padded").match == "" and len(rows) == 3
    assert all(float(row.match) < 1e-5 for row in rows.values()), rows


def test_the_copies_of_paths_are_attended_to(trl_integration):
    """Check the arm that stands for TRL's asynchronous trainer."""
    layout = TreeLayout.from_sequences([[1, 2, 3], [1, 2, 4, 5], [6]])
    query, key, value = (torch.randn(layout.num_tokens, heads, 4) for heads in (4, 2, 2))
    output = trl_update.attend_with_copies(layout, 0, query, key, value, 0.5, None)
    torch.testing.assert_close(output, reference.tree_attention(query, key, value, layout, 0.5)[0])
