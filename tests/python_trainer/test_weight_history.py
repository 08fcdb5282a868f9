"""save.weight_history: every step's weights of a run, bit for bit, also after a kill."""

import io
import sys

import pytest
import torch
from conftest import LORA, QUIET, kill_in_the_fourth_step, merged, run_settings, train
from gloo import run_on_ranks
from gloo import train as train_here
from rich.console import Console
from safetensors.torch import load_file

from python_trainer.command_line.sft import Sft
from python_trainer.config import load_config
from python_trainer.errors import UserError
from python_trainer.model.weights import checkpoint_weights
from python_trainer.run.callbacks import Callback
from python_trainer.trainer import Trainer
from rlkernels.__main__ import main as rlkernels
from rlkernels.weights import History

pytest.importorskip("zstandard", reason="this machine lacks zstandard")
KEPT = {"save": {"save_steps": 2, "weight_history": 10**9}, "max_steps": 4}


def exported(trainer):
    return {name: weight.clone() for name, weight in checkpoint_weights(trainer.policy.inference_model)}


class Record(Callback):
    """Copies of the weights after every step."""

    def __init__(self):
        self.weights = {}

    def on_step(self, trainer, step, metrics):
        self.weights[step] = exported(trainer)


def same(weights, expected):
    return weights.keys() == expected.keys() and all(
        torch.equal(weights[n].view(torch.uint8), expected[n].view(torch.uint8)) for n in weights
    )


@pytest.mark.parametrize("changes", [
    {}, {"model": {"dtype": "bfloat16"}}, {"model": {"lora": LORA}}, {"accelerators": {"enabled": ["rhyme"]}},
], ids=str)  # fmt: skip
def test_every_step(make_config, tmp_path, changes):
    """A run that was killed and resumed writes the same files."""
    config = make_config(**merged(KEPT, changes))
    record = Record()
    folder = tmp_path / "whole"
    trainer = Trainer(config, folder, console=QUIET, callbacks=[record])
    record.weights[0] = exported(trainer)
    trainer.run()
    history = History(folder / "weights")
    assert history.steps == 4 == len(record.weights) - 1 and not same(record.weights[3], record.weights[4])
    for step in (0, 4, 2, 1, 3):
        assert same(dict(history.weights(step)), record.weights[step])
    assert same(load_file(folder / "model/model.safetensors"), record.weights[4])
    resumed_folder = tmp_path / "parts"
    kill_in_the_fourth_step(Trainer(config, resumed_folder, console=QUIET))
    assert History(resumed_folder / "weights").steps == 3
    (resumed_folder / "weights/.abc.tmp").mkdir()
    resumed = Trainer(config, resumed_folder, resume=True, console=QUIET)
    assert resumed.state.step == 2
    resumed.run()
    names = sorted(path.name for path in (folder / "weights").iterdir())
    assert names == sorted(path.name for path in (resumed_folder / "weights").iterdir())
    assert all(
        (folder / f"weights/{n}").read_bytes() == (resumed_folder / f"weights/{n}").read_bytes() for n in names[1:]
    )


def test_killed_before_the_first_checkpoint(make_config, tmp_path):
    """The run begins again: what was kept of its steps goes."""
    config = make_config(**merged(KEPT, {"save": {"save_steps": 0}}))
    kill_in_the_fourth_step(Trainer(config, tmp_path, console=QUIET))
    record = Record()
    train(config, tmp_path, resume=True, callbacks=[record])
    history = History(tmp_path / "weights")
    assert history.steps == 4 and same(dict(history.weights(4)), record.weights[4])


def test_a_step_as_a_model(make_config, tmp_path, capsys):
    train(make_config(**merged(KEPT, {"max_steps": 2})), tmp_path / "run")
    restore = ["weights", str(tmp_path / "run"), "--step"]
    assert rlkernels([*restore, "2", "--output-dir", str(tmp_path / "two")]) == 0
    model_folder = tmp_path / "run/model"
    assert {p.name: p.read_bytes() for p in model_folder.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "two").iterdir()
    }
    trained = Trainer(make_config(model={"path": str(tmp_path / "two")}), tmp_path / "next", console=QUIET)
    assert same(exported(trained), load_file(model_folder / "model.safetensors"))
    assert rlkernels([*restore, "3", "--output-dir", str(tmp_path / "three")]) == 2
    assert "0 to 2, got 3" in capsys.readouterr().err and not (tmp_path / "three").exists()


