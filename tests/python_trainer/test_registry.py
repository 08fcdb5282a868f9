"""Plug-ins of one's own: found by ``module:attribute``, used like registered ones, and named where they are no good."""

import pytest
import torch
from conftest import QUIET, even, same

from python_trainer.accelerators import ACCELERATORS
from python_trainer.accelerators.base import Accelerator
from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.algorithms.settings import LOSS_TYPES, Advantage
from python_trainer.compare import compare
from python_trainer.config import check_config, dump_config, load_config
from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.report.runs import find_runs
from python_trainer.report.tables import summary_columns
from python_trainer.run_directory import read_metrics
from python_trainer.settings import PluginError, Registry
from python_trainer.tasks import TASKS, Task, TaskSettings
from python_trainer.trainer import Trainer

HERE = "test_registry"


class CounterSettings(AcceleratorSettings):
    """Counts answers."""

    name = "counter"
    accelerator = f"{HERE}:Counter"
    counters = {"counter/answers": "answers (counter)"}  # noqa: RUF012
    every: int = 1
    """Count every so many steps."""

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
    """1 for the best answers of each group, -1 for all others."""
    best = torch.stack([step.rewards[step.groups == group].max() for group in step.groups])
    return torch.where(step.rewards == best, 1.0, -1.0) * (step.rewards.std() > 0), None


best = Advantage(best_of_group, compares=True)


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
    compare(config, tmp_path / "runs", variants=["baseline", f"{HERE}:CounterSettings"], seeds=1, console=QUIET)
    runs = find_runs([tmp_path / "runs"])
    column = summary_columns(runs)[f"{HERE}:CounterSettings"]
    assert column["answers (counter)"] == "16"
    assert (tmp_path / "runs" / "report.html").exists()


@pytest.mark.parametrize(("accelerators", "message"), [
    ({"enabled": [f"{HERE}:CounterSettings"], "counter": {"evry": 1}},
     r"accelerators.counter.evry: unknown setting; did you mean every\?$"),
    ({"enabled": [f"{HERE}:CounterSettings"], "counter": {"every": "x"}}, "accelerators.counter.every: .*got 'x'"),
    ({"counter": {"every": 1}}, "accelerators.counter: unknown setting; known here: enabled, rpo"),
    ({"enabled": [f"{HERE}:Counter"]},
     f"accelerators.enabled: accelerator '{HERE}:Counter': .* has no Counter that is a subclass of Acc"),
    ({"enabled": [f"{HERE}:Gone"]}, f"accelerators.enabled: .*module {HERE} .* has no Gone that is a subclass"),
    ({"enabled": ["no_such:Thing"]}, "accelerators.enabled: .*importing no_such failed: ModuleNotFoundError"),
    ({"enabled": [f"{HERE}:Nameless"]},
     f"accelerators: {HERE}:Nameless.name must be an identifier that no accelerator has, got 'rpo'"),
    ({"enabled": [f"{HERE}.py:CounterSettings"]}, "accelerators.enabled: .*; name a module without .py$"),
    ({"enabled": [3]}, "accelerators.enabled.0: .*string, got 3"),
    ({"enabled": "rpo"}, "accelerators.enabled: must be a list, .*, got 'rpo'"),
    ({"enabled": [f"{HERE}:CounterSettings"], "counter": {"every": 13}}, "test: counter cannot count to 13"),
    ({"enabled": [f"{HERE}:CounterSettings"], "parallel": "ddp"},
     "accelerators.enabled: counter needs parallel=none, got ddp, which allows rpo"),
])  # fmt: skip
def test_wrong_accelerators_are_named(make_config, accelerators, message):
    parallel = accelerators.pop("parallel", "none")
    with pytest.raises(UserError, match=message):
        make_config(accelerators=accelerators, parallel=parallel)


