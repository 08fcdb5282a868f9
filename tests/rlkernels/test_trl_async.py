"""TRL's AsyncGRPOTrainer with our attention: its own loss and gradients, with keys and values once per token."""

import importlib
import queue
import random

import numpy as np
import pytest
import torch
from support import assert_equal
from tiny import assert_same_gradients, gradient_recorder, save_tiny_policy
from torch.nn.functional import scaled_dot_product_attention

from rlkernels.prefix_cache import TreeLayout

EOS = 63
BATCH_SIZE = 8


def conversations():
    """Yield two groups of four answers after one system prompt; one group has a second turn, which forks."""
    draw = random.Random(0)

    def tokens(count):
        return [draw.randrange(EOS) for _ in range(count)]

    system = tokens(20)
    for group in range(2):
        prompt, history = system + tokens(9), tokens(7)
        for i in range(4):
            context = prompt + history * (group and i % 2)
            yield group, context, [*tokens(3 + 2 * i), EOS]


class Worker:
    """A rollout worker that made all its samples before."""

    def __init__(self, batches=6):  # the data loader reads one ahead
        sample = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker").RolloutSample
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        draw = np.random.default_rng(1)
        for _ in range(batches):
            for group, prompt, answer in conversations():
                mask = np.array([0] * len(prompt) + [1] * len(answer))
                self.rollout_buffer.put(sample(
                    [], [], np.array(prompt + answer), mask, (-3 - draw.random(len(mask))) * mask,
                    float(draw.normal()), 1, group, {"reward": 0.0},
                ))  # fmt: skip

    def start(self):
        pass

    stop = start

    def update_model_version(self, version):
        pass

    def check_health(self, stale_after_s):
        raise RuntimeError("the trainer waits for samples")


class NoTransfer:
    def __getattr__(self, name):
        return lambda *args: None


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("qwen2")
    return save_tiny_policy(folder, seed=5, num_attention_heads=6, hidden_size=48, max_position_embeddings=512)


@pytest.fixture
def train(trl_integration, policy, tmp_path, monkeypatch):
    """Train two steps; return the trainer, and gradients of each step before clipping, by name."""
    asynchronous = importlib.import_module("trl.experimental.async_grpo")
    monkeypatch.setattr(asynchronous.async_grpo_trainer, "VLLMClient", lambda *args: None)  # no server, no requests
    datasets = importlib.import_module("datasets")

    def run(cls=None, peft_config=None, **settings):
        callback, steps = gradient_recorder()
        args = asynchronous.AsyncGRPOConfig(
            str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=2,
            per_device_train_batch_size=BATCH_SIZE, optim="sgd", temperature=0.9,
            **{"bf16": False, "token_budget": -1, "learning_rate": 1e-2, **settings},
        )  # fmt: skip
        ours = importlib.import_module("rlkernels.integrations.trl_async").SharedPrefixAsyncGRPOTrainer
        trainer = (cls or ours)(
            str(policy), args=args, rollout_worker=Worker(), weight_transfer=NoTransfer(), peft_config=peft_config,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 8}), callbacks=[callback],
        )  # fmt: skip
        trainer.train()
        return trainer, steps

    return run


class Kernel:
    """What TRL calls of FlashAttention 3, by torch; counts the rows of keys that it is given."""

    def __init__(self):
        self.rows = []
        self.windows = set()

    def flash_attn_varlen_func(self, query, key, value, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size):
        self.rows.append(len(key))
        self.windows.add(window_size[0])
        out = []
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
            q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            if window_size[0] >= 0:
                mask = mask.triu(d - c - (b - a) - window_size[0])
            out.append(scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True)[0])
        return torch.cat(out, 1).transpose(0, 1)


def by_trl(train, monkeypatch, **options):
    asynchronous = importlib.import_module("trl.experimental.async_grpo")
    kernel = Kernel()
    monkeypatch.setattr(asynchronous.packing, "_flash_attn", lambda: kernel)
    return *train(asynchronous.AsyncGRPOTrainer, **options), kernel


WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("settings", [
    {}, {"gradient_checkpointing": False, "token_budget": 90, "gradient_accumulation_steps": 2},
    {"model_init_kwargs": WINDOW},
])  # fmt: skip
def test_loss_and_gradients_are_those_of_trl(train, monkeypatch, settings):
    """Check rows of all samples, rows that a budget cuts, and a layer whose window is shorter than samples."""
    trainer, steps = train(**settings)
    trl_trainer, expected, kernel = by_trl(train, monkeypatch, **settings)
    assert kernel.windows == ({-1, 15} if "model_init_kwargs" in settings else {-1})
    assert_same_gradients(steps, expected)
    for result, expected_step in zip(trainer.state.log_history[:2], trl_trainer.state.log_history):
        for name in ("loss", "grad_norm", "entropy", "kl", "batch/packing_ratio"):
            assert result[name] == pytest.approx(expected_step[name], rel=1e-4, abs=1e-6), name
    assert trainer.state.log_history[0]["batch/packing_ratio"] > 1.5


def test_keys_and_values_exist_once_per_token_of_the_tree(train, monkeypatch):
    attend = TreeLayout.attend
    num_keys = []

    def count(layout, layer, query, key, *arguments, **options):
        num_keys.append(len(key))
        return attend(layout, layer, query, key, *arguments, **options)

    monkeypatch.setattr(TreeLayout, "attend", count)
    train(gradient_checkpointing=False)
    kernel = by_trl(train, monkeypatch, gradient_checkpointing=False)[2]
    nodes = set()  # TRL's: a token, the one behind it, and all before
    for _, prompt, answer in conversations():
        row = [*prompt, *answer, None]
        nodes |= {tuple(row[: end + 1]) for end in range(1, len(row))}
    assert num_keys == [len(nodes)] * 4  # two layers in each of two steps
    assert len(kernel.rows) == 4 and min(kernel.rows) > 2.5 * len(nodes)


def test_gradients_repeat_bit_for_bit(train):
    (_, first), (_, second) = train(), train()
    assert_equal(second, first)


def test_lora_and_bfloat16(train, monkeypatch):
    """Adapters of PEFT wrap the model; autocast leaves queries and keys in float32."""
    adapter = importlib.import_module("peft").LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )

    def distance(steps, exact):
        return sum((steps[0][n].double() - exact[n].double()).norm() ** 2 for n in exact) ** 0.5

    exact = train(peft_config=adapter)[1][0]
    assert all("lora" in name for name in exact)
    shared_steps = train(peft_config=adapter, bf16=True)[1]
    trl_steps = by_trl(train, monkeypatch, peft_config=adapter, bf16=True)[1]
    assert 0 < distance(shared_steps, exact) <= 2 * distance(trl_steps, exact)


@pytest.mark.parametrize("seed", range(5))
def test_the_layout_of_a_tree_of_trl(trl_integration, seed):
    """Each sample attends as it does alone, whatever the tree: prefixes of others, equal samples, several roots."""
    rows = importlib.import_module("trl.experimental.async_grpo.packing")
    draw = random.Random(seed)
    row = rows.TreeRow()
    for i in range(12):
        ids = np.array([draw.randrange(2) for _ in range(draw.randrange(1, 9))])
        row.add({"input_ids": ids, "completion_mask": ids * 0, "old_log_probs": ids, "advantage": 0.0, "group_id": i})
    packed = row.pack()
    build = importlib.import_module("rlkernels.integrations.trl_async").tree_layout
    layout = build(packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"])
    with torch.device("meta"):  # as a user's script may set it
        same = build(packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"])
    assert torch.equal(same.position_ids, layout.position_ids) and torch.equal(same.end, layout.end)
    assert torch.equal(layout.position_ids, packed["position_ids"])
    index = packed["tree_kv_index"].tolist()
    starts = packed["tree_cu_seqlens_q"].tolist()
    for start, stop, low, high in zip(starts, starts[1:], packed["tree_cu_seqlens_k"], packed["tree_cu_seqlens_k"][1:]):
        path = index[low:high]
        for token in range(start, stop):
            visible = [key for key in range(token + 1) if token < layout.end[key]]
            assert visible == [key for key in path if key <= token]
