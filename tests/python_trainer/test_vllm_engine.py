"""What the vLLM engine does on its own, and where ``auto`` takes it; tests/with_vllm has the rest."""

import importlib.metadata
import json
import re
import sys
import threading
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
from fake_vllm import MAX_LENGTH, FakeLLM, install, serving
from safetensors.torch import load_file, save_file
from support import assert_equal
from tiny import save_tiny_policy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from python_trainer.accelerators.settings import RPOSettings
from python_trainer.config import load_config
from python_trainer.data import Request, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.loop.parts import make_engine, resolve_engine
from python_trainer.model.policy import load_policy
from python_trainer.model.weights import checkpoint_weights
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.vllm.engine import COUNTERS, Backend, Drawn, VLLMEngine, import_vllm
from python_trainer.rollout.vllm.servers import Server, Servers
from python_trainer.trainer import Trainer


@pytest.fixture
def backend():
    """Return a backend that answers with 1 2 3 ..."""
    counts = dict.fromkeys(COUNTERS, 0.0) | {"prompt_tokens": 7.0}

    def complete(jobs, settings, salt):
        counts["prompt_tokens"] += sum(job.n * len(job.ids) for job in jobs)
        return [
            [Drawn(list(range(1, 1 + job.max_tokens)), [-1.0] * job.max_tokens, "length") for _ in range(job.n)]
            for job in jobs
        ]

    facts = {"max_positions": MAX_LENGTH, "limited_by": "the limit of a mock", "on_first_rank": True, "drafts": False}
    mock = create_autospec(Backend, instance=True, **facts)
    mock.load.return_value = 100
    mock.complete.side_effect = complete
    mock.counters.side_effect = counts.copy
    return mock


@pytest.fixture
def engine(model, backend, tokenizer):
    return VLLMEngine(model, backend, eos_token_ids=[63, 5], tokenizer=tokenizer)


def test_weights_are_loaded_when_they_have_changed(engine, backend):
    for updates, loads in [(0, 1), (0, 1), (1, 2), (3, 3)]:
        for _ in range(updates):
            engine.policy_updated()
        engine.generate([Request([1, 2])], SamplingParams())
        assert backend.load.call_count == loads
    salts = [call.args[2] for call in backend.complete.call_args_list]
    assert salts[0] == salts[1] and len(set(salts)) == 3
    other_engine = VLLMEngine(engine.model, backend, eos_token_ids=[])
    other_engine.generate([Request([1, 2])], SamplingParams())
    assert backend.complete.call_args.args[2] not in salts  # another run on the same server


def test_a_later_turn_draws_otherwise_than_the_first(engine, backend):
    engine.generate([Request([1, 2]), Request([1, 2], [3, 4]), Request([1, 2], [3, 4, 5])], SamplingParams(seed=3))
    first, second, third = (job.seed for job in backend.complete.call_args.args[0])
    assert min(abs(first - second), abs(second - third), abs(first - third)) > 1000


def test_one_job_for_each_request_with_a_seed_for_each_sample(engine, backend):
    requests = [
        Request([1, 2], [3], 4, 6, sample_id=8), Request([1] * MAX_LENGTH, num_generations=2),
        Request([4], (), 0, 6), Request([4], [6], 1, 400, sample_id=2),
    ]  # fmt: skip
    completions = engine.generate(requests, SamplingParams(0.5, 0.9, 7, seed=3))
    assert [len(c.ids) for c in completions] == [6, 6, 6, 6, 0, 0, MAX_LENGTH - 2]
    backend.complete.assert_called_once()
    jobs, settings, _ = backend.complete.call_args.args
    assert [(job.ids, job.n, job.max_tokens) for job in jobs] == [([1, 2, 3], 4, 6), ([4, 6], 1, MAX_LENGTH - 2)]
    assert jobs[0].seed - jobs[1].seed == 6 and 0 < jobs[1].seed < 2**62
    assert settings["stop_token_ids"] == [5, 63] and settings["ignore_eos"]
    assert (settings["temperature"], settings["top_p"], settings["top_k"]) == (0.5, 0.9, 7)
    assert settings["repetition_penalty"] == 1 and not settings["min_p"], "not those of the model's generation config"
    engine.generate(requests, SamplingParams(0.5, seed=4))
    assert abs(backend.complete.call_args.args[0][0].seed - jobs[0].seed) > 1000
    assert engine.stats["prompt_tokens"] == 28 == engine.stats["prefill_tokens"]
    assert engine.stats["generated_tokens"] == 2 * (24 + MAX_LENGTH - 2)


def test_long_answers_are_asked_for_first(model, backend):
    lengths = LengthHistory()
    earlier_answers = (1, 5), (2, 50), (3, 9)
    lengths.observe(
        [Request([token]) for token, _ in earlier_answers], [Rollout([], [0] * length) for _, length in earlier_answers]
    )
    engine = VLLMEngine(model, backend, eos_token_ids=[])
    engine.lengths = lengths
    requests = [Request([i], max_new_tokens=60 + i, sample_id=i) for i in (1, 2, 3)]
    completions = engine.generate(requests, SamplingParams())
    assert [job.ids for job in backend.complete.call_args.args[0]] == [[2], [3], [1]]
    assert [len(c.ids) for c in completions] == [61, 62, 63]