def limited(make_config, tmp_path, size, **options):
    text = io.StringIO()
    config = make_config(**merged(KEPT, {"save": {"save_steps": 1, "weight_history": size}}))
    trainer = Trainer(config, tmp_path, console=Console(file=text, width=1000), **options)
    trainer.run()
    return [line for line in text.getvalue().splitlines() if "weight_history" in line]


def test_the_limit(make_config, tmp_path):
    """It ends with one warning, keeps the first model, and a resumed run does not continue behind a gap."""
    assert limited(make_config, tmp_path / "a", 10**9) == []
    sizes = [file.stat().st_size for file in sorted((tmp_path / "a/weights").glob("*.delta"))]
    (warning,) = limited(make_config, tmp_path / "b", sum(sizes[:2]))
    assert f"ends at step 2: {sum(sizes[:2])} bytes are used up" in warning
    assert History(tmp_path / "b/weights").steps == 2
    assert "ends at step 0: 1 bytes" in limited(make_config, tmp_path / "c", 1)[0]
    assert History(tmp_path / "c/weights").steps == 0
    (warning,) = limited(lambda **changes: make_config(**merged(changes, {"max_steps": 5})), tmp_path / "b", 10**9,
                         resume=True)  # fmt: skip
    assert (
        "cannot go on after step 4: recording ended at step 2" in warning and History(tmp_path / "b/weights").steps == 2
    )


def test_a_history_that_is_not_the_runs(make_config, tmp_path):
    """Check a run that began without a history, and one whose history was exchanged."""

    def more(**changes):
        return make_config(**merged(changes, {"max_steps": 5}))

    train(make_config(max_steps=4, save={"save_steps": 1}), tmp_path / "a")
    (warning,) = limited(more, tmp_path / "a", 10**9, resume=True)
    assert "cannot go on after step 4: the run began without a weight history" in warning
    limited(make_config, tmp_path / "b", 10**9)
    limited(lambda **changes: make_config(**merged(changes, {"seed": 5})), tmp_path / "c", 10**9)
    last = "weights/step-000004.delta"
    (tmp_path / "b" / last).write_bytes((tmp_path / "c" / last).read_bytes())
    (warning,) = limited(more, tmp_path / "b", 10**9, resume=True)
    assert "other weights after step 4" in warning


def test_a_delta_that_cannot_be_written(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "python_trainer.run.weight_history.replace_file", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    (warning,) = limited(make_config, tmp_path, 10**9)
    assert "ends at step 0" in warning and "full" in warning


@pytest.mark.parametrize("killed", [False, True])
def test_supervised_steps(lessons, tmp_path, killed):
    """Check adapters too, whose merged weights nothing else needs before the end, or after a checkpoint is loaded."""
    changes = {"sft": {"epochs": 9}, "save": {"weight_history": 10**9, "save_steps": 2}, "model": {"lora": LORA}}
    config = load_config(merged(lessons, changes))
    if killed:
        kill_in_the_fourth_step(Sft(config, tmp_path, console=QUIET))
    run = Sft(config, tmp_path, resume=killed, console=QUIET)
    run.run()
    history = History(tmp_path / "weights")
    assert history.steps == run.state.step > 1
    assert same(dict(history.weights(history.steps)), load_file(tmp_path / "model/model.safetensors"))
    assert not same(dict(history.weights(1)), dict(history.base))


def test_needs_zstandard(make_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"save.weight_history: needs zstandard: pip install 'rlkernels\[weights\]'"):
        Trainer(make_config(**KEPT), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes(tiny_policy, jsonl_files, tmp_path, parallel):
    settings = merged(run_settings(tiny_policy, jsonl_files), KEPT | {"max_steps": 2})
    run_on_ranks(tmp_path, train_here, settings, tmp_path / "two", parallel)
    history = History(tmp_path / "two/weights")
    assert history.steps == 2 and same(dict(history.base), load_file(tiny_policy / "model.safetensors"))
    assert same(dict(history.weights(2)), load_file(tmp_path / "two/model/model.safetensors"))
