"""Training from Python: objects in the place of names, callbacks."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import QUIET, digits, train

from python_trainer import Callback, Example, Task, TaskSettings, Trainer, load_config
from python_trainer.callbacks import CALLBACKS
from python_trainer.checkpoint import list_checkpoints
from python_trainer.errors import UserError
from python_trainer.run_directory import read_metrics

ROOT = Path(__file__).parents[2]


class Log(Callback):
    def __init__(self):
        self.calls = []

    def on_rollouts(self, trainer, step, rollouts):
        self.calls.append(("rollouts", step, len(rollouts)))

    def on_step(self, trainer, step, metrics):
        self.calls.append(("step", step, metrics["reward"]))

    def on_evaluate(self, trainer, step, metrics):
        self.calls.append(("evaluate", step, metrics["eval/accuracy"]))

    def on_save(self, trainer, step, checkpoint):
        self.calls.append(("save", step, checkpoint.is_dir()))

    def on_end(self, trainer, summary):
        self.calls.append(("end", summary["steps"]))


def test_callbacks_are_called_in_order(make_config, tmp_path):
    log = Log()
    config = make_config(max_steps=2, evaluation={"eval_steps": 1})
    Trainer(config, str(tmp_path / "run"), console=QUIET, callbacks=[log, Log]).run()
    names = ["evaluate", "rollouts", "evaluate", "step", "rollouts", "evaluate", "step", "save", "end"]
    assert [call[0] for call in log.calls] == names
    rows = read_metrics(tmp_path / "run")
    assert log.calls[0] == ("evaluate", 0, rows[0]["eval/accuracy"])
    assert log.calls[-2:] == [("save", 2, True), ("end", 2)]
    assert [call[1:] for call in log.calls if call[0] == "step"] == [(row["step"], row["reward"]) for row in rows[1:]]
    assert all(call[2] == 16 for call in log.calls if call[0] == "rollouts")


class Fails(Callback):
    def __init__(self, error):
        self.error = error

    def on_step(self, trainer, step, metrics):
        if step == 3:
            raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError("no luck"), SystemExit(0)])
def test_an_error_in_a_callback_names_it_and_what_is_finished_is_saved(make_config, tmp_path, error):
    with pytest.raises(UserError, match=f"callback Fails.on_step raised {type(error).__name__}: {error}"):
        Trainer(make_config(), tmp_path / "run", callbacks=[Fails(error)], console=QUIET).run()
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000002", "step-000003"]


class OfAnotherTrainer(Callback):
    def on_step_end(self, *arguments):
        raise AssertionError


def test_what_is_no_callback_is_refused(make_config, tmp_path):
    with pytest.raises(UserError, match=r"OfAnotherTrainer\.on_step_end would never be called: there are on_rollouts"):
        Trainer(make_config(), tmp_path / "run", console=QUIET, callbacks=[OfAnotherTrainer()])
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="callbacks: must be one of wandb, trackio, module:Class, got 'mlflow'"):
        make_config(callbacks=["mlflow"])
    with pytest.raises(UserError, match="callback wandb needs its package: pip install wandb"):
        CALLBACKS.resolve("wandb")()


def test_trackers_get_every_row(make_config, tmp_path, monkeypatch):
    calls = {"wandb": [], "trackio": []}
    for name, mine in calls.items():
        fake = SimpleNamespace(
            init=lambda mine=mine, **options: mine.append(("init", options)) or object(),
            log=lambda row, step, mine=mine: mine.append(("log", step, row)),
            finish=lambda mine=mine: mine.append(("finish",)),
        )
        monkeypatch.setitem(sys.modules, name, fake)
    config = make_config(max_steps=1, callbacks=list(calls))
    Trainer(config, tmp_path / "run", console=QUIET).run()
    (begun, *logged, ended), row = calls["wandb"], read_metrics(tmp_path / "run")[1]
    assert calls["trackio"] == calls["wandb"] and ended == ("finish",)
    assert begun[1]["name"] == "run" and begun[1]["config"]["max_steps"] == 1
    assert [step for _, step, _ in logged] == [0, 1]
    assert logged[1][2].keys() | {"step"} == row.keys() and logged[1][2]["reward"] == row["reward"]
    rhyme = {"database": "postgresql://me@h/runs"}
    changes = {"rollout": {"vllm_server": "http://h:8000"}, "accelerators": {"enabled": ["rhyme"], "rhyme": rhyme}}
    config = make_config(**changes)
    CALLBACKS.resolve("wandb")().on_step(SimpleNamespace(config=config, folder=tmp_path), 1, {})
    assert calls["wandb"][-2][1]["config"] == config.model_dump(mode="json")


def test_a_task_made_in_python_trains_and_resumes(settings, tmp_path):
    prompts = [Example(text) for text in ("AB", "C", "HA", "GGG")]
    values = settings | {"task": Task("mine", prompts, prompts[:2], {"digits": digits})}
    config = load_config(values, ["max_steps=1"])
    assert config.task.name == "object:mine"
    Trainer(config, tmp_path / "run", console=QUIET).run()
    again = train(load_config(values, ["max_steps=2"]), tmp_path / "run", resume=True)
    assert again.state.step == 2 and again.task.train is prompts


class LazySettings(TaskSettings):
    """Has no load."""

    name: str = "test_python_api:LazySettings"


class ListSettings(LazySettings):
    """Loads prompts alone."""

    name: str = "test_python_api:ListSettings"

    def load(self):
        return [Example("A")]


def test_mistakes_of_a_caller_are_named(settings, tmp_path):
    def refused(match, config, *overrides):
        with pytest.raises(UserError, match=match):
            Trainer(load_config(config, *overrides), tmp_path / "run", console=QUIET)
        assert not (tmp_path / "run").exists()

    refused(r"overrides must be a list of texts like \"max_steps=20\", got 'max_steps=1'", settings, "max_steps=1")
    refused("overrides must be a list of texts like .*, got {'max_steps': 1}", settings, {"max_steps": 1})
    refused("source must be a file, .* a mapping or None, got 5", 5)
    refused("task test_python_api:LazySettings: LazySettings must have a method load", {"task": {"name": LazySettings}})
    listed = settings | {"task": {"name": ListSettings}}
    refused(r"task test_python_api:ListSettings: load must return a Task, got \[Example", listed)
    with pytest.raises(UserError, match="config must be a Config, as load_config returns one, got 'smoke'"):
        Trainer("smoke", tmp_path / "run")


def test_the_package_is_light_and_names_what_it_lacks():
    code = "import sys, python_trainer; assert not {'torch', 'pydantic', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    with pytest.raises(ImportError, match="cannot import name 'Trainr'"):
        from python_trainer import Trainr  # noqa: F401


@pytest.mark.slow
def test_the_example_trains(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "python_api.py"), str(tmp_path / "run")],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("step 0: accuracy ") and lines[-1].startswith("accuracy ") and len(lines) == 7


@pytest.mark.parametrize(("wrong", "match"), [
    ({"train": ["AB"]}, r"task mine: train\[0\] must be an Example, got 'AB'"),
    ({"train": [Example("A"), Example(5)]}, r"task mine: train\[1\]: prompt is 5; allowed: a string that"),
    ({"gate": [Example("")]}, r"task mine: gate\[0\]: prompt is ''; allowed: a string that is not empty"),
    ({"train": [Example([{"role": "user"}])]}, r"task mine: train\[0\]: prompt is \[{'role': 'user'}\]; allowed: "),
    ({"train": [Example("\ud83d", place="mine.py:3")]}, "mine.py:3: prompt has the lone surrogate"),
    ({"train": [Example("A", {"prompts": 1})]}, r"task mine: train\[0\]: column 'prompts' has a name that"),
    ({"reward_functions": {}}, "task mine: reward_functions must be a dict .*, of one or more, got {}"),
    ({"reward_functions": digits}, "task mine: reward_functions must be a dict of .*, got <function digits"),
    ({"reward_functions": {"digits": 1.0}}, r"task mine: reward_functions\['digits'\] must be a function, .* got 1.0"),
    ({"reward_weights": [1.0]}, r"task mine: reward_weights must be a dict with names in .* \(digits\), got \[1.0\]"),
    ({"reward_weights": {"digit": 2.0}}, r"task mine: reward_weights must be a dict .*, got {'digit': 2.0}"),
    ({"reward_weights": {"digits": float("nan")}}, r"mine: reward_weights\['digits'\] must be a finite .*, got nan"),
])  # fmt: skip
def test_what_is_wrong_with_a_task_is_named(wrong, match):
    right = {"name": "mine", "train": [Example("A")], "test": (), "reward_functions": {"digits": digits}}
    Task(**right, reward_weights={"digits": 2})
    with pytest.raises(UserError, match=match):
        Task(**right | wrong)
