"""Tests inside the real vLLM, which has an environment of its own: ``make test-vllm``."""

import importlib.util
import json
import os
from functools import partial
from pathlib import Path

import pytest

MAX_LENGTH = 256
VOCAB = 97

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.path.parent.name == "with_vllm":
                item.add_marker(pytest.mark.skip(reason="this machine lacks vLLM (make test-vllm sets it up)"))


@pytest.fixture(autouse=True)
def poison_uninitialised_memory():
    """Poison nothing: vLLM's buffers may be uninitialised."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Save a policy whose head is tied to its embedding; vLLM's attention needs heads of 32 numbers.

    Its generation config has penalties, which a server applies to requests that set none.
    """
    from rollouts import MAX_POSITIONS
    from tiny import save_tiny_policy

    size = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save_tiny_policy(tmp_path_factory.mktemp("policy"), max_position_embeddings=MAX_POSITIONS, **size)
    options = {"eos_token_id": 63, "repetition_penalty": 1.5, "presence_penalty": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(options))
    return folder


@pytest.fixture
def model(folder):
    from rollouts import load

    return load(folder)


@pytest.fixture
def gloo(monkeypatch):
    """Return the module that trains in two processes, which gloo connects."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "python_trainer"))
    return importlib.import_module("gloo")


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory):
    """Save a tiny random policy whose greedy answers vary."""
    from tiny import save_tiny_policy

    size = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    folder = tmp_path_factory.mktemp("model")
    return str(save_tiny_policy(folder, vocab=VOCAB, max_position_embeddings=MAX_LENGTH, **size))


@pytest.fixture(scope="session")
def make_llm(untied_folder):
    """Return a function that makes a vLLM engine in float32 in this process; more arguments are vLLM's."""
    from vllm import LLM

    return partial(
        LLM, model=untied_folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        max_model_len=MAX_LENGTH, max_num_seqs=8, disable_log_stats=False, kv_cache_memory_bytes=64 << 20,
    )  # fmt: skip
