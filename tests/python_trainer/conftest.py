"""A tiny policy and a task that it can learn, for tests of the trainer."""

import math
import random
import resource
import time
from contextlib import contextmanager

import pytest
import torch
import yaml
from rich.console import Console
from support import write_jsonl
from tiny import digits, save_tiny_policy  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.faults.training import differences
from python_trainer.__main__ import main
from python_trainer.config import load_config
from python_trainer.data import Rollout
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.run.checkpoint import list_checkpoints
from python_trainer.trainer import Trainer

QUIET = Console(quiet=True)
LORA = {"r": 4, "alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def even(prompts, completions, completion_ids, **columns):
    """Return 1 where the last token but the end is an even number, else 0."""
    return [float(ids[-2:][0] % 2 == 0) for ids in completion_ids]


@pytest.fixture
def rounding_processor(monkeypatch, rounding_linear):
    """Round the inputs of float32 products where torch may do so, also in the trainer's own calls."""
    monkeypatch.setattr("python_trainer.model.fused.linear", rounding_linear)


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(tiny_policy):
    return load_policy(ModelConfig(path=str(tiny_policy), device="cpu"))


@pytest.fixture(scope="session")
def tokenizer(tiny_policy):
    return AutoTokenizer.from_pretrained(tiny_policy)


@pytest.fixture(scope="module")
def model(tiny_policy):
    return AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)


@pytest.fixture(scope="session")
def jsonl_files(tmp_path_factory):
    """Write short prompts to files; return (train, test)."""
    folder = tmp_path_factory.mktemp("prompts")
    rng = random.Random(0)
    for name, count in (("train", 12), ("test", 6)):
        rows = [{"prompt": "".join(rng.choices("ABCDEFGH", k=rng.randint(1, 6)))} for _ in range(count)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    return folder / "train.jsonl", folder / "test.jsonl"


@pytest.fixture
def gate_task(jsonl_files, tmp_path):
    """Return changes of the task that set 6 gate prompts aside and leave 12 to train on."""
    path = tmp_path / "with_gate.jsonl"
    path.write_text("".join(file.read_text() for file in jsonl_files))
    return {"train_path": str(path), "gate_size": 6}


@pytest.fixture
def settings(tiny_policy, jsonl_files):
    return run_settings(tiny_policy, jsonl_files)


def run_settings(tiny_policy, jsonl_files):
    """Return the settings of a quick run, as a nested dictionary."""
    train, test = map(str, jsonl_files)
    return {
        "max_steps": 4,
        "task": {"name": "jsonl", "train_path": train, "test_path": test, "reward": "conftest:digits"},
        "model": {"path": str(tiny_policy), "device": "cpu"},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12},
        "optimizer": {"learning_rate": 1e-2},
        "save": {"save_steps": 2},
    }


