"""Supervised steps on reference answers."""

import io
import json
import shutil
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
import yaml
from conftest import QUIET, full_disk, kill_in_the_fourth_step, merged, train
from rich.console import Console
from safetensors.torch import load_file
from support import assert_equal, write_jsonl
from test_packing import plain_score

from python_trainer.__main__ import main
from python_trainer.command_line.report import find_runs, summary_rows
from python_trainer.command_line.sft import Sft
from python_trainer.config import load_config
from python_trainer.data import Request
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.loop.memory import parse_gpus, plan_memory
from python_trainer.loop.parts import make_engine
from python_trainer.model.optimizer import MasterWeightAdamW
from python_trainer.model.policy import load_policy, recomputes
from python_trainer.rollout.engine import SamplingParams
from python_trainer.run.directory import read_metrics
from python_trainer.run.logger import Logger
from python_trainer.trainer import Trainer


@pytest.mark.parametrize("make", [Sft, Trainer])
def test_arguments_of_a_template_that_no_prompt_meets(lessons, tmp_path, make):
    """A test set with one chat among its texts uses them."""
    (tmp_path / "chat.jsonl").write_text(
        '{"prompt": "A", "answer": "A"}\n{"prompt": [{"role": "user", "content": "B"}], "answer": "B"}\n'
    )
    policy = shutil.copytree(lessons["model"]["path"], tmp_path / "chatting")
    (policy / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if think %}C{% endif %}{% endfor %}"
    )
    for test, expected in (({}, 1), ({"test_path": str(tmp_path / "chat.jsonl")}, 0)):
        changes = {"task": test | {"chat_template_kwargs": {"think": True}}, "model": {"path": str(policy)}}
        console = Console(record=True, width=400, file=io.StringIO())
        make(load_config(merged(lessons, changes)), tmp_path / "run", console=console)
        assert console.export_text().count("task.chat_template_kwargs has no effect: no prompt is") == expected


@pytest.mark.parametrize("make", [Sft, Trainer])
def test_another_default_device_ends_in_one_line(lessons, tmp_path, make):
    with torch.device("meta"), pytest.raises(UserError, match="^torch's default device must be cpu, got meta: [^\n]*$"):
        make(load_config(lessons), tmp_path / "run", console=QUIET)


def config_of(lessons, **changes):
    return load_config(merged(lessons, changes))


