"""Several vLLM servers: where they are, what each is asked and sent; tests/with_vllm has real ones."""

import shutil
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from unittest.mock import Mock, patch

import pytest
import torch
from conftest import LORA, merged, run_settings
from fake_vllm import EOS, FakeWorker, draw, serving, urls
from gloo import run_on_ranks, train
from safetensors.torch import load_file
from support import assert_equal, lacks

from python_trainer.config import load_config
from python_trainer.data import Request, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.loop.parts import make_engine
from python_trainer.model.lora import is_adapter
from python_trainer.model.policy import load_policy
from python_trainer.model.weights import checkpoint_weights
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.vllm import servers as servers_module
from python_trainer.rollout.vllm.engine import VLLMEngine
from python_trainer.rollout.vllm.servers import AdapterFiles, Server, Servers, read
from rlkernels.weights import encode


@pytest.fixture
def fakes():
    """Start three servers, and yield them."""
    with ExitStack() as running:
        servers = [running.enter_context(serving()) for _ in range(3)]
        for server in servers:
            server.answers["/v1/completions"] = draw
        yield servers


def test_one_address_or_several():
    addresses = ["http://localhost:1", "http://[::1]:2/v"]
    for setting, servers in (None, None), (addresses[0], addresses[:1]), (addresses, addresses):
        assert load_config({"rollout": {"engine": "vllm", "vllm_server": setting}}).rollout.vllm_server == servers


def test_the_longest_goes_to_the_server_with_the_fewest_tokens(fakes, model, tmp_path):
    lengths = {1: 10, 2: 50, 3: 30, 4: 24}
    history = LengthHistory()
    history.observe([Request([i]) for i in lengths], [Rollout([], [0] * n) for n in lengths.values()])
    servers = Servers(model, urls(fakes[:2]), tmp_path / "weights")
    engine = VLLMEngine(model, servers, eos_token_ids=[EOS])
    engine.lengths = history
    requests = [Request([token], (), samples, 100) for token, samples in ((1, 2), (2, 1), (3, 1), (4, 1), (5, 1))]
    engine.generate(requests, SamplingParams())
    # 50 + 24, and 30 + 28.5 of a prompt never seen + 10 * 2
    assert [sorted(body["prompt"][0] for body in fake.token_requests()) for fake in fakes] == [[2, 4], [1, 3, 5], []]


def test_answers_do_not_depend_on_the_number_of_servers(fakes, model, tmp_path):
    requests = [Request([i, 1], [2] * (i % 2), 1 + i % 4, 20 + i, sample_id=10 * i) for i in range(20)]
    for sampling in SamplingParams(seed=1), SamplingParams(temperature=0.0):
        answers_by_count = []
        for count in (1, 2, 3):
            engine = VLLMEngine(model, Servers(model, urls(fakes[:count]), tmp_path / "weights"), eos_token_ids=[63])
            answers_by_count.append([(r.ids, r.logprobs, r.finish_reason) for r in engine.generate(requests, sampling)])
        assert answers_by_count[0] == answers_by_count[1] == answers_by_count[2] and {
            reason for _, _, reason in answers_by_count[0]
        } == {"stop"}
    assert all(fake.token_requests() for fake in fakes)


def test_weights_are_written_once_and_read_by_all_at_the_same_time(fakes, model, tmp_path, monkeypatch):
    """Each server answers only when all have been asked, and some time later, also after answers."""
    monkeypatch.setattr(servers_module, "LOOK_SECONDS", 0.05)
    folder = tmp_path / "weights"
    all_are_reading = threading.Barrier(3)
    events = []

    def load(body):
        if body["method"] == "load_policy":
            assert folder.exists()
            all_are_reading.wait(60)
            time.sleep(0.2)
            events.append("load")
        return {"results": [fakes[0].settings]}

    def complete(body):
        events.append("complete")
        return draw(body)

    for fake in fakes:
        fake.answers |= {"/collective_rpc": load, "/v1/completions": complete, "/health": ""}
    engine = VLLMEngine(model, Servers(model, urls(fakes), folder), eos_token_ids=[63])
    with patch.object(type(model), "save_pretrained", autospec=True, side_effect=type(model).save_pretrained) as save:
        for _ in range(2):
            engine.generate([Request([i]) for i in range(4)], SamplingParams())
            engine.policy_updated()
    assert save.call_count == 2 and not folder.exists()
    assert events == (["load"] * 3 + ["complete"] * 4) * 2
    assert all(fake.loaded.keys() == fakes[0].loaded.keys() for fake in fakes)