def test_greedy_samples_are_asked_for_once(engine, backend):
    completions = engine.generate([Request([1], (), 3, 2)], SamplingParams(temperature=0.0))
    assert [(job.n, job.max_tokens) for job in backend.complete.call_args.args[0]] == [(1, 2)]
    assert [(c.ids, c.logprobs, c.finish_reason) for c in completions] == [([1, 2], [0.0, 0.0], "length")] * 3


def test_stop_strings_that_begin_in_the_prefix(engine, backend):
    """The characters of tokens 0, 1, ... are "0", "1", ..."""
    requests = [Request([9], [8, 8], max_new_tokens=6), Request([9], [8, 0], 2, max_new_tokens=6)]
    completions = engine.generate(requests, SamplingParams(stop=("012", "45")))
    assert [c.ids for c in completions] == [[1, 2, 3, 4, 5], [1, 2], [1, 2]]
    assert [len(c.logprobs) for c in completions] == [5, 2, 2] and {c.finish_reason for c in completions} == {"stop"}
    assert backend.complete.call_args.args[1]["stop"] == ["012", "45"]
    (apart,) = engine.generate([Request([9], [8, 0], max_new_tokens=6, stops_from=2)], SamplingParams(stop=("012",)))
    assert apart.ids == [1, 2, 3, 4, 5, 6], "what others said begins no stop string"


def test_weights_are_sent_as_a_checkpoint_has_them(tiny_policy, model, tmp_path):
    """Tied ones once; Transformers keeps experts in one tensor, checkpoints and vLLM one by one."""
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    experts = Qwen3MoeForCausalLM(config)
    experts.save_pretrained(tmp_path)
    for sent, folder in ((model, tiny_policy), (experts, tmp_path)):
        saved = load_file(folder / "model.safetensors")
        assert_equal(dict(checkpoint_weights(sent)), saved)
    assert any("experts.3.up_proj" in name for name in saved)


def test_vllm_is_missing_or_too_old(make_config, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"needs the package vllm >= 0.32 here, or a server \(rollout.vllm_server\)"):
        Trainer(make_config(rollout={"engine": "vllm"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for version, fine in [("0.31.2", False), ("0.32.0+cpu", True), ("1.0", True), ("unknown", False)]:
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
        if fine:
            assert import_vllm().__version__ == version
        else:
            with pytest.raises(UserError, match=f"needs vllm >= 0.32; the package vllm is {version}"):
                import_vllm()


def test_vllm_reads_the_folder_of_an_adapters_base(make_config, tiny_policy, tmp_path, monkeypatch):
    install(monkeypatch, sleeps=False)
    config = make_config(rollout={"engine": "vllm"})
    policy = load_policy(config.model)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_policy)}))
    policy.name = str(tmp_path)
    make_engine(config, policy, tmp_path, RankGroup())
    assert FakeLLM.last.folder == str(tiny_policy)


@pytest.fixture
def fake():
    with serving() as server:
        yield server


@pytest.mark.parametrize("on_server", [False, True])
def test_the_limit_of_vllm_counts_like_that_of_the_model(make_config, tmp_path, monkeypatch, fake, on_server):
    install(monkeypatch, sleeps=False)
    monkeypatch.setattr("fake_vllm.MAX_LENGTH", 12)
    fake.settings["max_model_len"] = 12
    rollout = {"engine": "vllm", "vllm_server": fake.url if on_server else None}
    source = r"the vLLM server http.* \(--max-model-len\)" if on_server else "rollout.engine vllm .*memory_bytes.*"
    with pytest.raises(UserError, match=f"leaves no room for a prompt: the limit of {source} is 12 tokens"):
        Trainer(make_config(rollout=rollout), tmp_path / "run")


def test_training_goes_beyond_a_sliding_window_as_vllm_does(make_config, tmp_path, fake):
    options = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0}
    model = {"path": str(save_tiny_policy(tmp_path / "policy", **options)), "device": "cpu"}
    rollout = {"engine": "vllm", "vllm_server": fake.url}
    assert Trainer(make_config(model=model, rollout=rollout), tmp_path / "run").policy.max_length > 12


