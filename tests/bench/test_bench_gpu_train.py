"""The training on a GPU, as far as it runs without one."""

import hashlib
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import save_tiny_policy

from bench.gpu import subjects, train
from bench.gpu.proven import prove
from python_trainer.accelerators import ACCELERATORS
from python_trainer.config import dump_config, load_config
from python_trainer.errors import UserError
from python_trainer.run_directory import read_metrics
from python_trainer.tasks.settings import load_task
from python_trainer.tasks.sums import SumsSettings
from rlkernels.backend import OPS, choose
from tools.policies import sums as pretrain

CUDA = torch.device("cuda")
SETTINGS = train.ROOT / "bench/gpu/train.yaml"


@pytest.fixture
def dry(tmp_path):
    """Runs the dry run -> (exit code, record)."""

    def run(*arguments, folder="work"):
        record = tmp_path / "record.json"
        options = ["--device", "cpu", "--work-dir", str(tmp_path / folder), "--output", str(record)]
        code = train.main([*options, *arguments])
        return code, json.loads(record.read_text()) if record.exists() else None

    return run


def test_what_passed_is_what_auto_takes_on_a_gpu(monkeypatch):
    found = {"dtw": ("triton", "cuda"), "paged_attention": ("triton",)}
    for op in OPS:
        monkeypatch.setitem(OPS, op, OPS[op])
    assert choose("paged_attention", CUDA) == "torch"
    prove(found)
    assert choose("paged_attention", CUDA) == choose("dtw", CUDA) == "triton"
    assert choose("write_kv", CUDA) == "torch" and choose("paged_attention", torch.device("cpu")) == "cpu"


def test_settings_fit_task_and_policy():
    config = load_config(SETTINGS)
    task, longest = config.task.load(), config.rollout.max_completion_length
    with torch.device("meta"):
        room = pretrain.new_policy("large").config.max_position_embeddings
    for example in [*task.train, *task.gate, *task.test]:
        terms = [int(term) for term in example.prompt[:-1].split("+")]
        assert len(pretrain.solution(terms)) < longest and len(example.prompt) + longest <= room
    # what pretraining keeps away from holds all that is asked here
    shipped = SumsSettings(variant=config.task.variant).load()
    kept = {example.prompt for example in [*shipped.train, *shipped.gate, *shipped.test]}
    assert {example.prompt for example in [*task.train, *task.gate, *task.test]} <= kept
    assert config.accelerators.alpha.gate_prompts <= len(task.gate)
    assert config.accelerators.alpha.first_step < config.max_steps


@pytest.mark.slow
def test_dry_run_stops_goes_on_and_ends(dry, tmp_path, monkeypatch, capsys):
    settings = ["--variants", "baseline,all", "--set", "max_steps=40"]
    baseline = tmp_path / "work/runs/baseline"

    # the time is up as soon as two steps are logged
    monkeypatch.setattr(train, "now", lambda: 90.0 if len(read_metrics(baseline)) > 2 else 0.0)
    code, record = dry(*settings, "--budget-seconds", "100")
    assert code == 0 and not record["finished"] and record["left_out"] == ["baseline", "all"] and not record["failed"]
    stopped = record["runs"]["baseline"]
    assert 2 <= stopped["steps"] < 40 and [part["end"] for part in stopped["parts"]] == ["stopped by the budget"]
    assert stopped["last_row"]["step"] == stopped["steps"] and not stopped["finished"]
    assert record["policy"]["parameters"] > 0 and len(record["policy"]["settled"]) >= 1

    monkeypatch.undo()
    (tmp_path / "work").rename(tmp_path / "moved")
    code, record = dry(*settings, "--budget-seconds", "500", folder="moved")
    assert code == 0 and record["finished"] and not record["left_out"]
    first, second = record["runs"]["baseline"]["parts"]
    assert second["from_step"] == first["to_step"] == stopped["steps"] and second["to_step"] == 40
    assert second["backends"]["paged_attention"] == second["backends"]["block_pool"] == "cpu"
    assert second["commit"] == first["commit"] == record["commit"] and second["end"] == "finished"
    for name, accelerators in (("baseline", set()), ("all", set(ACCELERATORS.names()))):
        run = record["runs"][name]
        assert run["finished"] and run["steps"] == run["summary"]["steps"] == 40
        assert run["summary"]["accelerators"].keys() == accelerators
        assert run["generated_tokens"] == run["summary"]["generated_tokens"] > 0
        assert run["rollout_s"] == pytest.approx(run["summary"]["rollout_s"], rel=0.01)
        assert 0 < run["rollout_share"] < 1 and run["rollout_tokens_per_second"] > run["tokens_per_second"] > 0
        assert run["tokens_per_second"] == pytest.approx(run["generated_tokens"] / run["training_s"])
        assert [step for step, _ in run["accuracies"]] == [0, 40]
    assert record["device"] == "cpu" and record["versions"]["torch"] == torch.__version__
    assert record["settings"]["max_steps"] == 40 and record["proven"] == {}
    assert "plain torch everywhere" in capsys.readouterr().out

    # the record is made of what lies in the folder: nothing is left to train
    monkeypatch.setattr(train, "child", None)
    assert dry(*settings, folder="moved")[1]["runs"] == record["runs"]
    assert dry("--variants", "baseline", folder="moved")[0] == 2
    assert "holds a run with other settings" in capsys.readouterr().err