def test_counts_are_added_up_and_the_smallest_limit_holds(fakes, model, tmp_path):
    fakes[1].settings["max_model_len"] = 40
    servers = Servers(model, urls(fakes), tmp_path / "weights")
    assert servers.counters() == {"prompt_tokens": 30, "cached_tokens": 12, "preemptions": 0, "forward_passes": 18}
    assert servers.max_positions == 40 and fakes[1].url in servers.limited_by


def test_the_server_that_fails_is_named(fakes, model, tmp_path):
    engine = VLLMEngine(model, Servers(model, urls(fakes), tmp_path / "weights"), eos_token_ids=[63])
    requests = [Request([i]) for i in range(9)]
    fakes[1].answers["/v1/completions"] = 500
    with pytest.raises(UserError, match=f"/v1/completions of the vLLM server {fakes[1].url} answers 500: refused"):
        engine.generate(requests, SamplingParams())
    fakes[1].answers["/v1/completions"] = lambda body: {
        "choices": [draw(body)["choices"][0] | {"finish_reason": "abort"}]
    }
    with pytest.raises(UserError, match=rf"{fakes[1].url} ended answers early \(abort\): it was stopped or paused"):
        engine.generate(requests, SamplingParams())
    fakes[2].answers["/collective_rpc"] = 500
    engine.policy_updated()
    reason = r"does not take weights \(load_policy: .*500: refused.*start it with"
    with pytest.raises(UserError, match=f"the vLLM server {fakes[2].url} {reason}"):
        engine.generate(requests, SamplingParams())
    assert not (tmp_path / "weights").exists()
    fakes[1].answers["/version"] = "no JSON"
    with pytest.raises(UserError, match=f"{fakes[1].url}/version must answer as vLLM, got 'no JSON'"):
        Servers(model, urls(fakes), tmp_path / "weights")
    blocked = tmp_path / "file"
    blocked.touch()
    servers = Servers(model, urls(fakes[:1]), blocked / "weights")
    with pytest.raises(UserError, match="the weights for rollout.vllm_server cannot be written: .*file"):
        servers.load(model)


@pytest.mark.parametrize("late", [False, True])
def test_who_interrupts_waits_for_no_answer(fakes, model, tmp_path, monkeypatch, late):
    """Nor where a thread has only taken up its request then, and sends it later."""
    finished = threading.Event()
    send = threading.Event()
    ask = Server.complete
    fakes[0].answers |= {"/v1/completions": lambda body: finished.wait(60) and draw(body), "/health": ""}
    threads = {*threading.enumerate()}
    monkeypatch.setattr(servers_module, "LOOK_SECONDS", 0.1)
    if late:
        monkeypatch.setattr(Server, "complete", lambda *args: send.wait(60) and ask(*args))
    engine = VLLMEngine(model, Servers(model, urls(fakes[:1]), tmp_path / "weights"), eos_token_ids=[63])
    monkeypatch.setattr(servers_module, "wait", Mock(side_effect=KeyboardInterrupt))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request([1])] * 200, SamplingParams())
    send.set()
    for thread in {*threading.enumerate()} - threads:
        if thread.name.startswith("ThreadPool"):  # Python does not end before
            thread.join(30)
    assert time.monotonic() - start < 30
    finished.set()
    assert len(fakes[0].token_requests()) <= servers_module.CONNECTIONS


