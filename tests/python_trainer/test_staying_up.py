"""Numbers that are not finite, failures and signals: nothing is lost, and the message says what to do."""

import os
import signal
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from conftest import QUIET, assert_goes_on, digits, saved, train
from support import assert_equal

from bench.faults.training import differences
from python_trainer.__main__ import main
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.command_line import commands
from python_trainer.errors import NotFinite, UserError
from python_trainer.model.optimizer import MasterWeightAdamW
from python_trainer.model.settings import OptimizerConfig
from python_trainer.process.signals import SIGNALS, StopSignal
from python_trainer.rollout.paged.engine import PagedEngine
from python_trainer.run.directory import EVALUATIONS, read_evaluations, read_metrics
from python_trainer.trainer import Trainer


def test_an_optimizer_step_that_is_not_finite_changes_nothing():
    for dtype, value in ((torch.float32, torch.nan), (torch.bfloat16, torch.inf)):
        model = torch.nn.Linear(2, 2).to(dtype)
        optimizer = MasterWeightAdamW(model, OptimizerConfig())
        weights = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        with pytest.raises(NotFinite, match="the norm of the gradient is (nan|inf)"):
            optimizer.clip_gradients()
        assert_equal(list(model.parameters()), weights)
        assert all(p.grad is None for p in model.parameters()) and not optimizer.adamw.state


@pytest.mark.parametrize("algorithm", [{}, {"advantage": "gae", "scale_rewards": "none", "num_minibatches": 2}])
def test_a_loss_that_is_not_finite_ends_the_run(make_config, tmp_path, monkeypatch, algorithm):
    monkeypatch.setattr("python_trainer.tasks.rewards.LARGEST", 1e300)  # else the reward itself is refused

    def huge(prompts, completions, completion_ids):
        """Return one reward that overflows float32 from the third step on: its group's advantages are NaN."""
        rewards = digits(prompts, completions, completion_ids)
        if reward.call_count >= 4:  # the evaluation at the start was the first call
            rewards[5], rewards[-4:] = 1e300, [1.0] * 4  # and a group teaches nothing
        return rewards

    reward = Mock(side_effect=huge, wraps=digits, __name__="digits")
    monkeypatch.setattr("conftest.digits", reward)
    config = make_config(max_steps=6, algorithm=algorithm, save={"save_steps": 1})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    message = "the loss is (nan|inf|-inf): optimizer.learning_rate 0.01 may be too high, after 2 steps; step 2 is saved"
    with pytest.raises(UserError, match=message):
        trainer.run()
    assert saved(tmp_path / "run")[-1] == "step-000002"
    assert all(p.isfinite().all() for p in trainer.policy.model.parameters())
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2]
    reward.side_effect = None
    train(config, tmp_path / "run", resume=True)  # the reward was mended
    assert read_metrics(tmp_path / "run")[-1]["step"] == 6


def test_the_first_signal_is_noted_and_the_second_interrupts(capsys):
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with StopSignal() as stop:
        assert stop.name is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.name == "SIGTERM" and "finishing the step" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