def test_a_failed_run_is_tried_once_more_without_proven_backends(tmp_path, monkeypatch):
    trusted = []

    def child(command, *_):
        trusted.append(json.loads(command[-1])["proven"])
        return -11, ""

    monkeypatch.setattr(train, "child", child)
    config = load_config(SETTINGS)
    proven, scale = {"paged_attention": ["triton"]}, subjects.Sums.cuda
    arguments = (config, tmp_path, "all", proven, "abc", train.now() + 1000, scale)
    assert not train.train(*arguments)
    assert not train.train(*arguments)  # and no third time
    assert trusted == [{"paged_attention": ["triton"]}, {}]
    parts = train.figures(tmp_path)["parts"]
    assert [part["message"] for part in parts] == ["the process died with code -11"] * 2


@pytest.mark.parametrize(("ended", "end"), [
    ("killed at the end of the budget", "failed"),  # without a step since the start
    ("stopped by the budget", "stopped by the budget"),
    (train.HUNG, "failed"),
])  # fmt: skip
def test_what_counts_as_a_failure(tmp_path, monkeypatch, ended, end):
    monkeypatch.setattr(train, "child", lambda *_: (-9, ended))
    monkeypatch.setattr(train, "PATIENCE_S", 0.0)
    config = load_config(SETTINGS)

    def run():
        return train.run_variant(config, tmp_path, "rpo", {}, "abc", 0, 0)["end"]

    assert run() == end
    monkeypatch.setattr(train, "PATIENCE_S", 240.0)  # what little time there was says nothing
    assert run() == ("failed" if ended == train.HUNG else ended)
    monkeypatch.setattr(train, "PATIENCE_S", 0.0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time/training_s": 0, "total/generated_tokens": 0}\n')
    assert run() == ("failed" if ended == train.HUNG else ended)
    (tmp_path / "checkpoints/step-000005").mkdir(parents=True)  # of an earlier call, and nothing since
    assert run() == end


def test_runs_that_never_come_to_a_step_end_the_rest(dry, tmp_path, monkeypatch):
    tried = []

    def child(command, *_):
        tried.append(command)
        if "tools.policies.sums" in command:
            folder = Path(command[-1])
            folder.mkdir(parents=True)
            (folder / pretrain.FACTS).write_text("{}")
            return 0, ""
        return 1, ""

    monkeypatch.setattr(train, "child", child)
    code, record = dry()
    assert code == 1 and len(tried) == 1 + 2 * 2
    assert record["failed"] == list(train.VARIANTS[:2]) and record["left_out"] == list(train.VARIANTS[2:])


def test_too_little_time_leaves_everything_out(dry, monkeypatch):
    monkeypatch.setattr(train, "child", lambda *_: (-9, "killed at the end of the budget"))
    code, record = dry("--budget-seconds", "1", "--variants", "baseline,rpo")
    assert code == 1 and record["failed"] == ["policy"] and record["left_out"] == ["baseline", "rpo"]
    assert record["policy"] == {"failed": "killed at the end of the budget"}
    monkeypatch.setattr(subjects.Sums, "cpu", replace(subjects.Sums.cpu, policy_s=5))
    code, record = dry("--budget-seconds", "1", "--variants", "baseline")
    assert code == 0 and record["left_out"] == ["policy", "baseline"] and not record["finished"]


def test_child_that_ignores_the_signal_is_killed():
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code, ended = train.child(["-c", script], train.now() + 0.5, train.now() + 1.5)
    assert code == -9 and ended == "killed at the end of the budget"


def test_child_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "PATIENCE_S", 3.0)
    file = tmp_path / "metrics.jsonl"
    script = f"import time; time.sleep(0.3); open({str(file)!r}, 'w').close(); time.sleep(60)"
    code, ended = train.child(["-c", script], train.now() + 30, train.now() + 40, file)
    assert code == -9 and ended.startswith(train.HUNG) and file.exists()


def test_bad_arguments_are_named(dry, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        (["--work-dir", "w"], "no CUDA device; --device cpu is a dry run"),
        (["--work-dir", "w", "--device", "cpu", "--checks", "none.json"], "there is no file none.json"),
        ([], "--work-dir"),
    ):
        with pytest.raises(SystemExit):
            train.main(arguments)
        assert message in capsys.readouterr().err
    (tmp_path / "checks.jsonl").write_text('{"kind": "call", "gpu": "NVIDIA X", "commit": "abc"}\n')
    for arguments, message in (
        (["--variants", "baseline,fast"], "must hold names out of"),
        (["--set", "max_steps=0"], "max_steps"),
        (["--subject", "gsm8k"], "--weights must be a folder for --subject gsm8k, got None"),
        (
            ["--subject", "gsm8k", "--weights", str(tmp_path), "--data", str(tmp_path)],
            "no file train.jsonl in",
        ),
        (["--checks", str(tmp_path / "checks.jsonl")], "is of NVIDIA X at abc, not of cpu"),
    ):
        assert dry(*arguments)[0] == 2
        assert message in capsys.readouterr().err