def merged(settings, changes):
    """Return settings with other values in some sections."""
    return settings | {k: {**settings.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()}


@pytest.fixture
def lessons(settings, tmp_path):
    """Return settings whose examples have an answer: the prompt backwards."""
    for name in ("train", "test"):
        rows = [{"prompt": p, "answer": p[::-1]} for p in (["ABC", "D", "FGAB", "HC"] if name == "train" else ["CA"])]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    paths = {f"{name}_path": str(tmp_path / f"{name}.jsonl") for name in ("train", "test")}
    optimizer = {"lr_scheduler_type": "cosine", "learning_rate": 2e-2}
    return merged(settings, {"task": paths, "optimizer": optimizer, "sft": {"epochs": 60, "batch_tokens": 32}})


@pytest.fixture
def make_config(settings):
    """Return a function that makes a config of changes: ``make_config(max_steps=2, algorithm={"beta": 0.1})``."""
    return lambda **changes: load_config(merged(settings, changes))


@pytest.fixture
def history_run(make_config, tmp_path, monkeypatch):
    """Return a function that runs ``history_run(folder, steps, **settings)`` to its end, and gives the trainer.

    All right answers of better runs are trained on first, however few answers the run is to generate.
    """
    monkeypatch.setattr("python_trainer.accelerators.rhyme.accelerator.REHEARSAL_SHARE", 10)

    def make(folder, steps=4, resume=False, enabled=("rhyme",), task=None, seed=0, **settings):
        names = ("algorithm", "optimizer", "rollout", "evaluation", "save")
        sections = {name: settings.pop(name) for name in names if name in settings}
        config = make_config(
            max_steps=steps, seed=seed, task={"reward": "test_earlier_runs:odd"} | (task or {}),
            accelerators={"enabled": list(enabled), "rhyme": settings}, **sections,
        )  # fmt: skip
        return train(config, tmp_path / folder, resume=resume)

    return make


def train(config, folder, **options):
    """Return the trainer of a finished run that printed nothing; ``updates``: the rollouts of each update."""
    trainer = Trainer(config, folder, console=QUIET, **options)
    trainer.updates = record_updates(trainer)
    trainer.run()
    return trainer


def kill_in_the_fourth_step(run):
    """End a Trainer or Sft as a kill does: the row of step 3 is written, its checkpoint is not."""
    step = run.step

    def end_in_the_fourth(*number):
        if run.state.step == 3:
            raise KeyboardInterrupt
        return step(*number)

    run.step = end_in_the_fourth
    with pytest.raises(KeyboardInterrupt):
        run.run()


def record_updates(trainer):
    """Return a list that collects the rollouts of each update of a trainer."""
    updates = []
    update_policy = trainer.learner.update
    trainer.learner.update = lambda rollouts, *arguments, **options: (
        updates.append(rollouts) or update_policy(rollouts, *arguments, **options)
    )
    return updates


def graded(rewards, lengths=None, *, vocab=64, num_generations=4, finish="stop"):
    """Make rollouts with these rewards, in groups of ``num_generations``, as a uniform policy samples them."""
    generator = torch.Generator().manual_seed(3)
    rollouts = []
    for i, reward in enumerate(rewards):
        ids = torch.randint(0, vocab, (lengths[i] if lengths else 2 + i % 5,), generator=generator).tolist()
        facts = {
            "prompt_index": i // num_generations,
            "group": i // num_generations,
            "reward": reward,
            "accuracy": reward,
        }
        prompt = [i // num_generations % vocab, 0]
        rollouts.append(Rollout(prompt, ids, 0, [-math.log(vocab)] * len(ids), finish, rewards={"r": reward}, **facts))
    return rollouts


MAX_WAIT_S = 120  # seconds that a test waits for a checkpoint


def saved(folder):
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def wait_for(checkpoint, folder):
    """Wait as a step does that takes long."""
    deadline = time.monotonic() + MAX_WAIT_S
    while checkpoint not in saved(folder):
        assert time.monotonic() < deadline, saved(folder)
        time.sleep(0.01)


def assert_goes_on(run, tmp_path):
    """Resume the run of the fixture ``run``; check that it ends as an undisturbed one."""
    assert run({}, "--resume")[0] == run(folder="whole")[0] == 0
    assert differences(tmp_path / "whole", tmp_path / "run") == []


def same(a, b):
    """Return whether two trainers have the same weights, to the bit."""
    return all(torch.equal(x, y) for x, y in zip(a.policy.model.parameters(), b.policy.model.parameters(), strict=True))


@pytest.fixture
def rhyme_config(make_config):
    """Return a function that makes a config with rhyme, which uses history at once: ``rhyme_config(database)``."""

    def make(database=None, rhyme=(), enabled=("rhyme",), **changes):
        rhyme = {"database": database and str(database), "rare_share": 0, **dict(rhyme)}
        accelerators = {"enabled": list(enabled), "rhyme": rhyme, "rpo": {"preset": "paper"}}
        return make_config(**changes, accelerators=accelerators)

    return make


@pytest.fixture
def run(settings, tmp_path, capsys):
    """Return a function that runs the command line here: ``run(changes, *arguments)`` gives exit code and stderr."""

    def call(changes=None, *arguments, command="train", folder="run"):
        for key, value in (changes or {}).items():
            settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump(settings))
        capsys.readouterr()
        code = main([command, "--config", str(path), "--output-dir", str(tmp_path / folder), *arguments])
        return code, capsys.readouterr().err

    return call


def one_clear_line(result, tmp_path, *words):
    """Check exit code 2, one line that names the trouble, and that no run directory is left behind."""
    code, error = result
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for word in words:
        assert word in error, error
    assert not (tmp_path / "run").exists() or not (tmp_path / "run" / "summary.json").exists()


@contextmanager
def full_disk(size):
    """Limit files to ``size`` bytes inside the block, so that a write fails in the middle, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:  # before pytest writes its next line, perhaps to a file
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def answers():
    """Return three groups: with a shared prefix, without one, and with answers of 0, 1 and many tokens."""
    generator = torch.Generator().manual_seed(3)

    def ids(n):
        return torch.randint(0, 63, (n,), generator=generator).tolist()

    prompts = [ids(3), ids(7), ids(1)]
    prefix = ids(5)
    return [
        *(Rollout(prompts[0], prefix + ids(n), 5) for n in (4, 0, 9, 1)),
        *(Rollout(prompts[1], ids(n)) for n in (2, 6, 6)),
        *(Rollout(prompts[2], ids(n)) for n in (0, 1, 17)),
    ]