def test_ctrl_c_ends_the_command_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "parse_arguments", Mock(side_effect=KeyboardInterrupt))
    assert main(["report", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted: a run continues from its newest checkpoint, if there is one\n"


def test_after_a_signal_the_command_ends_with_0_and_goes_on_to_the_same_weights(run, tmp_path, monkeypatch):
    original = Trainer.step

    def step(self, number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)  # while the step is at work
        return original(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", step)
        code, errors = run({"max_steps": 5, "save": {"save_steps": 0}, "accelerators": {"enabled": ["rpo"]}})
    assert code == 0 and "SIGINT: stopped after step 3, which is saved; a resumed run continues from it" in errors
    assert saved(tmp_path / "run") == ["step-000003"]
    assert_goes_on(run, tmp_path)


def test_a_reward_may_change_the_working_folder(make_config, tmp_path, monkeypatch):
    def wander(prompts, completions, completion_ids):
        os.chdir(tmp_path / "sandbox")
        return digits(prompts, completions, completion_ids)

    (tmp_path / "sandbox").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("conftest.digits", wander)
    train(make_config(accelerators={"rhyme": {"database": "history.db"}}), "run")
    assert saved(tmp_path / "run") and read_metrics(tmp_path / "run")[-1]["step"] == 4
    assert len(RetrospectiveDatabase(str(tmp_path / "history.db")).runs()) == 1
    assert not any((tmp_path / "sandbox").iterdir())


def test_a_module_of_the_users_may_turn_gradients_off(make_config, tmp_path):
    train(make_config(), tmp_path / "plain")
    torch.set_grad_enabled(False)
    try:
        train(make_config(), tmp_path / "other")
    finally:
        torch.set_grad_enabled(True)
    assert differences(tmp_path / "plain", tmp_path / "other") == []


def test_another_default_dtype_is_refused(make_config, tmp_path):
    trainer = Trainer(make_config(), tmp_path / "run", console=QUIET)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(UserError, match=r"must be float32 while the trainer runs, got torch.bfloat16"):
            trainer.run()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("at", "error", "accelerators"), [
    (4, SystemExit(7), ["rpo", "drafts"]),  # in step 3, after the evaluation at the start
    (6, ValueError("no verdict"), []),  # in the evaluation after step 4
    (8, ValueError("no verdict"), []),  # in the one at the end
])  # fmt: skip
def test_a_reward_that_fails_leaves_the_last_finished_step(make_config, tmp_path, monkeypatch, at, error, accelerators):
    monkeypatch.setattr("python_trainer.accelerators.drafts.measure_overhead", lambda engine: 20.0)
    options = {"accelerators": {"enabled": accelerators}, "save": {"save_steps": 0}, "evaluation": {"eval_steps": 4}}
    config = make_config(max_steps=5, **options)
    reward = Mock(wraps=digits, __name__="digits")
    monkeypatch.setattr("conftest.digits", reward)
    train(config, tmp_path / "whole")
    reward.side_effect = [DEFAULT] * (at - 1) + [error]
    with pytest.raises(UserError, match="reward function digits") as raised:
        train(config, tmp_path / "parts")
    reward.side_effect = None
    saved_step = {4: 2, 6: 4, 8: 5}[at]
    assert raised.value.__notes__ == [f"step {saved_step} is saved: --resume continues from it"]
    assert [row["step"] for row in read_metrics(tmp_path / "parts")] == list(range(saved_step + 1))
    assert read_evaluations(tmp_path / "parts").keys() == {"start"}
    with (tmp_path / "parts" / EVALUATIONS).open("a") as file:
        file.write('{"step": ')  # as a kill leaves it
    notifications = []
    with monkeypatch.context() as patched:
        patched.setattr(
            Trainer, "notify", lambda trainer, method, *arguments: notifications.append((method, arguments[0]))
        )
        trainer = train(config, tmp_path / "parts", resume=True)
    assert notifications.count(("on_step", 5)) == notifications.count(("on_evaluate", 5)) == 1
    assert [row[0] for row in trainer.state.evaluations] == [0, 4, 5]
    assert read_evaluations(tmp_path / "parts").keys() == {"start", "final"}
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    last = read_metrics(tmp_path / "parts")[-1]
    calls = reward.call_count
    assert last["step"] == 5 and last["eval/accuracy"] == trainer.state.evaluations[-1][1]
    train(config, tmp_path / "parts", resume=True)
    assert reward.call_count == calls  # the checkpoint holds the evaluation


def test_out_of_memory_is_said_in_one_line(run, monkeypatch):
    original = Trainer.generate

    def generate(self, requests, seed):
        return original(self, requests, seed) if self.state.step < 2 else torch.empty(1 << 60)

    monkeypatch.setattr(Trainer, "generate", generate)
    code, errors = run()
    assert (
        code == 2 and "error: out of memory; " in errors and "step 2 is saved" in errors and "Traceback" not in errors
    )


def test_a_signal_while_the_model_is_written_lets_it_finish(make_config, tmp_path, monkeypatch, capsys):
    trainer = Trainer(make_config(max_steps=1), tmp_path / "run", console=QUIET)
    original = trainer.policy.save

    def save(folder):
        os.kill(os.getpid(), signal.SIGTERM)
        original(folder)

    monkeypatch.setattr(trainer.policy, "save", save)
    assert trainer.run()["steps"] == 1
    assert "SIGTERM: finishing" in capsys.readouterr().err and (tmp_path / "run" / "model").is_dir()


@pytest.mark.parametrize("part", ["Prompts", "Learner", "RunContext", "Trainer.finished"])
def test_a_set_up_that_fails_closes_its_engine(make_config, tmp_path, monkeypatch, part):
    """Servers and memory of the engine would otherwise live as long as the process."""
    close = Mock()
    monkeypatch.setattr(PagedEngine, "close", close)
    monkeypatch.setattr(f"python_trainer.trainer.{part}", Mock(side_effect=UserError("it cannot be made")))
    with pytest.raises(UserError, match="^it cannot be made$"):
        train(make_config(), tmp_path / "run")
    close.assert_called_once()
