"""Shared prefixes inside TRL's GRPOTrainer: the loss and gradients of TRL alone, on tiny random models."""

import importlib
import logging
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import assert_equal
from tiny import gradient_recorder, grpo_trainer, save_letters
from torch._dynamo.utils import counters

MAX_TOKENS = 12
NUM_GENERATIONS = 4
VOCAB = 64
EOS = 63
BASIC = {"per_device_train_batch_size": 2 * NUM_GENERATIONS, "gradient_accumulation_steps": 1}
SPLIT = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}  # groups of 4 in parts
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
DELTA = {
    "initializer_range": 0.06, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
MODELS = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8, **CAPS}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "router_aux_loss_coef": 0.0,
        },
    ),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "hyperclovax": ("HyperCLOVAX", {"logits_scaling": 4.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "dropout": ("Qwen2", {"attention_dropout": 0.5}),
    "gpt2": ("GPT2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),  # padding counts as positions
    "stablelm": ("StableLm", {}),
    "qwen3_5": ("Qwen3_5Text", DELTA),
    "olmo_hybrid": ("OlmoHybrid", DELTA),
    "phi3": ("Phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Return a function that saves a random model of a kind and its tokenizer, and gives the folder."""
    transformers = pytest.importorskip("transformers")
    folders = {}

    def make(kind):
        if kind not in folders:
            name, changes = MODELS[kind]
            torch.manual_seed(5)
            sizes = {
                "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
                "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
                "initializer_range": 0.2, "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": EOS,
            }  # fmt: skip
            config = getattr(transformers, f"{name}Config")(**sizes | changes)
            folders[kind] = tmp_path_factory.mktemp(kind)
            model = transformers.AutoModelForCausalLM.from_config(config)
            for name, weight in model.named_parameters():
                if name.endswith(("A_log", "dt_bias")):  # recurrent states that last
                    weight.data.uniform_(-3, -1)
            model.save_pretrained(folders[kind])
            save_letters(folders[kind], VOCAB)
        return folders[kind]

    return make


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7) / 3 for ids in completion_ids]


class Answers:
    """A rollout function whose prompts have 1 to 30 tokens and whose answers are of any length, the same every time."""

    def __init__(self, logprobs=False):
        self.calls = 0
        self.logprobs = logprobs

    def __call__(self, prompts, trainer):
        prompt_ids, completion_ids = [], []
        for prompt in prompts:
            draw = random.Random(prompt)
            prompt_ids.append([draw.randrange(EOS) for _ in range(1 + draw.randrange(30))])
            draw = random.Random(f"{prompt}{self.calls}")
            self.calls += 1
            ids = [draw.randrange(EOS) for _ in range(1 + draw.randrange(MAX_TOKENS))]
            completion_ids.append(ids if len(ids) == MAX_TOKENS else [*ids[:-1], EOS])
        logprobs = [[-1 - draw.random() for _ in ids] for ids in completion_ids] if self.logprobs else None
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


@pytest.fixture
def train(trl_integration, policy, tmp_path):
    """Train two steps; return the trainer, and gradients of each step before clipping, by name."""
    peft = importlib.import_module("peft")

    def run(
        kind="qwen2", shared=True, lora=None, rollout=None, sampler=False, trainer_class=None, options=(), **settings
    ):
        callback, steps = gradient_recorder()
        cls = trainer_class or (trl_integration.SharedPrefixGRPOTrainer if shared else None)
        torch.manual_seed(0)
        defaults = {"max_completion_length": MAX_TOKENS, "seed": 3, "optim": "sgd", "max_steps": 2, **BASIC}
        adapter = lora and peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **lora)
        parts = {"callbacks": [callback], "peft_config": adapter, **dict(options)}
        if cls is None or not issubclass(cls, importlib.import_module("trl").RLOOTrainer):  # which has none
            parts["rollout_func"] = Answers(logprobs=sampler) if rollout is None else rollout
        prompts = [f"p{i}" for i in range(12)]
        trainer = grpo_trainer(tmp_path, policy(kind), prompts, reward, defaults | settings, cls, **parts)
        if sampler:  # as if vLLM had drawn the answers
            trainer.use_vllm = True
            trainer._last_loaded_step = -1
            trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer.train()
        return trainer, steps

    return run


def relative_error(grads, expected):
    return max(((grads[n] - expected[n]).norm() / (expected[n].norm() + 1e-30)).item() for n in expected)


def assert_same(shared, alone, tolerance=1e-4):
    (trainer, steps), (plain, expected) = shared, alone
    assert len(steps) == len(expected) > 0 and steps[0].keys() == expected[0].keys()
    assert max(map(relative_error, steps, expected)) < tolerance
    means = () if getattr(trainer, "keep_groups", False) else ("entropy", "kl")  # of micro-batches, which are others
    for log, expected_log in zip(trainer.state.log_history, plain.state.log_history):
        for name in ("loss", "grad_norm", *means):
            assert log.get(name, 0) == pytest.approx(expected_log.get(name, 0), rel=1e-3, abs=1e-5), name


CASES = {
    "whole groups": {},
    "parts of groups": SPLIT,
    "parts of groups, accumulated": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
    "several updates of a batch": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4,
    },
    "an update with a part of a generation": {**SPLIT, "gradient_accumulation_steps": 3, "steps_per_generation": 2},
    "KL, two iterations": {
        **SPLIT, "beta": 0.1, "num_iterations": 2, "loss_type": "grpo", "max_steps": 4, "temperature": 0.7,
    },
    "entropy quantile": {"top_entropy_quantile": 0.7, "entropy_coef": 0.1},
    "entropy bonus": {**SPLIT, "entropy_coef": 0.5},
    "clipping on both sides, off-policy mask, unbiased KL": {
        **SPLIT, "delta": 1.2, "off_policy_mask_threshold": 0.01, "beta": 0.1, "use_bias_correction_kl": True,
        "loss_type": "grpo", "num_iterations": 2, "max_steps": 4,
    },
    "importance sampling of another sampler": {**SPLIT, "sampler": True},
    "truncated answers masked": {"mask_truncated_completions": True},
    "no checkpointing": {"gradient_checkpointing": False},
    "reentrant checkpointing": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "head in float32": {"cast_lm_head_to_fp32": True},
    "LoRA": {**SPLIT, "lora": {"init_lora_weights": False}, "beta": 0.1},
    **{f"loss {name}": {**SPLIT, "loss_type": name} for name in ("bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")},
    "sequence ratios": {**SPLIT, "importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 4},
}  # fmt: skip


QUICK = ("parts of groups", "several updates of a batch", "KL, two iterations", "LoRA",
         "an update with a part of a generation", "entropy quantile",
         "clipping on both sides, off-policy mask, unbiased KL", "importance sampling of another sampler")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_update_equals_that_of_trl(train, name):
    kind = "llama" if list(CASES).index(name) % 2 else "qwen2"
    mixed = train(kind, **CASES[name])
    assert mixed[0].shares_prefixes and mixed[0]._compared
    assert_same(mixed, train(kind, shared=False, **CASES[name]))


@pytest.mark.parametrize("kind", ["qwen3_5", "olmo_hybrid"])
def test_an_update_of_recurrent_layers_equals_that_of_trl(train, kind):
    shared = train(kind, **SPLIT)
    assert shared[0].shares_prefixes and shared[0]._compared
    assert_same(shared, train(kind, shared=False, **SPLIT))


class Recorder:
    """Counts the tokens of a step's batch as TRL passes them, padded, and as a trie."""

    def __init__(self):
        self.answers = Answers()
        self.padded = 0
        self.packed = 0

    def __call__(self, prompts, trainer):
        generated = self.answers(prompts, trainer)
        longest = [max(map(len, generated[name])) for name in ("prompt_ids", "completion_ids")]
        self.padded += len(prompts) * sum(longest)
        rows = [(*prompt, *answer) for prompt, answer in zip(generated["prompt_ids"], generated["completion_ids"])]
        self.packed += len({row[:end] for row in rows for end in range(1, len(row))})  # a token for each beginning
        return generated


@pytest.mark.parametrize("kind", ["gemma2", "mistral", "gpt_oss", "granite", "hyperclovax", "cohere"])
def test_windows_sinks_soft_caps_and_scaled_logits(train, kind):
    shared = train(kind, temperature=0.7, logging_steps=1)
    assert shared[0].shares_prefixes and shared[0]._compared
    assert shared[0].state.log_history[0]["shared_prefix/tokens_over_trl"] < 1
    assert_same(shared, train(kind, shared=False, temperature=0.7))


def test_eager_attention_that_no_other_takes_the_place_of_is_an_obstacle():
    """Bloom computes it in the layer."""
    transformers = importlib.import_module("transformers")
    obstacle = importlib.import_module("rlkernels.integrations.trl_shared").obstacle
    config = transformers.BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2)
    assert "eager attention is no function" in obstacle(transformers.BloomForCausalLM(config))
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                 attn_implementation="eager")
    )  # fmt: skip
    # a layer of a file that was executed without an import, to which no entry of sys.modules leads
    model.extra = type("Extra", (torch.nn.Identity,), {"__module__": "executed"})()
    assert obstacle(model) is None


