"""What ``rollout.engine: auto`` stands for, and that a run says so."""

import importlib.metadata
import io
from functools import partial

import pytest
import torch
from fake_llm import install
from rich.console import Console

from python_trainer.config import check_config
from python_trainer.parts import resolve_engine
from python_trainer.rollout import VLLMEngine
from python_trainer.trainer import Trainer


@pytest.fixture
def machine(monkeypatch):
    """Sets whether there is a GPU, and which vLLM is installed."""

    def be(gpu, vllm):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        version = importlib.metadata.version

        def installed(name):
            if name == "vllm" and vllm is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return vllm if name == "vllm" else version(name)

        monkeypatch.setattr(importlib.metadata, "version", installed)

    return be


def chosen(**sections):
    config, said = resolve_engine(check_config(sections, source="test"))
    return config.rollout.engine, said


@pytest.mark.parametrize(
    ("gpu", "vllm", "engine"),
    [(False, "0.32.1", "paged"), (True, None, "paged"), (True, "0.31.0", "paged"), (True, "0.32.1", "vllm")],
)
def test_vllm_generates_where_there_is_a_gpu_and_it_is_installed(machine, gpu, vllm, engine):
    machine(gpu, vllm)
    found, said = chosen()
    assert found == engine and (said is not None) == (engine == "vllm")
    assert chosen(rollout={"engine": "paged"}) == ("paged", None)
    assert chosen(model={"device": "cpu"}) == ("paged", None)
    assert chosen(rollout={"vllm_server": "http://localhost:8000"}) == ("vllm", None), "a server is enough"
    assert chosen(parallel="fsdp2")[0] == chosen(accelerators={"enabled": ["drafts"]})[0] == engine


def test_settings_that_do_not_go_with_it_come_first(machine):
    settings = {"accelerators": {"enabled": ["drafts"], "drafts": {"max_draft_tokens": 129}}}
    machine(True, "0.32.1")
    engine, said = chosen(**settings)
    assert engine == "paged" and "max_draft_tokens must be at most 128 with rollout.engine vllm, got 129" in said
    machine(True, None)
    assert chosen(**settings) == ("paged", None)


def test_a_run_says_what_generates(make_config, machine, monkeypatch, tmp_path):
    machine(False, "0.32.1")
    install(monkeypatch, sleeps=False)
    monkeypatch.setattr("python_trainer.parts.resolve_engine", partial(resolve_engine, gpu=True))
    console = Console(record=True, file=io.StringIO())
    trainer = Trainer(make_config(), tmp_path / "run", console=console)
    assert isinstance(trainer.engine, VLLMEngine)
    assert trainer.learner.algorithm.importance_sampling == "token_truncate"
    assert "auto generates with vLLM, which is installed" in " ".join(console.export_text().split())
