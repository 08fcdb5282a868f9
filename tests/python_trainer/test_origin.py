"""Ranks that begin with different things end at once; a resumed run finds what it began with, or says what changed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import QUIET, merged, run_settings, train
from gloo import KINDS, run_on_ranks
from safetensors.torch import load_file, save_file
from support import write_jsonl
from transformers import AutoTokenizer

from python_trainer.command_line.sft import Sft
from python_trainer.config import load_config
from python_trainer.data import Example
from python_trainer.errors import UserError, is_shared
from python_trainer.loop import origin
from python_trainer.loop.origin import digest_examples, digest_weights
from python_trainer.model.loading import tokenizer_fingerprint
from python_trainer.settings import shared_values
from python_trainer.trainer import Trainer


@pytest.fixture
def changed_policy(tiny_policy, tmp_path):
    """Save a policy of the same shapes, one of whose weights differs in its last bit."""
    folder = shutil.copytree(tiny_policy, tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    first = weights["model.norm.weight"].view(torch.int32)
    first[0] ^= 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_digest_of_weights_is_of_names_types_shapes_and_bits(tiny_policy, changed_policy, tmp_path):
    """The digest depends on neither the number of files nor that of threads."""
    digest = digest_weights(tiny_policy)
    weights = load_file(tiny_policy / "model.safetensors")
    assert digest_weights(changed_policy) != digest
    sharded = shutil.copytree(tiny_policy, tmp_path / "parts")
    (sharded / "model.safetensors").unlink()
    names = sorted(weights)
    places = {}
    for number in range(3):
        shard = {name: weights[name] for name in names[number::3]}
        save_file(shard, sharded / f"model-{number}.safetensors")
        places |= dict.fromkeys(shard, f"model-{number}.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert digest_weights(sharded) == digest
    finally:
        torch.set_num_threads(threads)
    name = "model.norm.weight"
    for changes in ({name: weights[name].half()}, {name: weights[name].view(4, 8)}, {"x": weights[name].clone()}):
        save_file(weights | changes, changed_policy / "model.safetensors")
        assert digest_weights(changed_policy) != digest


def test_a_digest_of_prompts_covers_what_rewards_get():
    """Columns may hold what JSON does not know; where an object lies in memory and the order of a set do not count."""
    ids = [[1, 2], [3]]

    def digest(*columns):
        return digest_examples([Example("p", column) for column in columns], ids)

    first = digest({"a": 1, "b": {"x", "y", "z"}, "c": object()}, {})
    assert first == digest({"a": 1, "b": {"z", "y", "x"}, "c": object()}, {})
    assert first != digest({"a": 2, "b": {"x", "y", "z"}, "c": object()}, {})
    examples = [Example("p"), Example("p")]
    assert digest_examples(examples, [[1, 2], [3]]) != digest_examples(examples, [[1], [2, 3]])


def test_places_may_differ_between_ranks(make_config, tmp_path):
    """Each node may have copies of its own, whose contents are compared."""
    names = {"model": {"path": "/a"}, "task": {"train_path": "/a"}, "rollout": {"vllm_server": "http://a:1"}}
    rhyme = {"accelerators": {"rhyme": {"database": "/a.db"}}, "evaluation": {"sets": {"hard": "/a"}}}
    config = make_config(**names, **rhyme)
    other_config = load_config(json.loads(config.model_dump_json().replace('"/a', '"/b').replace("//a:", "//b:")))
    assert config != other_config and shared_values(config) == shared_values(other_config)
    assert shared_values(config) != shared_values(make_config(**names, evaluation={"sets": {"hard": "/a"}}))


CHANGES = {
    "learning rate": ({"optimizer": {"learning_rate": 0.5}}, r"optimizer.learning_rate \(0.5, not 0.01\)"),
    "seed": ({"seed": 3}, r"seed \(3, not 0\)"),
    "weights": ({"model": {"path": "other"}}, "the initial weights"),
    "prompts": ({"task": {"train_path": "prompts.jsonl"}}, "the train prompts"),
    "answers": ({"task": {"test_path": "answers.jsonl"}}, "the test prompts"),
}


def set_ups_that_differ(settings, folder):
    """Set up two ranks, of which the second has one thing that differs."""
    for parallel, kind in KINDS.items():
        for name, (changes, message) in CHANGES.items():
            if parallel == "fsdp2" and name == "weights":
                continue  # all ranks get those of rank 0
            values = settings | {"parallel": parallel}
            if dist.get_rank() == 1:
                local = {
                    part: {key: str(folder / value) if "path" in key else value for key, value in section.items()}
                    if isinstance(section, dict) else section
                    for part, section in changes.items()
                }  # fmt: skip
                values = merged(values, local)
            with pytest.raises(UserError, match=f"^process 1 of 2 differs from process 0 in {message}$") as caught:
                Trainer(load_config(values), folder / "run", console=QUIET, ranks=kind())
            assert is_shared(caught.value), name


@pytest.mark.slow  # two processes
def test_ranks_that_begin_differently_end_with_one_line(tiny_policy, jsonl_files, changed_policy, tmp_path):
    settings = run_settings(tiny_policy, jsonl_files)
    lines = Path(jsonl_files[0]).read_text().splitlines(keepends=True)
    (tmp_path / "prompts.jsonl").write_text("".join(lines[::-1]))
    rows = [json.loads(line) | {"answer": "1"} for line in Path(jsonl_files[1]).read_text().splitlines()]
    write_jsonl(tmp_path / "answers.jsonl", rows)
    run_on_ranks(tmp_path, set_ups_that_differ, settings, tmp_path)
    assert not (tmp_path / "run").exists()


def test_the_code_of_plugins_is_compared(tmp_path, monkeypatch):
    (tmp_path / "my_reward_of_ranks.py").write_text("def f(completions, **_): return [1.0] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("my_reward_of_ranks")
    first = origin.digest_code(['["my_reward_of_ranks:f"]'])
    assert first == origin.digest_code(['["my_reward_of_ranks:f"]'])
    (tmp_path / "my_reward_of_ranks.py").write_text("def f(completions, **_): return [0.0] * len(completions)\n")
    assert first != origin.digest_code(['["my_reward_of_ranks:f"]'])


LORA = {"model": {"lora": {"r": 2, "alpha": 4}}}
BETA = {"algorithm": {"beta": 0.1}}


@pytest.mark.parametrize("first_settings", [LORA, BETA], ids=["lora", "beta"])
@pytest.mark.parametrize("place", ["another path", "the same path"])
def test_a_resumed_run_finds_its_base_weights(
    make_config, tiny_policy, changed_policy, tmp_path, first_settings, place
):
    base = shutil.copytree(tiny_policy, tmp_path / "base")
    first_settings = first_settings | {"model": {**first_settings.get("model", {}), "path": str(base)}}
    train(make_config(**first_settings, max_steps=1), tmp_path / "run")
    moved = base.rename(tmp_path / "moved")
    path = moved if place == "another path" else base
    resumed_settings = {"model": {**first_settings.get("model", {}), "path": str(path)}, "max_steps": 2}
    if place == "the same path":
        shutil.copytree(changed_policy, base)  # the files behind it were replaced
    else:
        config = make_config(**merged(first_settings, resumed_settings))
        train(config, tmp_path / "run", resume=True)  # with the same weights
        resumed_settings["model"]["path"] = str(changed_policy)
    config = make_config(**merged(first_settings, resumed_settings | {"max_steps": 3}))
    with pytest.raises(UserError, match="run began with another weights than model.path has now"):
        Trainer(config, tmp_path / "run", resume=True, console=QUIET)


def test_all_weights_of_a_run_are_in_its_checkpoint(make_config, changed_policy, tmp_path):
    """Then it goes on without the model that it began with."""
    train(make_config(max_steps=1), tmp_path / "run")
    resumed = train(make_config(max_steps=2, model={"path": str(changed_policy)}), tmp_path / "run", resume=True)
    assert resumed.state.step == 2


@pytest.mark.parametrize(("first_settings", "changes", "message"), [
    ({}, {"seed": 1}, "seed must be 0, with which .*run began, got 1"),
    (LORA, {"model": {"lora": {"r": 2, "alpha": 8}}}, "model.lora.alpha must be 4.0, with which .*run began, got 8.0"),
])  # fmt: skip
def test_a_resumed_run_keeps_its_seed_and_the_scale_of_its_adapters(
    make_config, tmp_path, first_settings, changes, message
):
    train(make_config(max_steps=1, **first_settings), tmp_path / "run")
    with pytest.raises(UserError, match=message):
        Trainer(make_config(max_steps=2, **changes), tmp_path / "run", resume=True, console=QUIET)


def test_a_resumed_run_finds_its_tokenizer(make_config, tiny_policy, tmp_path):
    train(make_config(max_steps=1), tmp_path / "run")
    folder = shutil.copytree(tiny_policy, tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(AutoTokenizer.from_pretrained(tiny_policy))
    with pytest.raises(UserError, match="run began with another tokenizer than model.path has now"):
        Trainer(make_config(model={"path": str(folder)}), tmp_path / "run", resume=True, console=QUIET)


def test_sft_keeps_its_seed(lessons, tmp_path):
    values = merged(lessons, {"sft": {"epochs": 1}})
    Sft(load_config(values), tmp_path / "run", console=QUIET).run()
    with pytest.raises(UserError, match="seed must be 0"):
        Sft(load_config(values | {"seed": 2}), tmp_path / "run", resume=True, console=QUIET)