@pytest.mark.parametrize("kind", ["qwen2", "dropout"])
def test_the_logs_show_tokens_over_those_of_trl(train, kind):
    """1 for a model whose prompts are not shared."""
    counts = Recorder()
    trainer, _ = train(kind, rollout=counts, logging_steps=1)
    ratios = [log["shared_prefix/tokens_over_trl"] for log in trainer.state.log_history[:2]]
    assert ratios[1] == pytest.approx(counts.packed / counts.padded if trainer.shares_prefixes else 1)
    assert trainer.shares_prefixes == (kind == "qwen2") == (ratios[0] < 1)


def test_answers_to_a_prompt_stay_together_where_it_changes_nothing(train, caplog):
    """Elsewhere one line says why not."""
    caplog.set_level(logging.WARNING, "rlkernels")
    trainer = train(**SPLIT)[0]
    assert trainer.keep_groups
    batches = [{tuple(row.tolist()) for row in batch["prompt_ids"]} for batch in trainer._buffered_inputs]
    assert sum(map(len, batches)) <= 4  # 3 prompts in two batches of 6, one of them in both
    assert not train(**SPLIT, options={"keep_groups": False}, max_steps=1)[0].keep_groups
    assert not caplog.messages
    split = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
    for settings, reason in (
        (SPLIT | {"loss_type": "bnpo"}, "loss_type='bnpo'"),
        (SPLIT | {"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5"),
        (SPLIT | {"use_adaptive_entropy": True}, "the entropy bonus"),
        (split, "gradient_accumulation_steps=1, no multiple of steps_per_generation=2"),
        (split | {"gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3, no multiple of"),
    ):
        assert not train(**settings, max_steps=1)[0].keep_groups
        assert len(caplog.messages) == 1 and f"TRL shuffles answers for {reason}" in caplog.messages[0]
        caplog.clear()


def test_lists_of_a_subclass_stay_with_their_rows(trl_integration, train):
    """TRL shuffles and splits lists beside tensors."""
    trl = importlib.import_module("trl")

    class Listed(trl_integration.SharedPrefixGRPOTrainer, trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            generated = super()._generate_and_score_completions(inputs)
            return generated | {"answers": generated["completion_ids"].tolist()}

    batches = train(**SPLIT, trainer_class=Listed, max_steps=1)[0]._buffered_inputs
    assert all(batch["answers"] == batch["completion_ids"].tolist() for batch in batches)


def test_layers_of_liger_share_prefixes(train, monkeypatch):
    """TRL takes Liger's kernels for layers alone and keeps its own loss."""
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda model, config: None)
    assert train(max_steps=1, use_liger_kernel=True)[0].shares_prefixes


@pytest.mark.parametrize(
    ("compiler", "backend", "checkpointing"),
    [
        ("eager", "torch", False),
        pytest.param("aot_eager", "auto", False, marks=pytest.mark.slow),
        pytest.param("aot_eager", "auto", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_share_prefixes(trl_integration, train, monkeypatch, compiler, backend, checkpointing):
    """One compiled layer serves all layers and batches: beyond torch's limit of compilations all would run plainly."""

    class Compiled(trl_integration.SharedPrefixGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            for layer in self.model.model.layers:
                layer.compile(backend=compiler, dynamic=True)

    monkeypatch.setenv("RLKERNELS_BACKEND", backend)
    torch._dynamo.reset()
    counters.clear()
    settings = {**SPLIT, "max_steps": 3, "gradient_checkpointing": checkpointing}
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        shared = train(trainer_class=Compiled, **settings)
    assert shared[0].shares_prefixes and counters["frames"]["ok"] > 0
    assert_same(shared, train(shared=False, **settings))


def test_rotary_factors_are_those_of_the_padded_batch_of_trl(train, caplog):
    """Rows of at most 15 tokens have 22 columns in the second batch, beyond the original length of 16."""

    def growing(prompts, trainer):
        lengths = (
            [(12, 3)] * NUM_GENERATIONS + [(3, 10)] * NUM_GENERATIONS
            if trainer.state.global_step
            else [(4, 4)] * 2 * NUM_GENERATIONS
        )
        draws = [random.Random(prompt) for prompt in prompts]
        prompt_ids = [[draw.randrange(EOS) for _ in range(p)] for draw, (p, _) in zip(draws, lengths, strict=True)]
        completion_ids = [[random.randrange(EOS) for _ in range(a)] for _, a in lengths]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    results = []
    for shared in (True, False):
        random.seed(0)
        results.append(train("phi3", shared=shared, rollout=growing))
    assert_same(*results)
    assert results[0][0]._compared and "where rotary factors change" in caplog.text


def test_positions_that_count_padding_are_found_in_a_batch_without_padding(train, caplog):
    class Equal(Answers):
        def __call__(self, prompts, trainer):
            generated = super().__call__(prompts, trainer)
            if trainer.state.global_step == 0:
                generated["prompt_ids"] = [(5 * ids)[:5] for ids in generated["prompt_ids"]]
            return generated

    assert_same(train("gpt2", rollout=Equal()), train("gpt2", shared=False, rollout=Equal()), 1e-5)
    assert "differ from TRL's" in caplog.text


@pytest.mark.parametrize("step", [0, 1])
def test_a_prompt_without_tokens_goes_the_way_of_trl(train, caplog, step):
    """The other batch shares prefixes."""

    class Emptied(Answers):
        def __call__(self, prompts, trainer):
            generated = super().__call__(prompts, trainer)
            if trainer.state.global_step == step:
                generated["prompt_ids"] = [
                    ids * (prompts[i] != prompts[-1]) for i, ids in enumerate(generated["prompt_ids"])
                ]
            return generated

    shared = train(rollout=Emptied())
    assert shared[0].shares_prefixes and shared[0]._compared
    assert caplog.messages == ["prompts are not shared: a batch with a prompt without tokens goes TRL's way"]
    assert_same(shared, train(shared=False, rollout=Emptied()))


def test_a_batch_with_images_goes_the_way_of_trl(train, caplog):
    trainer, _ = train(max_steps=1)
    with caplog.at_level(logging.WARNING, "rlkernels"):
        for _ in range(2):
            assert not trainer._fits(torch.ones(1, 4), False, {"pixel_values": torch.ones(1, 3), "num_images": None})
        assert trainer._fits(torch.ones(1, 4), False, {"pixel_values": None})
    assert caplog.messages == ["prompts are not shared: a batch with pixel_values goes TRL's way"]


def test_bfloat16_is_as_near_to_float64_as_trl_is(train):
    """Apply the error rule of all ops: at most twice the error of the replaced pass."""

    def distance(steps, exact):
        differences = sum((steps[n].double() - exact[n]).norm() ** 2 for n in exact)
        return (differences / sum(exact[n].norm() ** 2 for n in exact)).sqrt().item()

    exact = train(shared=False, model_init_kwargs={"dtype": torch.float64})[1][0]
    assert next(iter(exact.values())).dtype == torch.float64
    error, trl_error = (distance(train(shared=shared, bf16=True)[1][0], exact) for shared in (True, False))
    assert 0 < error <= 2 * trl_error


@pytest.mark.usefixtures("rounding_linear")
def test_rounded_products_of_float32_do_not_end_sharing(train, request):
    exact = train(shared=False)[1][0]
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    torch.set_float32_matmul_precision("medium")
    (trainer, steps), (_, expected) = train(), train(shared=False)
    assert trainer.shares_prefixes and trainer._compared
    assert torch.get_float32_matmul_precision() == "medium"
    error, trl_error = (relative_error(grads[0], exact) for grads in (steps, expected))
    assert trl_error > 1e-3  # else nothing was rounded
    assert error <= 2 * trl_error


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1]], ids=len)
def test_a_batch_without_a_token_in_the_loss(train, prompt):
    def cut(prompts, trainer):
        rows = len(prompts)
        return {"prompt_ids": [prompt] * rows, "completion_ids": [[5] * MAX_TOKENS] * rows, "logprobs": None}

    trainer, steps = train(rollout=cut, mask_truncated_completions=True, max_steps=1)
    assert trainer.shares_prefixes and all(not gradient.any() for gradient in steps[0].values())


def test_own_generation_and_evaluation(train, tmp_path):
    """TRL generates with the attention that the model had, by whose name Transformers tells what it can do."""
    trainer, _ = train(max_steps=1)
    trainer.model.eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    generated = trainer.model.generate(ids, max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > 4
    transformers = importlib.import_module("transformers")
    batched = trainer.model.generate_batch(
        ids.tolist(), transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=EOS),
        transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16), progress_bar=False,
    )  # fmt: skip
    assert [output.generated_tokens for output in batched.values()] == generated[:, 4:].tolist()
    assert trainer.model.config._attn_implementation == "sdpa"  # names with "flash" would be looked up on the Hub


@pytest.mark.parametrize(("kind", "settings", "reason"), [
    ("dropout", {}, "attention_dropout"),
    ("stablelm", {}, "its layers do not hand on the argument attention"),
    ("qwen2", {"lora": {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"}}, "aLoRA"),
    ("qwen2", {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
])  # fmt: skip
def test_what_cannot_be_shared_is_computed_by_trl_and_said_once(train, caplog, kind, settings, reason):
    with caplog.at_level(logging.WARNING, "rlkernels"):
        result = train(kind, **settings)
    lines = [record.message for record in caplog.records if record.name.startswith("rlkernels")]
    assert len(lines) == 1 and reason in lines[0]
    assert_same(result, train(kind, shared=False, **settings), 1e-5)


def test_a_model_that_disagrees_is_left_to_trl(train, caplog, monkeypatch):
    attention = "rlkernels.prefix_cache.tree_attention"
    monkeypatch.setattr(attention, lambda query, *_, **__: query * 0.5)
    with caplog.at_level(logging.WARNING, "rlkernels"):
        result = train()
    assert not result[0].shares_prefixes and "differ from TRL's" in caplog.text
    monkeypatch.undo()
    assert_same(result, train(shared=False), 1e-6)


@pytest.mark.parametrize("settings", [SPLIT, {"beta": 0.1, "num_iterations": 2, "max_steps": 4}])
def test_an_update_of_rloo_equals_that_of_trl(trl_integration, train, settings):
    result = train(trainer_class=trl_integration.SharedPrefixRLOOTrainer, **settings)
    assert result[0].shares_prefixes and result[0]._compared and result[0].keep_groups
    assert_same(result, train(trainer_class=importlib.import_module("trl").RLOOTrainer, **settings))


def test_two_trainers_of_trl_are_refused(trl_integration):
    rloo = importlib.import_module("trl").RLOOTrainer
    sharing = trl_integration.SharedPrefixGRPOTrainer
    with pytest.raises(
        TypeError, match="Mine must derive from one trainer of TRL, got GRPOTrainer and RLOOTrainer: take"
    ):
        type("Mine", (sharing, rloo), {})


def test_each_trainer_of_trl_has_a_row(trl_integration):
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    table = page.split("| trainer of TRL |")[1].split("\n\n")[0]
    trainers = importlib.import_module("trl.trainer")._import_structure.values()
    names = {name.removesuffix("Trainer") for file in trainers for name in file if name.endswith("Trainer")}
    listed = {name.split()[0] for row in table.splitlines() if row for name in row.split("|")[1].split(", ") if name}
    assert {"GRPO", "SFT"} < names and names <= listed


def test_it_serves_subclasses(trl_integration, train):
    trl = importlib.import_module("trl")

    class Own(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return 2 * super()._compute_loss(model, inputs)

    plain = train(trainer_class=Own)
    sharing = trl_integration.SharedPrefixGRPOTrainer
    for bases in ((sharing, Own), (Own, sharing)):
        assert_same(shared := train(trainer_class=type("SharedOwn", bases, {})), plain)
        assert shared[0].shares_prefixes and shared[0]._compared


def test_packing_does_not_depend_on_the_default_device(trl_integration):
    shared = importlib.import_module("rlkernels.integrations.trl_shared")
    ids = torch.tensor([[0, 1, 2, 5, 6], [7, 1, 2, 5, 8], [7, 1, 2, 4, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    tensors = (ids[:, :3], mask[:, :3], ids[:, 3:], mask[:, 3:])
    batches = [{name: t[rows] for name, t in zip(names, tensors)} for rows in (slice(2), slice(2, 3))]

    def results():
        packed = shared.pack_rows(ids, mask, 2)
        regrouped = [tensor for batch in shared.regroup(batches) for tensor in batch.values()]
        return [packed.ids, packed.rows, packed.targets, packed.pairs, packed.position_ids, *regrouped]

    expected = results()
    with torch.device("meta"):
        assert_equal(results(), expected)
