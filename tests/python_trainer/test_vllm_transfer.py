"""vLLM's own weight transfer, by modules that stand in for vLLM's; tests/with_vllm has the real ones."""

import socket
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from fake_vllm import draw, serving
from transformers import AutoModelForCausalLM

from python_trainer.config import load_config
from python_trainer.errors import UserError
from python_trainer.model.policy import load_policy
from python_trainer.rollout import Request, SamplingParams, VLLMEngine
from python_trainer.rollout.make import make_engine
from python_trainer.rollout.vllm.in_process import checkpoint_weights
from python_trainer.rollout.vllm.servers import Servers
from python_trainer.rollout.vllm.weights import BACKENDS, TRANSFER, Transfer, address_towards, nccl_info


@dataclass
class Info:
    master_address: str
    master_port: int
    world_size: int
    rank: int


class Sender:
    """What the factory of trainer engines makes: it tells the server what is sent, as vLLM's does."""

    made: ClassVar = []

    def __init__(self, info, client, source):
        self.info, self.client, self.source = info, client, source
        client.init_weight_transfer_engine({"world_size": info.world_size})
        self.made.append(self)

    def send_weights(self):
        self.client.start_weight_update()
        self.client.update_weights({"names": [meta.name for meta in self.source.metadata()]})
        self.sent = dict(self.source)
        assert {m.name: (m.dtype, m.shape) for m in self.source.metadata()} == {
            name: (weight.dtype, tuple(weight.shape)) for name, weight in self.sent.items()
        }
        self.client.finish_weight_update()


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """In vLLM's place."""
    Sender.made = []
    factory = SimpleNamespace(WeightTransferTrainerFactory=SimpleNamespace(trainer_init=Sender))
    parts = {"factory": factory, "nccl_engine": SimpleNamespace(NCCLTrainerInitInfo=Info)}
    parts["base"] = SimpleNamespace(WeightSource=object, ParamMeta=lambda *a: SimpleNamespace(**dict(zip(META, a))))
    monkeypatch.setitem(BACKENDS, "letters", nccl_info)  # for a policy on a CPU
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"{TRANSFER}.{name}", part)


META = ("name", "dtype", "shape")
ORDER = [
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/collective_rpc", "/v1/completions", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/collective_rpc", "/v1/completions",
]  # fmt: skip


@pytest.fixture
def fakes():
    """Two servers, one of two workers."""
    with serving() as one, serving() as other:
        for workers, fake in enumerate((one, other), 1):
            fake.answers["/v1/completions"] = draw
            fake.settings |= {"transfer": "letters", "workers": workers}
        yield one, other


def test_weights_go_by_vllms_transfer(fakes, tiny_policy, tmp_path):
    rollout = {"vllm_server": [fake.url for fake in fakes], "vllm_transfer": "nccl"}
    config = load_config({"model": {"path": str(tiny_policy), "device": "cpu"}, "rollout": rollout})
    policy = load_policy(config.model)
    with pytest.raises(UserError, match="vllm_transfer must be files for a policy that is not on a GPU, got nccl"):
        make_engine(config.rollout, config.model, policy, tmp_path)
    rollout = config.rollout.model_copy(update={"vllm_transfer": "letters"})
    engine = make_engine(rollout, config.model, policy, tmp_path)
    for fake in fakes:
        fake.bodies.clear()
    weights = dict(checkpoint_weights(policy.inference_model))
    size = sum(weight.nbytes for weight in weights.values())
    for update in range(2):
        engine.generate([Request([1]), Request([2])], SamplingParams())
        assert engine.stats["weight_bytes"] == 2 * size * (update + 1)
        assert all(torch.equal(sender.sent[name], weights[name]) for sender in Sender.made for name in weights)
        with torch.no_grad():
            policy.model.get_output_embeddings().weight.mul_(1.5)
        engine.policy_updated()
    assert [sender.info.world_size for sender in Sender.made] == [2, 3]
    assert len({sender.info.master_port for sender in Sender.made}) == 2
    assert all(sender.info.master_address == "127.0.0.1" and sender.info.rank == 0 for sender in Sender.made)
    for fake in fakes:
        assert [path for path, _ in fake.bodies] == ORDER
        assert fake.bodies[2][1] == {"update_info": {"names": list(weights)}} and fake.bodies[3][1] == {}
    assert not (tmp_path / ".vllm").exists()


def test_adapters_go_through_files_all_the_same(fakes, tiny_policy, tmp_path):
    lora = {"r": 4, "alpha": 12, "target_modules": ["q_proj"]}
    config = load_config({"model": {"path": str(tiny_policy), "device": "cpu", "lora": lora},
                          "rollout": {"vllm_server": fakes[0].url, "vllm_transfer": "nccl"}})  # fmt: skip
    policy = load_policy(config.model)
    make_engine(config.rollout, config.model, policy, tmp_path).generate([Request([1])], SamplingParams())
    assert not Sender.made and fakes[0].loaded


@pytest.mark.parametrize("has", [None, "ipc"])
def test_a_server_with_another_backend(fakes, tiny_policy, tmp_path, has):
    fakes[1].settings["transfer"] = has
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    message = f"{fakes[1].url} takes weights by {has}, .*_transfer is letters.*--weight-transfer-config '.*letters.*'"
    with pytest.raises(UserError, match=message):
        Servers(model, [fake.url for fake in fakes], tmp_path, transfer="letters")


def test_a_server_that_refuses_an_update_ends_the_run(fakes, tiny_policy, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    engine = VLLMEngine(model, Servers(model, [fakes[0].url], tmp_path, transfer="letters"), eos_token_ids=[63])
    fakes[0].answers["/update_weights"] = 500
    with pytest.raises(UserError, match=f"/update_weights of the vLLM server {fakes[0].url} answers 500"):
        engine.generate([Request([1])], SamplingParams())


def test_vllm_is_needed_here_too(fakes, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        UserError, match="rollout.vllm_transfer nccl needs the package vllm >= 0.32 here, beside that of"
    ):
        Transfer(SimpleNamespace(transfer="nccl"), "nccl", torch.device("cuda"))


def test_the_address_of_this_machine_towards_another():
    assert address_towards("http://127.0.0.1:8000") == "127.0.0.1"
    own = address_towards("http://192.0.2.1")  # of no machine; the kernel says by which address it would go there
    with socket.socket() as here:
        here.bind((own, 0))