def test_a_server_behind_tls_may_answer_late(fakes, tmp_path, monkeypatch):
    """TLS 1.3 sends tickets first: the socket has bytes long before the answer begins."""
    if shutil.which("openssl") is None:
        lacks("openssl")
    request = "req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -subj /CN=x -addext subjectAltName=DNS:localhost"
    subprocess.run(["openssl", *request.split()], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    looks = []
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    fakes[0].socket = context.wrap_socket(fakes[0].socket, server_side=True)
    fakes[0].answers["/late"] = lambda body: time.sleep(1.5) or "at last"
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
    monkeypatch.setattr(servers_module, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(servers_module, "LOOK_SECONDS", 0.1)
    address = f"https://localhost:{fakes[0].server_address[1]}/late"
    assert read(address, b"{}", lambda: looks.append(1)) == (200, "at last") and looks


@pytest.mark.parametrize(("answers", "settings", "difference"), [
    ({"/v1/models": {"data": [{"id": "another"}]}}, {}, "model policy at {0} and another at {2}"),
    ({}, {"dtype": "bfloat16"}, "dtype float32 at {0} and bfloat16 at {2}"),
])  # fmt: skip
def test_servers_of_different_models(fakes, model, tmp_path, answers, settings, difference):
    for fake in fakes:
        fake.settings["dtype"] = "float32"
    fakes[2].answers |= answers
    fakes[2].settings |= settings
    expected = f"rollout.vllm_server must name servers of the same model, got {difference.format(*urls(fakes))}"
    with pytest.raises(UserError, match=expected):
        Servers(model, urls(fakes), tmp_path / "weights")


@pytest.fixture
def sends(fakes, tmp_path, monkeypatch):
    """Return a function of a model: it changes the weights a little, and returns what the servers received."""
    pytest.importorskip("zstandard", reason="this machine lacks zstandard")
    for fake in fakes:
        fake.settings["deltas"] = True

    def prepare(model, count=2):
        engine = VLLMEngine(model, Servers(model, urls(fakes[:count]), tmp_path / "weights"), eos_token_ids=[EOS])
        generator = torch.Generator().manual_seed(0)

        def step():
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + 0.01 * (torch.rand(p.shape, generator=generator) < 0.01))
            engine.policy_updated()
            bytes_before = engine.stats["weight_bytes"]
            num_bodies = [len(fake.bodies) for fake in fakes]
            engine.generate([Request([1])], SamplingParams())
            for fake in fakes[:count]:
                assert_equal(fake.loaded, dict(checkpoint_weights(model)))
            assert not (tmp_path / "weights").exists()
            load_arguments = [[b["args"] for _, b in fake.bodies[n:] if b and b.get("method") == "load_policy"]
                     for fake, n in zip(fakes[:count], num_bodies)]  # fmt: skip
            kinds = [
                " ".join("delta" if args[0].endswith(".delta") else "whole" for args in server_loads)
                for server_loads in load_arguments
            ]
            return kinds, engine.stats["weight_bytes"] - bytes_before

        return step

    return prepare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_servers_get_deltas(model, sends, dtype, monkeypatch):
    """All weights first and every so often, deltas in between: a few percent of the bytes, with equal bits."""
    monkeypatch.setattr(servers_module, "WHOLE_EVERY", 3)
    step = sends(model.to(dtype))
    full, *deltas, later_full = [step() for _ in range(4)]
    assert full[0] == later_full[0] == ["whole", "whole"] and full[1] == later_full[1]
    assert [kinds for kinds, _ in deltas] == [["delta", "delta"]] * 2
    assert all(size < 0.2 * full[1] for _, size in deltas)


def test_a_server_with_other_weights_gets_all_of_them(fakes, model, sends):
    """One that was restarted, and one that another run has used; the other server goes on with deltas."""
    step = sends(model)
    assert step()[0] == ["whole", "whole"]
    fakes[0].worker = FakeWorker()
    assert step()[0] == ["delta whole", "delta"]
    assert step()[0] == ["delta", "delta"]
    for tensor in fakes[1].worker.policy_copy.values():
        tensor.view(-1)[-1] += 1
    assert step()[0] == ["delta", "delta whole"]
    fakes[1].worker.policy_weights({"w": torch.ones(1)}.items(), None, False)
    assert step()[0] == ["delta", "delta whole"]
    assert step()[0] == ["delta", "delta"]
    assert sends(model)()[0] == ["whole", "whole"], "a resumed run knows nothing of the servers"


def test_deltas_need_zstandard_on_both_sides(fakes, model, sends, monkeypatch):
    fakes[1].settings["deltas"] = False
    step = sends(model)
    assert [step()[0] for _ in range(2)] == [["whole", "whole"], ["delta", "whole"]]
    assert all(len(body["args"]) == 1 for _, body in fakes[1].bodies if body.get("method") == "load_policy")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert step()[0] == ["whole", "whole"]
    with pytest.raises(ImportError, match="rlkernels.weights"):
        encode({}, {})


def stir(policy, seed):
    """Set adapters to numbers that matter, as if they were trained."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if is_adapter(name):
                p.copy_(torch.randn(p.shape, generator=gen) * 0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("resumed", [False, True])
def test_of_a_policy_with_adapters_servers_get_the_weights_once(fakes, tiny_policy, tmp_path, dtype, resumed):
    settings = {"path": str(tiny_policy), "device": "cpu", "dtype": dtype, "lora": LORA}
    config = load_config({"model": settings, "rollout": {"vllm_server": urls(fakes[:2])}})
    policy = load_policy(config.model)
    engine = make_engine(config, policy, tmp_path, RankGroup())
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    adapters = sum(policy.model.get_parameter(name).nbytes for name in names)
    weights = sum(w.nbytes for _, w in checkpoint_weights(policy.inference_model))
    sent = []
    assert adapters < weights / 4
    if resumed:
        stir(policy, 9)
        engine.policy_updated()
    for seed in range(3):
        bytes_before = engine.stats["weight_bytes"]
        engine.generate([Request([1])], SamplingParams())
        sent.append(engine.stats["weight_bytes"] - bytes_before)
        for fake in fakes[:2]:
            assert_equal(fake.loaded, dict(checkpoint_weights(policy.inference_model)))
        stir(policy, seed)
        engine.policy_updated()
    header = 250 * len(names)  # names and shapes in the file
    assert weights < sent[0] < weights + adapters * resumed + 10_000
    assert all(adapters < size < adapters + header for size in sent[1:])
    assert (tmp_path / ".vllm").exists()
    engine.close()
    assert not (tmp_path / ".vllm").exists()
    engine.generate([Request([1])], SamplingParams())  # who asks again, all the same
    assert_equal(fakes[0].loaded, dict(checkpoint_weights(policy.inference_model)))
    assert not (tmp_path / ".vllm").exists()


def test_adapters_of_weights_that_a_checkpoint_has_otherwise(model, tmp_path, monkeypatch):
    split = {"a": torch.zeros(1), "b": torch.zeros(1)}
    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", lambda model, state: split)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(UserError, match="q_proj.weight has an adapter, but is divided in .*model.lora.target_modules"):
        AdapterFiles(model, [name], tmp_path)


def go_on(settings, folder, parallel):
    train(settings | {"max_steps": 1}, folder, parallel)
    train(settings, folder, parallel, resume=True)


@pytest.mark.slow
def test_a_sharded_run_with_adapters_goes_on(fakes, tiny_policy, jsonl_files, tmp_path):
    """The servers get the weights of before, as the first process has gathered them, and the adapters."""
    settings = merged(run_settings(tiny_policy, jsonl_files), {"rollout": {"vllm_server": fakes[0].url}})
    settings |= {"max_steps": 2, "optimizer": {"learning_rate": 0.05}, "save": {"save_steps": 1}}
    settings["model"] = settings["model"] | {"lora": LORA}
    run_on_ranks(tmp_path, go_on, settings, tmp_path / "run", "fsdp2")
    start = load_file(tiny_policy / "model.safetensors")
    trained = load_file(tmp_path / "run" / "weights.safetensors")
    assert all(torch.equal(fakes[0].loaded[name], trained[name]) for name in fakes[0].loaded)
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert changed and all(any(target in name for target in LORA["target_modules"]) for name in changed)
