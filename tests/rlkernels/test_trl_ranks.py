"""Our parts in TRL's GRPOTrainer with two processes, connected by gloo."""

import copy
import importlib
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import LENIENT, copy_weights, digits, grpo_trainer, save_letters, save_tiny_policy

pytestmark = pytest.mark.slow  # two processes train with TRL

NUM_GENERATIONS = 4
EOS = 63


def make_trainer(shared, policy, folder, rollout, reward=digits, callbacks=(), **settings):
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    from rlkernels.integrations.trl import SharedPrefixGRPOTrainer

    torch.manual_seed(0)
    settings |= {"per_device_train_batch_size": NUM_GENERATIONS, "max_completion_length": 8, "optim": "sgd"}
    cls = SharedPrefixGRPOTrainer if shared else None
    prompts = ["ABC", "DE", "FGHI", "J"]
    parts = {"rollout_func": rollout, "callbacks": list(callbacks)}
    trainer = grpo_trainer(folder, policy, prompts, reward, settings, cls, **parts)
    assert trainer.accelerator.num_processes == 2
    return trainer


def answers(prompts, trainer):
    """Return answers of other lengths in each process."""
    ids = [[(7 * i + j + dist.get_rank()) % 60 for j in range(2 + i)] for i in range(len(prompts))]
    prompt_ids = [[ord(c) - 48 for c in p] for p in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}


def leave_first_batch(trainer):
    """Let the first batch of the second process be one that goes TRL's way."""
    fits = trainer._fits
    trainer._fits = lambda *args: fits(*args) and (dist.get_rank() == 0 or trainer.state.global_step > 0)


def train_both_ways(policy, folder):
    results = []
    for shared in (False, True):
        trainer = make_trainer(shared, policy, folder, answers, max_steps=3)
        start_weights = copy_weights(trainer)
        if shared:
            leave_first_batch(trainer)
        trainer.train()
        results.append(copy_weights(trainer))
    assert trainer.shares_prefixes and trainer._compared
    for name, weight in results[0].items():
        distance = (weight - start_weights[name]).norm()
        assert (results[1][name] - weight).norm() <= 1e-4 * distance, name


def shard(policy, folder):
    """Shard the model as Accelerate does on GPUs: on CPUs it ignores FSDP, and so does TRL."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from rlkernels.integrations.trl_shared import pack_rows, share_prefixes

    full_model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).train()
    model = copy.deepcopy(full_model)
    share_prefixes(model, 0.7, head_in_float32=False)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rank = dist.get_rank()
    ids = torch.randint(60, (NUM_GENERATIONS, 9), generator=torch.Generator().manual_seed(rank))
    ids[:, :4] = ids[:1, :4]  # the prompt
    mask = torch.arange(9) < torch.tensor([9, 7, 6, 9])[:, None]
    packed = pack_rows(ids, mask, 5)
    logprobs, _ = model(shared_prefix=packed)
    logits = full_model(ids, attention_mask=mask.long()).logits[:, 3:-1] / 0.7
    expected = logits.log_softmax(-1).gather(2, ids[:, 4:, None])[mask[:, 4:]][:, 0]
    logprobs = logprobs[packed.pairs]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    for values in (logprobs, expected):
        (values * torch.arange(len(values))).sum().backward()
    for (name, p), q in zip(model.named_parameters(), full_model.parameters(), strict=True):
        dist.all_reduce(q.grad)
        mean, sharded = q.grad / 2, p.grad.full_tensor()
        assert (sharded - mean).norm() <= 1e-4 * mean.norm(), name


def shard_by(version, model):
    """Shard a GPT-2 by FSDP 1 or 2."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = copy.deepcopy(model)
    if version == 1:
        device = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({type(model.transformer.h[0])}),
                                        use_orig_params=True, device_id=device)  # fmt: skip
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.transformer.h:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def continue_in_shards(policy, folder):
    """Continue answers up to the last position of a GPT-2, whose processes have prefixes of other lengths."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from rlkernels.integrations.trl import SuffixRollouts

    gpt2 = folder / "gpt2"
    settings = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": EOS}
    settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    if dist.get_rank() == 0:
        GPT2LMHeadModel(GPT2Config(n_positions=3 + 8, initializer_range=0.2, **settings)).save_pretrained(gpt2)
        save_letters(gpt2)
    dist.barrier()
    suffixes = SuffixRollouts(whole_share=0)
    trainer = make_trainer(False, gpt2, folder, suffixes, suffixes.watch(digits), max_steps=1, top_k=1)
    suffixes.answers = {"ABC": [1, 2, 3, 4, 5, 6, 7, EOS]}
    trainer.model.train()
    prompts = [("ABC", "DE")[dist.get_rank()]] * NUM_GENERATIONS
    expected = suffixes(prompts, trainer)
    assert bool(suffixes.continued) == (dist.get_rank() == 0)
    trainer.is_fsdp_enabled = True
    for version in (1, 2):
        trainer.model_wrapped = shard_by(version, trainer.model)
        assert suffixes(prompts, trainer) == expected, version


def extrapolate(policy, folder):
    from accelerate.utils import gather_object

    from rlkernels import RolloutHistory
    from rlkernels.integrations.trl import GatedExtrapolation, HistoryRecorder, SuffixRollouts

    evaluated = []

    def evaluate(model, rows):
        evaluated.append(rows)
        return [float(len(evaluated) > 1)] * len(rows)  # the candidate is better

    gated = GatedExtrapolation(evaluate, 80, track_steps=1, first_step=4, every=100, limits=LENIENT)
    recorder = HistoryRecorder(folder / "history.bin", every=2)
    suffixes = SuffixRollouts(right=-1)
    reward = recorder.watch(suffixes.watch(digits))
    trainer = make_trainer(True, policy, folder, suffixes, reward, [gated, recorder], max_steps=4, temperature=0.5)
    trainer.train()
    (event,) = gated.events
    assert event["accepted"] and gather_object([json.dumps(event)])[0] == json.dumps(event)
    first, second = gather_object([evaluated])
    assert [list(a) + list(b) for a, b in zip(first, second, strict=True)] == [list(range(10))] * 2
    for name, (weight_0, weight_1) in (
        (name, gather_object([weight])) for name, weight in copy_weights(trainer).items()
    ):
        assert torch.equal(weight_0, weight_1), name
    dist.barrier()
    history = RolloutHistory.load(folder / "history.bin")
    assert (
        history.stats["rollouts"] == 4 * 2 * NUM_GENERATIONS and history.longest_prompt([17, 18, 19, 1]) == 3
    )  # "ABC"


def run_all(policy, folder):
    for function in (shard, train_both_ways, continue_in_shards, extrapolate):
        function(policy, folder)
        (folder / f"{function.__name__}.{dist.get_rank()}").touch()


def test_two_processes(trl_integration, monkeypatch, tmp_path):
    """Updates are those of TRL, under FSDP2 too; the gate and one history are shared. One start serves all."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "python_trainer"))
    policy = save_tiny_policy(tmp_path / "policy", max_position_embeddings=128)
    importlib.import_module("gloo").run_on_ranks(tmp_path, run_all, policy, tmp_path)
    assert len(list(tmp_path.glob("*.[01]"))) == 8