def test_an_answer_is_learned_by_heart(lessons, tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(lessons))
    assert main(["sft", "--config", str(path), "--output-dir", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["loss_final"] < summary["loss_first"] / 10
    assert f"loss of the last step {summary['loss_final']:.3f}" in capsys.readouterr().out
    start, final = (summary["evaluation"][part]["held_out_loss"] for part in ("start", "final"))
    assert final != start > 0
    config = config_of(lessons, model={"path": str(tmp_path / "run/model")})
    policy = load_policy(config.model)
    engine = make_engine(config, policy, tmp_path, RankGroup())
    prompts = policy.encode(["ABC", "FGAB"])
    rollouts = engine.generate([Request(ids, max_new_tokens=8) for ids in prompts], SamplingParams(temperature=0))
    assert [policy.decode(row.response_ids) for row in rollouts] == ["CBA", "BAGF"]
    assert [row.finish_reason for row in rollouts] == ["stop", "stop"]
    train(config_of(lessons, max_steps=1), tmp_path / "rl")
    with pytest.raises(UserError, match="written by another version of the trainer or something else: .*sft_answers"):
        Sft(config, tmp_path / "rl", resume=True, console=QUIET)
    assert main(["report", str(tmp_path / "run")]) == 0  # has no accuracy or accelerators to tell
    rows = dict(summary_rows(find_runs([tmp_path / "run"])))
    assert rows["held_out_loss after"] == f"{final:.3f}"
    assert rows["seconds, all"] == f"{summary['training_s'] + summary['eval_s']:.1f}"
    assert main(["report", str(tmp_path)]) == 0  # nor beside a run that has


@pytest.mark.parametrize("micro_batch_tokens", [4, 4096])
def test_gradient_is_that_of_the_mean_cross_entropy_of_answers(lessons, tmp_path, monkeypatch, micro_batch_tokens):
    optimizer = {"micro_batch_tokens": micro_batch_tokens}
    config = config_of(lessons, optimizer=optimizer, sft={"batch_tokens": 999, "epochs": 1})
    run = Sft(config, tmp_path / "run", console=QUIET)
    grads = {}

    def keep(self):
        grads.update({name: p.grad.clone() for name, p in self.params.items()})
        return 0.0

    monkeypatch.setattr(MasterWeightAdamW, "clip_gradients", keep)
    monkeypatch.setattr(MasterWeightAdamW, "step", lambda self, lr_scale: None)
    metrics = run.step(run.batches[0])
    policy = run.policy
    rows = run.rows
    task = config.task.load()
    run.held_out = rows
    policy.model.zero_grad()
    loss = -torch.cat([plain_score(policy, row)[0] for row in rows]).mean()
    assert sum(len(row.ids) for row in rows) == sum(len(e.columns["answer"]) + 1 for e in task.train)  # and the end
    loss.backward()
    assert metrics["sft/loss"] == pytest.approx(loss.item(), abs=1e-6) == run.held_out_loss()["held_out_loss"]
    for name, p in policy.model.named_parameters():
        assert torch.allclose(grads[name], p.grad, atol=1e-6), name


def test_resume_gives_the_same_weights_of_the_same_type(lessons, tmp_path, monkeypatch):
    config = config_of(lessons, sft={"epochs": 9}, save={"save_steps": 2})
    Sft(config, tmp_path / "whole", console=QUIET).run()
    kill_in_the_fourth_step(Sft(config, tmp_path / "cut", console=QUIET))
    with pytest.raises(UserError, match="already holds a run: add --resume"):
        Sft(config, tmp_path / "cut")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    monkeypatch.setattr("python_trainer.model.loading.MAX_BYTES", 0)  # of which auto would now make bfloat16
    resumed = Sft(config, tmp_path / "cut", resume=True, console=QUIET)
    assert resumed.state.step == 2 and resumed.policy.model.dtype == torch.float32
    resumed.run()
    assert_equal(*(load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "cut")))
    rows = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "cut")]
    assert [len(r) for r in rows] == [5, 5]


def test_a_step_whose_row_cannot_be_written_is_taken_again(lessons, tmp_path, monkeypatch):
    original = Logger.log

    def log(self, step, row):
        with full_disk((tmp_path / "metrics.jsonl").stat().st_size + 10) if step == 3 else nullcontext():
            original(self, step, row)

    config = config_of(lessons, sft={"epochs": 9}, save={"save_steps": 2})
    monkeypatch.setattr(Logger, "log", log)
    with pytest.raises(OSError, match="too large"):
        Sft(config, tmp_path, console=QUIET).run()
    monkeypatch.setattr(Logger, "log", original)
    steps = Sft(config, tmp_path, resume=True, console=QUIET).run()["steps"]
    assert [row["step"] for row in read_metrics(tmp_path)] == [*range(1, steps + 1)]


def test_a_resumed_run_trains_on_the_examples_that_follow(lessons, tmp_path):
    """Whatever the batches: the last of an epoch is short, and sft.batch_tokens may change."""

    def examples_of(folder, epochs, batch_tokens, end=None):
        run = Sft(
            config_of(lessons, sft={"epochs": epochs, "batch_tokens": batch_tokens}), folder, resume=True, console=QUIET
        )
        examples, step = [], run.step
        run.step = lambda batch: examples.extend(batch) or step(batch)
        run.run()
        return examples, run

    whole, run = examples_of(tmp_path / "whole", 4, 13)
    parts, runs = zip(*(examples_of(tmp_path / "cut", *sizes) for sizes in ((1, 13), (3, 13), (3, 13), (4, 9))))
    assert list(map(len, parts)) == [4, 8, 0, 4] and [*chain(*parts)] == whole
    assert len(run.batches) < sum(len(run.batches) for run in runs), "short batches stay short"
    rows = read_metrics(tmp_path / "cut")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) == runs[-1].state.step
    assert rows[-1]["learning_rate"] < 0.1 * rows[0]["learning_rate"]


