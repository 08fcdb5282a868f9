"""Histories of weights on disk, and what reads them: a step gives what a folder with the same weights gives."""

import pytest
import torch
from support import assert_equal

from rlkernels import RankOneTrajectory, stream_top1
from rlkernels.__main__ import main
from rlkernels.rank1.projections import Projections
from rlkernels.weights import History, encode
from rlkernels.weights.checkpoints import open_checkpoint, step_file

pytest.importorskip("zstandard", reason="this machine lacks zstandard")
save_file = pytest.importorskip("safetensors.torch", reason="this machine lacks safetensors").save_file
STEPS = 4


@pytest.fixture
def run(tmp_path):
    """Return RUN and weights by step: a straight line in two shards, as a history and as a folder for each step."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a_proj.weight": (24, 16), "b_proj.weight": (16, 24), "norm.weight": (16,), "experts": (2, 24, 16)}
    base = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    direction = {}
    for name, weight in base.items():
        if weight.ndim > 1:
            column = torch.randn(*weight.shape[:-1], 1, generator=generator)
            direction[name] = column * torch.randn(weight.shape[-1], generator=generator) * 1e-3
    weights = [
        {n: w + step * direction[n] if n in direction else w + step for n, w in base.items()}
        for step in range(STEPS + 1)
    ]
    history = tmp_path / "run" / "weights"
    for step, state in enumerate(weights):
        folder = history / "base" if step == 0 else tmp_path / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({n: state[n] for n in ("a_proj.weight", "norm.weight")}, folder / "one.safetensors")
        save_file({n: state[n] for n in ("b_proj.weight", "experts")}, folder / "two.safetensors")
        files = {n: "two.safetensors" if n in ("b_proj.weight", "experts") else "one.safetensors" for n in state}
        (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {files}}}'.replace("'", '"'))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "optimizer.pt").write_bytes(b"of a trainer")
        if step:
            step_file(history, step).write_bytes(encode(state, weights[step - 1]))
    return tmp_path / "run", weights


def test_any_step_in_any_order(run):
    folder, weights = run
    history = History(folder / "weights")
    for step in (3, 4, 1, 0, 2, 2):
        assert_equal(history.weights(step), weights[step])
    assert_equal(history.base, weights[0])
    for step in (-1, 5):
        with pytest.raises(ValueError, match=rf"step must be one of .*weights, 0 to 4, got {step}"):
            history.weights(step)


def test_the_first_model_stays_while_others_are_read(run):
    folder, weights = run
    history = History(folder / "weights")
    first = dict(history.weights(0))
    history.weights(4)
    assert_equal(first, weights[0])


def test_from_one_step_to_the_next_one_delta_is_read(run, monkeypatch):
    folder, _ = run
    history = History(folder / "weights")
    delta_sizes = []
    monkeypatch.setattr("rlkernels.weights.checkpoints.apply_", lambda weights, delta: delta_sizes.append(len(delta)))
    for step in (1, 2, 3, 4, 4):
        history.weights(step)
    assert len(delta_sizes) == 4


def test_damaged_histories(run, tmp_path):
    folder, weights = run
    second = step_file(folder / "weights", 2)
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"step-000002.delta: delta is damaged"):
        History(folder / "weights").weights(3)
    second.write_bytes(encode(weights[2], weights[0]))
    history = History(folder / "weights")
    with pytest.raises(ValueError, match=r"step-000002.delta: weights are not those that the delta was made from"):
        history.weights(4)
    assert torch.equal(history.weights(1)["experts"], weights[1]["experts"])
    with pytest.raises(ValueError, match="must be called like step-000010.delta, got .*last.delta"):
        open_checkpoint(folder / "weights" / "last.delta")
    second.unlink()
    with pytest.raises(ValueError, match=r"step-000002.delta is missing: later steps cannot be restored"):
        History(folder / "weights")
    with pytest.raises(ValueError, match="base is not a folder"):
        History(tmp_path)


def test_stream_top1_of_steps(run, tmp_path):
    """Compare the first model with a step, and two steps."""
    folder, _ = run
    names = ["a_proj.weight", "b_proj.weight", "experts[0]", "experts[1]"]
    steps = {0: folder / "weights" / "base"} | {i: step_file(folder / "weights", i) for i in range(1, STEPS + 1)}
    plain = {0: steps[0]} | {i: tmp_path / f"checkpoint-{i}" for i in range(1, STEPS + 1)}
    for first, last in ((0, 3), (1, 4), (4, 2)):
        modules, expected = (list(stream_top1(paths[first], paths[last])) for paths in (steps, plain))
        assert [module.name for module in modules] == names
        for module, expected_module in zip(modules, expected, strict=True):
            assert (
                torch.equal(module.update.v, expected_module.update.v)
                and module.update.sigma == expected_module.update.sigma > 0
            )


def test_a_trajectory_along_a_history(run):
    folder, weights = run
    history = History(folder / "weights")
    shapes = history.base.shapes
    trajectory = RankOneTrajectory(Projections(history.base, shapes))
    expected = RankOneTrajectory(Projections.of(weights[0]))
    for step in range(1, STEPS + 1):
        trajectory.track(Projections(history.weights(step), shapes), step=step, accuracy=step / 10)
        expected.track(Projections.of(weights[step]), step=step, accuracy=step / 10)
    assert_equal(trajectory.state_dict(), expected.state_dict())


def test_extrapolate_reads_steps(run, tmp_path, capsys):
    """Steps in any order give the weights that folders give; one model is in memory."""
    folder, _ = run
    base = str(folder / "weights" / "base")
    steps = [str(step_file(folder / "weights", step)) for step in (3, 1, 4, 2)]
    assert main(["extrapolate", base, *steps, "--output-dir", str(tmp_path / "steps")]) == 0
    output = capsys.readouterr().out
    assert "4 checkpoints, 4 of 4 projections taken from step 4 to 8" in output
    folders = [str(tmp_path / f"checkpoint-{step}") for step in range(1, STEPS + 1)]
    assert main(["extrapolate", base, *folders, "--output-dir", str(tmp_path / "folders")]) == 0
    files, expected_files = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("steps", "folders")
    )
    assert files == expected_files and "optimizer.pt" not in files


def test_a_step_as_a_folder(run, tmp_path, capsys):
    folder, _ = run
    for step in range(STEPS + 1):
        out = tmp_path / f"out-{step}"
        assert main(["weights", str(folder), "--step", str(step), "--output-dir", str(out)]) == 0
        source = tmp_path / f"checkpoint-{step}" if step else folder / "weights" / "base"
        names = {"one.safetensors", "two.safetensors", "tokenizer.json", "model.safetensors.index.json"}
        assert {path.name for path in out.iterdir()} == names
        restored, expected = open_checkpoint(out), open_checkpoint(source)
        assert restored.files.keys() == expected.files.keys()
        assert_equal(restored, expected)
    capsys.readouterr()
    for arguments, message in (
        (["--step", "9", "--output-dir", str(tmp_path / "new")], "0 to 4, got 9"),
        (["--step", "1", "--output-dir", str(folder)], "--output-dir must be a new folder"),
    ):
        assert main(["weights", str(folder), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["weights", str(tmp_path), "--step", "1", "--output-dir", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()
