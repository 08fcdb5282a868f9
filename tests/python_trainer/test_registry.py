"""Training from Python: plug-ins by module:attribute or as objects, callbacks, and what is no good is named."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import pytest
import torch
from conftest import QUIET, digits, even, same, train
from pydantic import Field
from support import run_python

from python_trainer import Callback, Example, Task, TaskSettings, Trainer, load_config
from python_trainer.accelerators import ACCELERATORS
from python_trainer.accelerators.base import Accelerator
from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.algorithms.settings import LOSS_TYPES, Advantage
from python_trainer.command_line.compare import compare
from python_trainer.command_line.report import find_runs, summary_rows
from python_trainer.config import dump_config
from python_trainer.errors import UserError
from python_trainer.run.callbacks import CALLBACKS
from python_trainer.run.checkpoint import list_checkpoints
from python_trainer.run.directory import read_metrics
from python_trainer.settings import PluginError, Registry, Section
from python_trainer.tasks import TASKS

HERE = "test_registry"


class CounterSettings(AcceleratorSettings):
    """Counts answers."""

    name = "counter"
    accelerator = f"{HERE}:Counter"
    counters = {"counter/answers": "answers (counter)"}  # noqa: RUF012
    every: int = 1
    """Count every so many steps."""
    parts: list[Section] = Field([])

    def conflicts(self, config):
        return "counter cannot count to 13" if config.accelerators.counter.every == 13 else None


class Counter(Accelerator):
    answers = 0

    def collect(self, context, rollouts):
        if context.step % self.settings.every == 0:
            self.answers += len(rollouts)
            context.telemetry |= {"counter/answers": float(len(rollouts)), "counter/hidden_1": 1.0}
        return rollouts

    def summary(self):
        return {"answers": self.answers}


class Nameless(AcceleratorSettings):
    name = "rpo"
    accelerator = f"{HERE}:Counter"


class LettersSettings(TaskSettings):
    """A task of one file."""

    name: str = f"{HERE}:LettersSettings"
    letters: str = "ABCD"
    """One prompt each."""

    def load(self):
        examples = [Example(letter, {"answer": letter}) for letter in self.letters]
        return Task("letters", examples, examples[:2], {"accuracy": even})


def best_of_group(step, settings):
    """Return 1 for the best answers of each group, -1 for all others."""
    best = torch.stack([step.rewards[step.groups == group].max() for group in step.groups])
    return torch.where(step.rewards == best, 1.0, -1.0) * (step.rewards.std() > 0), None


best = Advantage(best_of_group, needs_group=True)


def first_half(mask, *, num_sequences, lengths, **_):
    early = torch.arange(mask.shape[1]) < lengths[:, None] / 2
    return (mask & early).float() / num_sequences


def test_an_accelerator_of_one_file(make_config, tmp_path):
    """Trained, compared and reported like the registered ones."""
    accelerators = {"counter": {"every": 2}, "enabled": [f"{HERE}:CounterSettings", "rpo"]}
    config = make_config(max_steps=2, accelerators=accelerators)
    assert config.accelerators.enabled == ["rpo", f"{HERE}:CounterSettings"] and config.accelerators.counter.every == 2
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config
    variants = ["baseline", f"{HERE}:CounterSettings", "baseline@1"]
    compare(config, tmp_path / "runs", variants=variants, seeds=1, console=QUIET)
    rows = summary_rows(find_runs([tmp_path / "runs"]))
    assert ("answers (counter)", "-", "-", "16") in rows and ("steps", "2", "1", "2") in rows
    assert (tmp_path / "runs" / "report.html").exists()


@pytest.mark.parametrize(("accelerators", "message"), [
    ({"enabled": [f"{HERE}:CounterSettings"], "counter": {"evry": 1}},
     r"accelerators.counter.evry: unknown setting; did you mean every\?$"),
    ({"enabled": [f"{HERE}:CounterSettings"], "counter": {"parts": [{"size": 1}]}}, r"parts.0.size: unknown setting$"),
    ({"enabled": [f"{HERE}:CounterSettings"], "counter": {"every": "x"}}, "accelerators.counter.every: .*got 'x'"),
    ({"counter": {"every": 1}}, "accelerators.counter: unknown setting; known here: enabled, rpo"),
    ({"enabled": [f"{HERE}:Counter"]},
     f"accelerators.enabled: accelerator '{HERE}:Counter' is not a subclass of AcceleratorSettings$"),
    ({"enabled": [f"{HERE}:Gone"]}, f"accelerators.enabled: .*module '{HERE}' has no attribute 'Gone'"),
    ({"enabled": ["no_such:Thing"]}, "accelerators.enabled: .*importing failed: ModuleNotFoundError: No .* 'no_such'"),
    ({"enabled": [f"{HERE}:Nameless"]},
     f"accelerators: {HERE}:Nameless.name must be an identifier that no accelerator has, got 'rpo'"),
    ({"enabled": [f"{HERE}.py:CounterSettings"]}, "accelerators.enabled: .*; name a module without .py$"),
    ({"enabled": [3]}, "accelerators.enabled.0: .*string, got 3"),
    ({"enabled": "rpo"}, "accelerators.enabled: must be a list, .*, got 'rpo'"),
    ({"enabled": [f"{HERE}:CounterSettings"], "counter": {"every": 13}}, "^counter cannot count to 13$"),
    ({"enabled": [f"{HERE}:CounterSettings"], "parallel": "ddp"},
     "accelerators.enabled: counter needs parallel=none, got ddp$"),
])  # fmt: skip
def test_wrong_accelerators_are_named(make_config, accelerators, message):
    parallel = accelerators.pop("parallel", "none")
    with pytest.raises(UserError, match=message):
        make_config(accelerators=accelerators, parallel=parallel)


def test_a_task_of_one_file(settings, tmp_path):
    values = settings | {"max_steps": 1, "task": {"name": f"{HERE}:LettersSettings", "letters": "ABCDEF"}}
    config = load_config(values)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    assert len(trainer.prompts.ids["train"]) == 6 and trainer.run()["steps"] == 1
    config = load_config(settings | {"task": {"name": LettersSettings, "letters": "ABCDE"}})
    assert config.task.name == f"{HERE}:LettersSettings" and len(config.task.load().train) == 5
    assert load_config(settings | {"task": LettersSettings(letters="ABC")}).task.letters == "ABC"
    with pytest.raises(UserError, match="task letters has no training prompts"):
        Trainer(load_config(settings | {"task": LettersSettings(letters="")}), tmp_path / "none", console=QUIET)
    with pytest.raises(UserError, match=r"task.leters: unknown setting; did you mean letters\?$"):
        load_config(values | {"task": values["task"] | {"leters": "A"}})
    with pytest.raises(UserError, match="task.train_path: unknown setting"):
        load_config(values | {"task": values["task"] | {"train_path": "x"}})
    with pytest.raises(UserError, match="task: task .*even' is not a subclass of TaskSettings"):
        load_config(values | {"task": {"name": f"{HERE}:even"}})


def test_an_advantage_and_an_aggregation_of_ones_own(make_config, tmp_path):
    algorithm = {"advantage": f"{HERE}:best", "loss_type": f"{HERE}:first_half"}
    config = make_config(max_steps=2, algorithm=algorithm)
    train(config, tmp_path / "run")
    train(make_config(max_steps=2), tmp_path / "plain")
    row, plain_row = (read_metrics(tmp_path / name)[1] for name in ("run", "plain"))
    assert row["reward"] == plain_row["reward"] and row["grad_norm"] > 0 and row["grad_norm"] != plain_row["grad_norm"]
    with pytest.raises(UserError, match=f"num_generations must be >= 2 with algorithm.advantage {HERE}:best: .* got 1"):
        make_config(algorithm=algorithm, rollout={"num_generations": 1})
    with pytest.raises(UserError, match="algorithm.advantage: .*best_of_group' is not an instance of Advantage"):
        make_config(algorithm={"advantage": f"{HERE}:best_of_group"})
    with pytest.raises(UserError, match=f"algorithm.loss_type: .* has no attribute '{HERE}_x'"):
        make_config(algorithm={"loss_type": f"{HERE}:{HERE}_x"})


def test_objects_do_what_their_names_do(settings, tmp_path):
    """Objects that have no importable name too: a lambda, a class made in here."""

    class Local(CounterSettings):
        """Counts as well."""

        name = "local"

    named = settings | {"max_steps": 1, "algorithm": {"loss_type": f"{HERE}:first_half"}}
    named["task"] = settings["task"] | {"reward": f"{HERE}:even"}
    named["accelerators"] = {"enabled": [f"{HERE}:CounterSettings"]}
    objects = named | {"algorithm": {"loss_type": lambda mask, **facts: first_half(mask, **facts)}}
    objects["task"] = settings["task"] | {"reward": [even]}
    objects["accelerators"] = {"enabled": [CounterSettings, Local], "local": {"every": 2}}
    runs = (("named", named), ("given", objects))
    trainers = [Trainer(load_config(values), tmp_path / name, console=QUIET) for name, values in runs]
    first, second = (trainer.run()["accelerators"] for trainer in trainers)
    assert first == {"counter": {"answers": 16}} and second == first | {"local": {"answers": 0}}
    assert same(*trainers)
    assert "reward:\n  - conftest:even" in dump_config(load_config(objects))


def test_names_places_and_objects_are_one():
    assert LOSS_TYPES.resolve(f"{HERE}:first_half") is first_half is LOSS_TYPES.resolve(first_half)
    assert LOSS_TYPES.resolve("dapo") is LOSS_TYPES.resolve("token-mean")
    registry = Registry("shape", {"here": even, "there": f"{HERE}:first_half"})
    assert registry.names == ["here", "there"]
    assert registry.resolve("here") is even and registry.resolve("there") is first_half
    for wrong in (3, None):
        with pytest.raises(PluginError, match=f"shape {wrong} is not a function"):
            registry.resolve(wrong)
    assert TASKS.resolve(LettersSettings) is LettersSettings
    with pytest.raises(PluginError, match="is not a subclass of AcceleratorSettings"):
        ACCELERATORS.resolve(LettersSettings)


def test_callbacks_are_called_in_order(make_config, tmp_path):
    log = create_autospec(Callback, instance=True)
    log.on_save.side_effect = lambda trainer, step, checkpoint: checkpoint.resolve(strict=True)  # it is there by then
    config = make_config(max_steps=2, evaluation={"eval_steps": 1})
    train(config, str(tmp_path / "run"), callbacks=[log, Callback])
    names = ["evaluate", "rollouts", "evaluate", "step", "rollouts", "evaluate", "step", "save", "end"]
    assert [name for name, *_ in log.mock_calls] == [f"on_{name}" for name in names]
    rows = read_metrics(tmp_path / "run")
    _, step, metrics = log.on_evaluate.call_args_list[0].args
    assert (step, metrics["eval/accuracy"]) == (0, rows[0]["eval/accuracy"])
    assert log.on_save.call_args.args[1] == log.on_end.call_args.args[1]["steps"] == 2
    steps = [(call.args[1], call.args[2]["reward"]) for call in log.on_step.call_args_list]
    assert steps == [(row["step"], row["reward"]) for row in rows[1:]]
    assert all(len(call.args[2]) == 16 for call in log.on_rollouts.call_args_list)


@pytest.mark.parametrize("error", [ZeroDivisionError("no luck"), SystemExit(0)])
def test_an_error_in_a_callback_names_it_and_what_is_finished_is_saved(make_config, tmp_path, monkeypatch, error):
    monkeypatch.setattr(Callback, "on_step", Mock(side_effect=[None, None, error]))
    with pytest.raises(UserError, match=f"callback Callback.on_step raised {type(error).__name__}: {error}"):
        train(make_config(), tmp_path / "run", callbacks=[Callback])
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000002", "step-000003"]


def test_what_is_no_callback_is_refused(make_config, tmp_path):
    foreign = type("OfAnotherTrainer", (Callback,), {"on_step_end": print})
    with pytest.raises(UserError, match=r"OfAnotherTrainer\.on_step_end would never be called: there are on_rollouts"):
        Trainer(make_config(), tmp_path / "run", console=QUIET, callbacks=[foreign()])
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="callback wandb needs its package: pip install wandb"):
        CALLBACKS.resolve("wandb")()


def test_trackers_get_every_row(make_config, tmp_path, monkeypatch):
    trackio = Mock()
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trainer = train(make_config(max_steps=1, callbacks=["wandb", "trackio"]), tmp_path / "run")
    assert [name for name, *_ in wandb.mock_calls] == ["init", "log", "log", "finish"]
    assert trackio.mock_calls[1:] == wandb.mock_calls[1:]
    assert trackio.init.call_args.kwargs["name"] == f"run-{trainer.state.id}"
    init_arguments = wandb.init.call_args.kwargs
    log_calls = wandb.log.call_args_list
    row = read_metrics(tmp_path / "run")[1]
    assert init_arguments["name"] == "run" and init_arguments["config"]["max_steps"] == 1
    assert [call.kwargs["step"] for call in log_calls] == [0, 1]
    assert log_calls[1].args[0].keys() | {"step"} == row.keys() and log_calls[1].args[0]["reward"] == row["reward"]
    rhyme = {"database": "postgresql://me@h/runs"}
    changes = {"rollout": {"vllm_server": "http://h:8000"}, "accelerators": {"enabled": ["rhyme"], "rhyme": rhyme}}
    config = make_config(**changes)
    trainer = SimpleNamespace(config=config, folder=tmp_path, state=trainer.state)
    CALLBACKS.resolve("wandb")().on_step(trainer, 1, {})
    assert wandb.init.call_args.kwargs["config"] == config.model_dump(mode="json")


class TrackerRuns:
    """Runs of W&B by ``id``, or of trackio by ``name``, as their ``init(resume="allow")`` documents it."""

    def __init__(self, key):
        self.key = key
        self.runs = {}

    def init(self, *, project, config, resume=None, **names):
        name = names[self.key] if resume == "allow" else f"new {len(self.runs)}"
        self.steps = self.runs.setdefault(name, [])
        return self

    def log(self, metrics, step):
        self.steps.append(step)

    def finish(self):
        pass


def test_a_resumed_run_goes_on_with_its_run_of_a_tracker(make_config, tmp_path, monkeypatch):
    """A run of another folder of that name is another one."""
    wandb = TrackerRuns("id")
    trackio = TrackerRuns("name")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for steps, folder in ((1, "a"), (2, "a"), (1, "b")):
        config = make_config(max_steps=steps, callbacks=["wandb", "trackio"])
        train(config, tmp_path / folder / "run", resume=True)
    for tracker in (wandb, trackio):
        first, second = tracker.runs.values()
        assert sorted({*first}) == [0, 1, 2] and second == [0, 1]


def test_a_task_made_in_python_trains_and_resumes(settings, tmp_path):
    prompts = [Example(text) for text in ("AB", "C", "HA", "GGG")]
    values = settings | {"task": Task("mine", prompts, prompts[:2], {"digits": digits})}
    config = load_config(values, ["max_steps=1"])
    assert config.task.name == "object:mine"
    train(config, tmp_path / "run")
    resumed = train(load_config(values, ["max_steps=2"]), tmp_path / "run", resume=True)
    assert resumed.state.step == 2 and resumed.task.train is prompts


def test_mistakes_of_a_caller_are_named(settings, tmp_path):
    def refused(match, config, *overrides):
        with pytest.raises(UserError, match=match):
            Trainer(load_config(config, *overrides), tmp_path / "run", console=QUIET)
        assert not (tmp_path / "run").exists()

    refused(r"overrides must be a list of texts like \"max_steps=20\", got 'max_steps=1'", settings, "max_steps=1")
    refused("overrides must be a list of texts like .*, got {'max_steps': 1}", settings, {"max_steps": 1})
    refused("source must be a file, .* a mapping or None, got 5", 5)
    refused(
        "task python_trainer.tasks.settings:TaskSettings: TaskSettings must have a method load",
        {"task": {"name": TaskSettings}},
    )
    with pytest.raises(UserError, match="config must be a Config, as load_config returns one, got 'smoke'"):
        Trainer("smoke", tmp_path / "run")


def test_the_package_is_light_and_names_what_it_lacks():
    code = "import sys, python_trainer; assert not {'torch', 'pydantic', 'transformers'} & sys.modules.keys()"
    run_python("-c", code)
    with pytest.raises(ImportError, match="cannot import name 'Trainr'"):
        from python_trainer import Trainr  # noqa: F401


@pytest.mark.slow
def test_the_example_trains(tmp_path):
    lines = run_python("examples/python_api.py", str(tmp_path / "run"), PYTHONPATH=".", PATH="").splitlines()
    assert lines[0].startswith("step 0: accuracy ") and lines[-1].startswith("accuracy ") and len(lines) == 7


@pytest.mark.parametrize(("wrong", "match"), [
    ({"train": ["AB"]}, r"task mine: train\[0\] must be an Example, got 'AB'"),
    ({"train": [Example("A"), Example(5)]}, r"task mine: train\[1\]: prompt is 5; allowed: a string that"),
    ({"gate": [Example("")]}, r"task mine: gate\[0\]: prompt is ''; allowed: a string that is not empty"),
    ({"train": [Example([{"role": "user"}])]}, r"task mine: train\[0\]: prompt is \[{'role': 'user'}\]; allowed: "),
    ({"train": [Example("\ud83d", place="mine.py:3")]}, "mine.py:3: prompt is no Unicode text: .*surrogates"),
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
