"""Training as on a GPU: every tensor where it has to be, found by a GPU that is not there."""

import copy
import json
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from conftest import QUIET, merged, train
from paged import prompts
from pretend_gpu import GPUTensor, pretended
from tiny import save_tiny_policy
from torch.utils._pytree import tree_leaves

from bench.faults.tensors import OPS
from python_trainer.command_line.probe import probe
from python_trainer.command_line.sft import Sft
from python_trainer.config import load_config
from python_trainer.data import Request
from python_trainer.loop import kernels
from python_trainer.model.forward import page
from python_trainer.model.policy import load_policy
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.paged import engine as engine_module
from python_trainer.rollout.paged.engine import PagedEngine
from python_trainer.run.directory import read_metrics

SMALL = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 8}
RUNS = {
    "float32, top_p": {"model": {"dtype": "float32"}, "rollout": {"top_p": 0.9, "top_k": 5, "dynamic_sampling": True}},
    "adapters, activations computed again, rewards less a divergence": {
        "model": {"gradient_checkpointing": True, "lora": {"r": 2}},
        "algorithm": {"beta": 0.1, "use_kl_in_reward": True},
    },
    "PPO with a critic of its own, drafts": {
        "algorithm": {"advantage": "gae"}, "critic": {"separate": True}, "accelerators": {"enabled": ["drafts"]},
    },
    "reference, entropy, sequences' ratios, all accelerators": {
        "algorithm": {
            "beta": 0.1, "entropy_coef": 0.01, "num_iterations": 2, "importance_sampling_level": "sequence",
        },
        "accelerators": {
            "enabled": ["rhyme", "rpo", "drafts", "alpha"], "rhyme": {"rare_share": 0},
            "alpha": {"track_steps": 1, "first_step": 3, "refuse": False},
        },
        "task": {"train_size": 4, "gate_size": 4},  # all prompts come back in the third step
    },
}  # fmt: skip


def config_of(make_config, name, steps):
    settings = merged({"model": {"device": "cuda"}, "rollout": SMALL, "task": {"test_size": 2}}, RUNS[name])
    return make_config(max_steps=steps, **settings)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu(make_config, tmp_path, name, monkeypatch):
    """Train in bfloat16, one case in float32, then continue from the checkpoint."""
    with pretended():
        trainer = train(config_of(make_config, name, 2), tmp_path / "run")
        dtype = torch.float32 if "float32" in name else torch.bfloat16
        weights = chain(trainer.policy.inference_model.parameters(), trainer.policy.inference_model.buffers())
        assert all(isinstance(x, GPUTensor) for x in weights)
        assert {x.dtype for x in trainer.policy.inference_model.parameters()} == {dtype}
        monkeypatch.setattr(kernels, "prove_kernels", None)  # the checkpoint names the kernels
        resumed = train(config_of(make_config, name, 3), tmp_path / "run", resume=True)
        assert resumed.state.step == 3


def test_a_gpu_is_pretended():
    """It refuses what a real GPU refuses, and results lie where the operands do."""
    with pretended() as waits:
        on_gpu = torch.randn(3, 4).to("cuda")
        on_cpu = torch.randn(4)
        assert on_gpu.device.type == "cuda" and on_gpu.cpu().device.type == on_cpu.device.type == "cpu"
        assert (on_gpu @ on_gpu.T).is_cuda and torch.zeros(2, device=on_gpu.device).is_cuda and not on_cpu.is_cuda
        for mixed_devices in (
            lambda: on_gpu + on_cpu,
            lambda: torch.cat([on_gpu[0], on_cpu]),
            lambda: on_cpu[torch.tensor([1]).to("cuda")],
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mixed_devices()
        with pytest.raises(TypeError, match="numpy"):
            on_gpu.numpy()
        waits.clear()
        assert on_gpu.sum().item() == float(on_gpu.numbers.sum()) and waits.total() == 1
        on_gpu[torch.tensor([0])] = on_cpu.to("cuda")
        torch.testing.assert_close(on_gpu.cpu()[0], on_cpu)
    assert not torch.cuda.is_available()


def test_numbers_are_those_of_the_cpu(make_config, tmp_path):
    """Compare in float32, where both draw the same answers."""
    rows = {}
    for device in ("cpu", "cuda"):
        options = {"rollout": SMALL, "task": {"test_size": 2}, "model": {"device": device, "dtype": "float32"}}
        config = make_config(max_steps=2, **options)
        with pretended() if device == "cuda" else nullcontext():
            train(config, tmp_path / device)
        rows[device] = read_metrics(tmp_path / device)
    for cpu_row, gpu_row in zip(rows["cpu"], rows["cuda"], strict=True):
        for name in cpu_row.keys() & {"reward", "loss", "grad_norm", "entropy", "total/generated_tokens"}:
            assert gpu_row[name] == pytest.approx(cpu_row[name], rel=2e-4, abs=1e-6), (name, cpu_row["step"])
    assert rows["cpu"][-1]["grad_norm"] > 0


def test_a_pass_of_generation_waits_twice(tmp_path, monkeypatch):
    """It waits for the lengths of the sequences, in the first layer, and for the drawn tokens; not to find prefixes."""
    config = load_config({"model": {"path": str(save_tiny_policy(tmp_path)), "device": "cuda"}})
    plans = []
    with pretended() as waits:
        policy = load_policy(config.model)
        engine = PagedEngine(policy.inference_model, eos_token_ids=policy.eos_token_ids)
        requests = [Request(ids, num_generations=3, max_new_tokens=12) for ids in prompts([9, 5, 40])]
        waits.clear()
        engine.generate(requests, SamplingParams(temperature=0.9, seed=1))
        passes = engine.stats["forward_passes"]
        assert passes >= 12 and waits.total() <= 2 * passes + 2, waits

        def counted(*args, **options):
            num_waits = waits.total()
            plan = page(*args, **options)
            plans.append((waits.total() - num_waits, plan.groups is not None))
            return plan

        monkeypatch.setattr(engine_module, "page", counted)
        engine.share_from = 16  # as where there is a kernel
        engine.generate(requests[1:], SamplingParams(temperature=0.9, seed=1))
    assert {shared for _, shared in plans} == {True, False} and not any(count for count, _ in plans), plans


def test_supervised_steps_and_a_probe(lessons, tmp_path):
    config = load_config(merged(lessons, {"model": {"device": "cuda"}, "sft": {"epochs": 2}}))
    with pretended():
        Sft(config, tmp_path / "sft", console=QUIET).run()
        figures = probe(config, seconds=1)
    assert json.loads((tmp_path / "sft/summary.json").read_text())["evaluation"]["final"]["held_out_loss"] > 0
    assert len(figures["p"]) == 4


@pytest.mark.parametrize("name", OPS)
def test_ops_on_a_gpu(name):
    """Their reference, which a GPU takes as long as nothing else is proven there, makes all it needs where it runs."""
    op = OPS[name]
    torch.manual_seed(0)
    arguments = op.make(3, 2, 4)
    expected = op.call(**copy.deepcopy(arguments), backend="torch")
    with pretended():
        gpu_arguments = {key: x.to("cuda") if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
        result = op.call(**gpu_arguments, backend="auto")
        for tensor, expected_tensor in zip(tree_leaves(result), tree_leaves(expected), strict=True):
            if isinstance(tensor, torch.Tensor):
                torch.testing.assert_close(tensor.cpu(), expected_tensor, atol=1e-5, rtol=1e-5, equal_nan=True)