def test_a_server_gets_weights_by_file_and_prompts_by_token(fake, model, tmp_path):
    drawn = {"logprobs": {"token_logprobs": [-0.5, -1.5]}, "finish_reason": "stop"}
    (tmp_path / "weights").mkdir()
    save_file({"left": torch.ones(1)}, tmp_path / "weights" / "adapter.safetensors")  # by a run that was killed
    fake.answers["/v1/completions"] = {"choices": [drawn | {"index": i, "token_ids": [i, 63]} for i in (1, 0)]}
    engine = VLLMEngine(model, Servers(model, [f"{fake.url}/"], tmp_path / "weights"), eos_token_ids=[63])
    assert engine.max_positions == MAX_LENGTH
    completions = engine.generate([Request([1, 2], [3], 2, 8, sample_id=4)], SamplingParams(seed=1))
    assert [(c.ids, c.logprobs, c.finish_reason) for c in completions] == [
        ([i, 63], [-0.5, -1.5], "stop") for i in (0, 1)
    ]
    assert set(fake.loaded) == set(dict(checkpoint_weights(model))) and not (tmp_path / "weights").exists()
    path, body = fake.bodies[-1]
    assert path == "/v1/completions" and body["prompt"] == [1, 2, 3] and body["n"] == 2 and body["max_tokens"] == 8
    assert body["model"] == "policy" and body["cache_salt"].endswith("-0") and body["return_token_ids"]


@pytest.mark.parametrize(("answers", "settings", "message"), [
    ({"/version": {"version": "0.31.0"}}, {}, "needs vllm >= 0.32; the server http.* is 0.31.0"),
    ({"/version": 404}, {}, "/version of the vLLM server http.* answers 404"),
    ({"/version": {}}, {}, "http.*/version must answer as vLLM, got '{}'"),
    ({"/v1/models": {"data": []}}, {}, r"/v1/models must answer as vLLM, got '{\"data\": \[\]}'"),
    ({"/v1/models": [1]}, {}, r"/v1/models must answer as vLLM, got '\[1\]'"),
    ({"/collective_rpc": 404}, {}, "does not take weights.*404.*start it with: VLLM_SERVER_DEV_MODE=1 vllm serve"),
    ({}, {"logprobs_mode": "raw_logprobs"}, "gives raw_logprobs, not those .*--logprobs-mode processed_logprobs"),
    ({}, {"vocab_size": 99}, "serves policy, whose vocab_size is 99; the policy's is 64"),
    ({}, {"model_type": "llama"}, "serves policy, whose model_type is llama; the policy's is qwen2"),
])  # fmt: skip
def test_a_server_that_will_not_do(fake, model, answers, settings, message):
    fake.answers |= answers
    fake.settings |= settings
    with pytest.raises(UserError, match=message):
        Server(model, fake.url)


@pytest.mark.parametrize(("url", "reason"), [
    ("http://127.0.0.1:1", "refused"),
    ("http://node..cluster:8000", "label"),
    ("http://127.0.0.1:1/ä", "can't encode character"),
    ("http://[1:2]:8000", "does not appear to be an IPv4 or IPv6 address"),
])  # fmt: skip
def test_no_server(make_config, tmp_path, url, reason):
    with pytest.raises(UserError, match=f"rollout.vllm_server: no vLLM server answers at {re.escape(url)}: .*{reason}"):
        Trainer(make_config(rollout={"engine": "vllm", "vllm_server": url}), tmp_path / "run")


@pytest.mark.parametrize("health", [200, 503])
def test_an_engine_that_dies_while_it_is_waited_for(fake, model, tmp_path, monkeypatch, health):
    """vLLM then never answers what loads weights."""
    server = Servers(model, [fake.url], tmp_path / "weights")
    health_asked = threading.Event()
    finished = threading.Event()
    monkeypatch.setattr("python_trainer.rollout.vllm.servers.LOOK_SECONDS", 0.02)  # connecting may take that

    def hang(body):
        health_asked.wait(60)
        if health != 200:
            finished.wait(60)
        return {"results": [None]}

    def look(body):
        health_asked.set()
        return "" if health == 200 else health

    fake.answers |= {"/collective_rpc": hang, "/health": look}
    try:
        if health == 200:
            server.load(model)  # slow, but alive
        else:
            with pytest.raises(UserError, match=r"the engine of http.* has died .*503.*: start it again"):
                server.load(model)
    finally:
        finished.set()
    assert health_asked.is_set() and not (tmp_path / "weights").exists()


@pytest.mark.parametrize("gpu", [False, True])
def test_auto_takes_vllm_for_servers_alone(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.1")
    engines = {
        "paged": [{}, {"model": {"device": "cpu"}}, {"rollout": {"engine": "paged"}}],
        "vllm": [{"rollout": {"engine": "vllm"}}, {"rollout": {"vllm_server": "http://localhost:8000"}}],
    }
    for engine, settings in engines.items():
        assert all(resolve_engine(load_config(section)).rollout.engine == engine for section in settings)


def test_a_plugin_that_vllm_does_not_suit_is_no_good_with_servers(monkeypatch):
    refuse = {"vllm": "no vllm"}
    monkeypatch.setattr(RPOSettings, "conflicts", lambda self, config: refuse.get(config.rollout.engine))
    with pytest.raises(UserError, match="no vllm"):
        resolve_engine(
            load_config({"accelerators": {"enabled": ["rpo"]}, "rollout": {"vllm_server": "http://127.0.0.1:1"}})
        )
