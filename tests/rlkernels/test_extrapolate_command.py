"""``python -m rlkernels extrapolate`` on folders as trainers leave them; a straight line tells the right weights."""

import json
import shutil

import pytest
import torch

from rlkernels.__main__ import main

transformers = pytest.importorskip("transformers", reason="this machine lacks transformers")
STEPS = (10, 20, 30, 40)


def llama(width):
    sizes = {"hidden_size": 24, "intermediate_size": width, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes))


@pytest.fixture
def training(tmp_path):
    """Return base, checkpoints, direction: projections move along one direction, other weights by the step."""
    torch.manual_seed(0)
    model = llama(32)
    model.save_pretrained(tmp_path / "base")
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    direction = {
        name: torch.outer(torch.randn(p.shape[0]), torch.randn(p.shape[1])) * 1e-3
        for name, p in start.items()
        if "_proj" in name
    }
    folders = []
    for step in STEPS:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name] + step * direction[name] if name in direction else start[name] + step)
        folders.append(tmp_path / f"checkpoint-{step}")
        model.save_pretrained(folders[-1], max_shard_size="20KB" if step == STEPS[-1] else "5GB")
        (folders[-1] / "tokenizer.json").write_text("{}")
        (folders[-1] / "optimizer.pt").write_bytes(b"a state of another trainer")
        (folders[-1] / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return tmp_path / "base", folders, start, direction


def extrapolate(base, folders, out, *options):
    return main(["extrapolate", str(base), *map(str, folders), "--output-dir", str(out), *options])


def assert_moved(folder, name, start, move, tolerance=1e-4):
    """Check that a weight of the model in a folder has moved so far from the start."""
    weights = dict(transformers.LlamaForCausalLM.from_pretrained(folder).named_parameters())
    torch.testing.assert_close(weights[name], start[name] + move, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("predictor", ["full", "secant"])
def test_a_straight_line_goes_on(training, tmp_path, capsys, predictor):
    base, folders, start, direction = training
    out = tmp_path / "further"
    assert extrapolate(base, folders, out, "--predictor", predictor, "--horizon", "1.5") == 0
    text = capsys.readouterr().out
    assert "4 checkpoints, 14 of 14 projections taken from step 40 to 60; back-test skill 1.00" in text
    assert "Nothing has tested these weights: evaluate them" in text and "rlkernels.Gate" in text
    weights = dict(transformers.LlamaForCausalLM.from_pretrained(out).named_parameters())
    for name, start_weight in start.items():
        expected = start_weight + 60 * direction[name] if name in direction else start_weight + 40
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-4)
    names = {path.name for path in out.iterdir()}
    assert {"tokenizer.json", "config.json", "model.safetensors.index.json"} <= names and "optimizer.pt" not in names
    assert not (tmp_path / ".further.tmp").exists()
    assert extrapolate(base, folders, out) == 2
    assert "--output-dir must be a new folder, got" in capsys.readouterr().err


def test_reasons_not_to(training, tmp_path, capsys):
    base, folders, _, _ = training
    out = tmp_path / "further"
    unmoved = [shutil.copytree(base, tmp_path / f"unmoved-{step}") for step in STEPS]
    for paths, options, message in (
        (folders[:2], [], "refused: few points (secant needs 3 tracked steps, there are 2)"),
        (folders, ["--accuracy", "0.5", "0.5", "0.5", "0.5"], "refused: flat accuracy (rose by 0.000"),
        (folders, ["--accuracy", "0.5"], "--accuracy must have one number for each of 4 checkpoints, got [0.5]"),
        (folders, ["--predictor", "pls"], "predictor pls goes by accuracy: give --accuracy"),
        (folders, ["--horizon", "1"], "horizon must be above 1, got 1.0"),
        (unmoved, [], "refused: no update"),
        ([*folders[:3], tmp_path / "nowhere-50"], [], "nowhere-50 is not a folder"),
        (
            [*folders[:3], base],
            [],
            "checkpoints must tell their steps, at least 1, by trainer_state.json or by names "
            "such as checkpoint-100, got base (step None)",
        ),
        (
            [*folders, folders[0]],
            [],
            "checkpoints must be of different steps, got checkpoint-10 and checkpoint-10, both of step 10",
        ),
        ([*folders[:3], tmp_path / "start-0"], [], "checkpoints must tell their steps, at least 1,"),
    ):
        assert extrapolate(base, paths, out, *options) == 2
        assert f"rlkernels extrapolate: {message}" in capsys.readouterr().err.replace(f"{tmp_path}/", "")
        assert not out.exists()
    llama(48).save_pretrained(tmp_path / "other-50")
    assert extrapolate(base, [*folders[:3], tmp_path / "other-50"], out) == 2
    assert "other-50 has no model.layers.0.mlp.down_proj.weight of shape [24, 32], as " in capsys.readouterr().err


def test_pls_goes_by_accuracy_in_any_order_of_the_checkpoints(training, tmp_path, capsys):
    base, folders, start, direction = training
    renamed = [path.rename(tmp_path / name) for path, name in zip(folders, ("a", "b", "c-7", "d"))]
    options = ["--predictor", "pls", "--accuracy", "0.4", "0.1", "0.3", "0.2"]
    checkpoints = [renamed[place] for place in (3, 0, 2, 1)]
    assert extrapolate(base, checkpoints, tmp_path / "further", *options) == 0
    assert "taken from step 40 to 80" in capsys.readouterr().out, "trainer_state.json tells the steps"
    name = "model.layers.0.mlp.up_proj.weight"  # an accuracy of 1 is ten times that of the first checkpoint
    assert_moved(tmp_path / "further", name, start, 100 * direction[name], tolerance=1e-3)


@pytest.mark.parametrize("order", [(0, 3, 1, 2), (3, 2, 1, 0)], ids=["of a shell", "backwards"])
@pytest.mark.parametrize("nested", [False, True])
def test_checkpoints_are_sorted_by_the_steps_of_their_names(training, tmp_path, capsys, order, nested):
    base, folders, start, direction = training
    for number, folder in enumerate(folders):
        (folder / "trainer_state.json").unlink()
        if nested:  # as verl's
            target = tmp_path / f"global_step_{folder.name.split('-')[1]}" / "actor" / "huggingface"
            target.parent.mkdir(parents=True)
            folders[number] = folder.rename(target)
    assert extrapolate(base, [folders[place] for place in order], tmp_path / "further", "--horizon", "1.5") == 0
    assert "taken from step 40 to 60" in capsys.readouterr().out
    name = "model.layers.1.self_attn.q_proj.weight"
    assert_moved(tmp_path / "further", name, start, 60 * direction[name])