def test_other_settings_in_the_folder_are_refused(tmp_path):
    config = load_config(SETTINGS)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    elsewhere = train.variant_config(config, "baseline", tmp_path, "auto")
    train.check_same(tmp_path, elsewhere)
    with pytest.raises(UserError, match="other settings"):
        train.check_same(tmp_path, train.variant_config(config, "rpo", tmp_path, "auto"))


@pytest.fixture
def word_problems(tmp_path):
    """Options for a tiny model on problems that it can read."""
    save_tiny_policy(tmp_path / "weights")
    (tmp_path / "data").mkdir()
    for name, count in (("train", 40), ("test", 8)):
        rows = [{"question": f"{i}A{i}", "answer": f"A{i}\n#### {i}"} for i in range(count)]
        (tmp_path / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--subject", "gsm8k", "--weights", str(tmp_path / "weights"), "--data", str(tmp_path / "data")]


@pytest.mark.slow
def test_a_language_model_is_warmed_up_and_trained(dry, tmp_path, word_problems, monkeypatch):
    code, record = dry(*word_problems, "--variants", "baseline,drafts", "--budget-seconds", "500")
    assert code == 0 and record["finished"] and not record["failed"]
    found = record["policy"]
    assert found["examples"] == 8 and found["held_out"] == 8 and found["held_out_loss_final"] is not None
    for run in record["runs"].values():
        assert run["finished"] and run["steps"] == 3 and run["generated_tokens"] > 0
    assert record["settings"]["task"]["name"] == "gsm8k"
    # warmed up once; what is finished stays
    monkeypatch.setattr(train, "child", None)
    assert dry(*word_problems, "--variants", "baseline,drafts")[1]["runs"] == record["runs"]


def test_a_warm_up_that_hangs_or_fails_is_named(dry, word_problems, monkeypatch):
    watched = []

    def child(command, stop_at, kill_at, file=None):
        watched.append((command, file))
        return (-9, f"{train.HUNG}, for 240 s") if len(watched) == 1 else (2, "")

    monkeypatch.setattr(train, "child", child)
    for reason in ("killed because no step came, for 240 s", "python -m python_trainer sft ended with code 2"):
        code, record = dry(*word_problems, "--variants", "baseline")
        assert code == 1 and record["policy"] == {"failed": reason} and record["left_out"] == ["baseline"]
    command, file = watched[0]
    assert command[:3] == ["-m", "python_trainer", "sft"] and "save.save_steps=0" in command
    assert file.name == "metrics.jsonl" and str(file.parent) in command


def test_a_model_travels_in_pieces(tmp_path):
    whole, sent = bytes(range(256)) * 9, tmp_path / "sent"
    for number, start in enumerate((0, 1000, 2000)):
        (sent / str(number)).mkdir(parents=True)
        (sent / str(number) / f"m.gguf.0{number}").write_bytes(whole[start : start + 1000])
    (sent / "m.gguf.sha256").write_text(f"{hashlib.sha256(whole).hexdigest()}  m.gguf\n")
    found = subjects.whole_model(sent, tmp_path / "weights")
    assert found.name == "m.gguf" and found.read_bytes() == whole
    (sent / "2/m.gguf.02").unlink()
    assert subjects.whole_model(sent, tmp_path / "weights") == found, "put together once"
    with pytest.raises(UserError, match=r"pieces of m.gguf \(m.gguf.00, m.gguf.01; 2,000 bytes\) do not give"):
        subjects.whole_model(sent, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(UserError, match="no model, no GGUF file and no pieces"):
        subjects.whole_model(sent / "0", tmp_path / "again")
    assert subjects.whole_model(tmp_path / "weights", tmp_path / "again") == (tmp_path / "weights").resolve()


def test_settings_of_the_language_model(word_problems):
    options = dict(zip(word_problems[::2], map(Path, word_problems[1::2])))
    subject = subjects.Gsm8k(Namespace(weights=options["--weights"], data=options["--data"], device="cuda"))
    config = load_config(subject.settings, subject.given())
    command = subject.maker(options["--data"] / "policy", subject.given())
    lessons = load_task(load_config(subject.settings, command[command.index("--set") + 1 :]).task)
    assert [e.prompt for e in lessons.train] == [f"{i}A{i}\n" for i in range(20)], (
        "the whole half that is not trained on"
    )
    assert len(load_task(config.task.model_copy(update={"train_size": None, "gate_size": 0})).train) == 20
    assert not lessons.gate
    assert config.accelerators.alpha.gate_prompts <= config.task.gate_size
    assert config.accelerators.alpha.first_step < config.max_steps