@pytest.mark.parametrize("changes", [{"temperature": 0.6}, {"temperature": 0.6, "num_beams": -1}])
def test_a_generation_config_that_transformers_would_not_write(lessons, tmp_path, changes):
    """Models of the Hub have a temperature without sampling; a run is not to end without its model for that."""
    policy = load_policy(config_of(lessons).model)
    policy.save(tmp_path / "policy")
    path = tmp_path / "policy/generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes | {"do_sample": False}))
    load_policy(config_of(lessons, model={"path": str(path.parent)}).model).save(tmp_path / "again")
    reloaded = load_policy(config_of(lessons, model={"path": str(tmp_path / "again")}).model)
    assert reloaded.eos_token_ids == policy.eos_token_ids


def test_errors_name_the_setting_or_the_line(lessons, tmp_path):
    def refused(match, **changes):
        with pytest.raises(UserError, match=match):
            Sft(config_of(lessons, **changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    message = r"train.jsonl:1 has no text or number 'answer' for sft; its columns: a.*COLUMN"
    refused(message, task={"columns": {"a": "answer"}})
    refused("parallel must be none, got ddp", parallel="ddp")
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "A", "answer": "B\ud83d"}) + "\n")
    refused(r"train.jsonl:1: answer is no Unicode text: .*'\\ud83d' in position 1: surrogates not allowed")
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "A", "answer": "B" * 200}) + "\n")
    refused(r"train.jsonl:1 has 202: more than 128 tokens with its answer, .*; task.overlong=drop leaves")
    refused("task jsonl has no training examples", task={"overlong": "drop"})


def test_examples_that_are_too_long_are_left_out_where_that_is_asked_for(lessons, tmp_path):
    for name in ("train", "test"):
        rows = [{"prompt": "A", "answer": "B" * length} for length in (200, 126, 127)]  # 128 with prompt and end token
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    out = io.StringIO()
    config = config_of(lessons, task={"overlong": "drop"})
    run = Sft(config, tmp_path / "run", console=Console(file=out, width=1000))
    assert [[len(row.response_ids) for row in rows] for rows in (run.rows, run.held_out)] == [[127], [127]]
    for name in ("train", "test"):
        assert f"2 of 3 {name} examples dropped (task.overlong): more than 128 tokens with" in out.getvalue()


def test_a_run_is_resumed_with_what_it_was_begun_with_or_says_so(lessons, run, tmp_path):
    settings = merged(lessons, {"sft": {"epochs": 2, "batch_tokens": 9}, "save": {"save_steps": 1}})
    config = load_config(settings)
    Sft(config, tmp_path / "run", console=QUIET).run()
    code, errors = run(settings, "--resume", "--set", "optimizer.learning_rate=0.1", command="sft")
    assert code == 0 and "resumed with other settings than before: optimizer.learning_rate: 0.02 -> 0.1" in errors
    with pytest.raises(UserError, match=r"sft.epochs must be at least 2, which .*run has begun, got 1: raise it"):
        Sft(config_of(settings, sft={"epochs": 1}), tmp_path / "run", resume=True, console=QUIET)
    with pytest.raises(UserError, match="began with other training examples than the 3 of task jsonl now: resume it"):
        Sft(
            config_of(settings, task={"train_path": f"{tmp_path}/train.jsonl:train[1:]"}), tmp_path / "run", resume=True
        )
    with pytest.raises(UserError, match="is of another model than the settings: .*adapters"):
        Sft(config_of(settings, model={"lora": {"r": 2}}), tmp_path / "run", resume=True, console=QUIET)


@pytest.mark.parametrize("kind", [Sft, Trainer])
def test_a_finished_run_without_a_checkpoint_is_not_begun_anew(lessons, tmp_path, kind):
    config = config_of(lessons, max_steps=1, save={"save_steps": 99})
    Sft(config, tmp_path, console=QUIET).run()
    shutil.rmtree(tmp_path / "checkpoints")
    model = (tmp_path / "model" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="holds a finished run without a checkpoint: choose another"):
        kind(config, tmp_path, resume=True, console=QUIET)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == model


def test_memory_is_planned_without_a_cache(lessons, tmp_path, monkeypatch):
    """Nothing generates; test_memory decides what is recomputed."""
    plans = []

    def plan(config, device, **options):
        plans.append(plan_memory(config, parse_gpus("80"), **options))
        return True

    monkeypatch.setattr("python_trainer.loop.parts.needs_recomputing", plan)
    run = Sft(config_of(lessons, sft={"epochs": 1}), tmp_path / "run", console=QUIET)
    assert recomputes(run.policy.model) and plans[0].parts["KV cache"] == 0