def test_a_task_of_one_file(settings, tmp_path):
    values = settings | {"max_steps": 1, "task": {"name": f"{HERE}:LettersSettings", "letters": "ABCDEF"}}
    config = check_config(values, source="test")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    assert len(trainer.prompts.ids["train"]) == 6 and trainer.run()["steps"] == 1
    config = load_config(settings | {"task": {"name": LettersSettings, "letters": "ABCDE"}})
    assert config.task.name == f"{HERE}:LettersSettings" and len(config.task.load().train) == 5
    assert load_config(settings | {"task": LettersSettings(letters="ABC")}).task.letters == "ABC"
    with pytest.raises(UserError, match=r"task.leters: unknown setting; did you mean letters\?$"):
        check_config(values | {"task": values["task"] | {"leters": "A"}}, source="test")
    with pytest.raises(UserError, match="task.train_path: unknown setting"):
        check_config(values | {"task": values["task"] | {"train_path": "x"}}, source="test")
    with pytest.raises(UserError, match="task.name: .*has no even that is a subclass of TaskSettings"):
        check_config(values | {"task": {"name": f"{HERE}:even"}}, source="test")


def test_an_advantage_and_an_aggregation_of_ones_own(make_config, tmp_path):
    algorithm = {"advantage": f"{HERE}:best", "loss_type": f"{HERE}:first_half"}
    config = make_config(max_steps=2, algorithm=algorithm)
    Trainer(config, tmp_path / "run", console=QUIET).run()
    Trainer(make_config(max_steps=2), tmp_path / "plain", console=QUIET).run()
    ours, plain = (read_metrics(tmp_path / name)[1] for name in ("run", "plain"))
    assert ours["reward"] == plain["reward"] and ours["grad_norm"] > 0 and ours["grad_norm"] != plain["grad_norm"]
    with pytest.raises(UserError, match=f"num_generations must be >= 2 with algorithm.advantage {HERE}:best: .* got 1"):
        make_config(algorithm=algorithm, rollout={"num_generations": 1})
    with pytest.raises(UserError, match="algorithm.advantage: .* has no best_of_group that is an instance of Adv"):
        make_config(algorithm={"advantage": f"{HERE}:best_of_group"})
    with pytest.raises(UserError, match=f"algorithm.loss_type: .* has no {HERE}_x that is a function"):
        make_config(algorithm={"loss_type": f"{HERE}:{HERE}_x"})


def test_objects_do_what_their_names_do(settings, tmp_path):
    """Objects that have no importable name too: a lambda, a class made in here."""

    class Local(CounterSettings):
        """Counts as well."""

        name = "local"

    named = settings | {"max_steps": 1, "algorithm": {"loss_type": f"{HERE}:first_half"}}
    named["task"] = settings["task"] | {"reward": f"{HERE}:even"}
    named["accelerators"] = {"enabled": [f"{HERE}:CounterSettings"]}
    given = named | {"algorithm": {"loss_type": lambda mask, **facts: first_half(mask, **facts)}}
    given["task"] = settings["task"] | {"reward": [even]}
    given["accelerators"] = {"enabled": [CounterSettings, Local], "local": {"every": 2}}
    runs = (("named", named), ("given", given))
    trainers = [Trainer(load_config(values), tmp_path / name, console=QUIET) for name, values in runs]
    first, second = (trainer.run()["accelerators"] for trainer in trainers)
    assert first == {"counter": {"answers": 16}} and second == first | {"local": {"answers": 0}}
    assert same(*trainers)
    assert "reward:\n  - conftest:even" in dump_config(load_config(given))


def test_names_places_and_objects_are_one():
    assert LOSS_TYPES.resolve(f"{HERE}:first_half") is first_half is LOSS_TYPES.resolve(first_half)
    assert LOSS_TYPES.resolve("dapo") is LOSS_TYPES.resolve("token-mean")
    registry = Registry("shape", {"here": even, "there": f"{HERE}:first_half"})
    assert registry.names() == ["here", "there"]
    assert registry.resolve("here") is even and registry.resolve("there") is first_half
    for wrong in (3, None):
        with pytest.raises(PluginError, match=f"shape {wrong} is not a function"):
            registry.resolve(wrong)
    assert TASKS.resolve(LettersSettings) is LettersSettings
    with pytest.raises(PluginError, match="is not a subclass of AcceleratorSettings"):
        ACCELERATORS.resolve(LettersSettings)
