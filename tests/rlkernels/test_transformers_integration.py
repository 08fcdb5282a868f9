"""``model.generate`` on the paged cache against plain ``generate``, token for token in float32."""

import copy
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from support import run_python

import rlkernels

transformers = pytest.importorskip("transformers", reason="this machine lacks transformers")
integration = pytest.importorskip("rlkernels.integrations.transformers")
PagedCache, paged_kv_cache = integration.PagedCache, integration.paged_kv_cache
CACHE = "past_key_values" if integration.VERSION < (5, 24) else "cache"  # the newer name of the argument

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {  # settings under names of their own; positions are learned, and Bart takes none as an argument
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "Bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "init_std": 0.3,
             "encoder_layers": 1, "is_decoder": True, "is_encoder_decoder": False, "forced_eos_token_id": None,
             "decoder_start_token_id": None, "num_hidden_layers": None, "num_attention_heads": None,
             "hidden_size": None},
}  # fmt: skip


def build(kind="Llama", **changes):
    """Build a model; a setting of None is left to the config."""
    torch.manual_seed(3)
    changes = FAMILIES.get(kind, {}) | changes
    settings = {name: value for name, value in (SIZES | changes).items() if value is not None or name not in changes}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings))
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.copy_(torch.randn_like(head))  # no two tokens alike
    return model.eval()


@pytest.fixture
def model():
    return build()


def padded(*lengths, beginning=0):
    """Make rows of these lengths, padded on the left, whose first ``beginning`` tokens are the same."""
    width = max(lengths)
    common_ids = torch.randint(1, 61, (beginning,))
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.int64), torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, mask_row, n in zip(ids, mask, lengths):
        row[width - n :] = torch.cat([common_ids, torch.randint(1, 61, (n - beginning,))])
        mask_row[width - n :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, cache=None, **settings):
    if cache is not None:
        settings[CACHE] = cache
    return model.generate(**inputs, max_new_tokens=9, **{"do_sample": False, **settings})


def both(model, inputs, **settings):
    """Return the plain output, the output on a paged cache, and the cache of blocks."""
    plain = generate(model, inputs, **settings)
    kv = paged_kv_cache(model, num_blocks=64, block_size=4)
    with PagedCache(kv, **inputs) as cache:
        return plain, generate(model, inputs, cache, **settings), kv


@pytest.mark.parametrize(("kind", "extra"), [
    ("Llama", {}), ("Qwen2", {}), ("Qwen3", {"head_dim": 16}), ("Gemma", {"head_dim": 16}),
    # whose config does not tell the shape of keys
    ("StableLm", {}), ("Nemotron", {}),  # their layers do not hand on arguments that they do not know
    ("GPTBigCode", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}),  # one head of keys
    ("JetMoe", {"kv_channels": 12, "num_attention_heads": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # with a window that they do not use
    ("Phimoe", MOE),
    ("Qwen2Moe", MOE | {"sliding_window": 8}),  # use_sliding_window is not set
    ("Qwen2Moe", MOE | {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2}),
    ("Llama", {"sliding_window": 8}),  # which it does not know
    # with one that they use; it is in the mask only in the second and third
    ("Mistral", {"sliding_window": 8}),
    ("Phimoe", MOE | {"sliding_window": 8}),
    ("Qwen2Moe", MOE | {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True,
                        "sliding_window": 8}),
    ("GptOss", MOE | {"head_dim": 8, "sliding_window": 8, "attention_bias": False}),  # and sinks
    ("Gemma2", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    ("Youtu", {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
               "num_key_value_heads": 4}),  # keys wider than values
])  # fmt: skip
def test_same_tokens_as_plain_generate(kind, extra):
    model = build(kind, **extra)
    for inputs, shared in ((padded(7), 0), (padded(7, 12, 1), 0), (padded(13, 9, 13, beginning=8), 16)):
        plain = plain_generate(model, inputs)  # a DynamicCache would cut at any window of the config
        kv = paged_kv_cache(model, num_blocks=64, block_size=4)
        for is_second in (False, True):  # the second time from the cache, where rows wait for the shortest
            with PagedCache(kv, **inputs) as cache:
                assert torch.equal(generate(model, inputs, cache), plain)
            assert (is_second or kv.stats["hits"] == shared) and kv.stats["blocks_pinned"] == 0


def test_our_kernel_runs_in_every_layer_of_every_step(model, monkeypatch):
    kernel = Mock(side_effect=rlkernels.paged_attention)
    monkeypatch.setattr(integration, "paged_attention", kernel)
    both(model, padded(7, 4))
    assert [len(call.args[0]) for call in kernel.mock_calls] == [11] * 2 + [2] * 2 * 8  # padding is never computed


def test_a_prompt_with_the_same_prefix_is_not_computed_again(model):
    inputs = padded(14, 11, beginning=9)
    first, second = ({k: v[i : i + 1, w:] for k, v in inputs.items()} for i, w in ((0, 0), (1, 3)))
    plain = [generate(model, x) for x in (first, second)]
    kv = paged_kv_cache(model, num_blocks=64, block_size=4)
    computed = []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))
    for x, expected, cached in ((first, plain[0], 0), (second, plain[1], 8)):
        with PagedCache(kv, **x) as cache:
            assert cache.num_cached == [cached]
            assert torch.equal(generate(model, x, cache), expected)
    hook.remove()
    assert computed == [14, *[1] * 8, 3, *[1] * 8]
    assert kv.stats["hits"] == 8

    answer = {"input_ids": plain[0], "attention_mask": torch.ones_like(plain[0])}  # the answers are cached too
    with PagedCache(kv, **answer) as cache:
        assert cache.num_cached == [20]
    kv.advance_version()
    with PagedCache(kv, **first) as cache:
        assert cache.num_cached == [0]


def test_a_dropped_cache_gives_its_blocks_back(model):
    inputs = padded(9, 6)
    plain = generate(model, inputs)
    kv = paged_kv_cache(model, num_blocks=9, block_size=4)
    for _ in range(3):  # 9 blocks are enough for one alone
        output = generate(model, inputs, PagedCache(kv, **inputs), return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain)
        with pytest.raises(rlkernels.OutOfBlocks, match="close what has ended of the 2 open sequences"):
            PagedCache(kv, **padded(30))
        del output
    assert kv.stats["blocks_pinned"] == 0


def test_samples_share_the_prompt(model):
    inputs = padded(9, 6)
    torch.manual_seed(5)
    plain = generate(model, inputs, do_sample=True, num_return_sequences=3)
    kv = paged_kv_cache(model, num_blocks=64, block_size=4)
    with PagedCache(kv, **inputs) as cache:
        torch.manual_seed(5)
        assert torch.equal(plain, generate(model, inputs, cache, do_sample=True, num_return_sequences=3))
        assert kv.stats["hits"] == 2 * (8 + 4)


def test_copies_that_do_not_fit_give_all_blocks_back(model):
    """Samples of two prompts need 3 blocks, and one more for each further sample."""
    inputs = padded(7, 3)
    kv = paged_kv_cache(model, num_blocks=6, block_size=4)
    with PagedCache(kv, **inputs) as cache:
        with pytest.raises(rlkernels.OutOfBlocks, match="9 blocks are needed, 6 of 6"):
            generate(model, inputs, cache, do_sample=True, num_return_sequences=4)
        assert kv.stats["blocks_pinned"] == 0


def test_samples_of_a_prompt_that_older_weights_computed_are_refused(model):
    """They need its blocks, which the advance has made unreachable."""
    inputs = padded(7)
    kv = paged_kv_cache(model, num_blocks=64, block_size=4)
    for is_second in (False, True):
        with PagedCache(kv, **inputs) as cache:
            if is_second:
                kv.advance_version()
                for message in ("has advanced since the PagedCache was opened: open another", "got one that is closed"):
                    with pytest.raises(ValueError, match=message):
                        generate(model, inputs, cache, do_sample=True, num_return_sequences=4)
            else:
                generate(model, inputs, cache)
    assert kv.stats["blocks_pinned"] == 0


def test_a_second_turn_in_the_same_cache(model):
    inputs = padded(9, 6)
    kv = paged_kv_cache(model, num_blocks=64, block_size=4)
    with PagedCache(kv, **inputs) as cache:
        ids = torch.cat([generate(model, inputs, cache), torch.randint(1, 61, (2, 5))], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 14, dtype=torch.int64)], 1)
        for row, column in ((1, 12), (0, 18)):  # behind the first answers: one that had ended, a shorter question
            gap = mask.clone()
            gap[row, column] = 0
            with pytest.raises(ValueError, match=rf"then 1 for every new column, got 0 at \[{row}, {column}\]"):
                generate(model, {"input_ids": ids, "attention_mask": gap}, cache)
        with pytest.raises(ValueError, match=r"attention_mask must have shape \[2, 23\], got \[2, 22\]"):
            model(ids[:, cache.get_seq_length() :], attention_mask=mask[:, :-1], **{CACHE: cache})
        second = {"input_ids": ids, "attention_mask": mask}
        paged = generate(model, second, cache)
    model.set_attn_implementation("sdpa")
    assert torch.equal(paged, generate(model, second))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("passes", [0, 1])
def test_a_failed_pass_leaves_nothing_behind(model, monkeypatch, passes, early):
    """The first or a later pass fails, in the model or before it runs."""
    ids = torch.randint(1, 61, (1, 8))
    kv = paged_kv_cache(model, num_blocks=64, block_size=4)
    fail = Mock(side_effect=RuntimeError("out of memory"))
    with torch.no_grad(), PagedCache(kv, ids[:, :5]) as cache:
        if passes:
            model(ids[:, :5], **{CACHE: cache})
        if early:
            monkeypatch.setattr(kv, "tables", fail)
        else:
            model.lm_head.register_forward_pre_hook(fail)
        for error, message in ((RuntimeError, "out of memory"), (ValueError, "closed, failed or empty")):
            with pytest.raises(error, match=message):
                model(ids[:, 5 * passes :], **{CACHE: cache})
    with PagedCache(kv, torch.cat([ids, ids[:, :1]], 1)) as cache:
        assert cache.num_cached == [4 * passes]


@pytest.mark.parametrize("place", ["model.embed_tokens", "model.layers.1.mlp"])
def test_a_pass_without_a_cache_after_an_interrupt_does_not_run_on_its_cache(model, place):
    """As after Ctrl-C in a notebook, where torch runs no hook that would end the pass."""
    ids = torch.randint(1, 61, (1, 6))
    kv = paged_kv_cache(model, num_blocks=8, block_size=4)
    with torch.no_grad(), PagedCache(kv, ids[:, :5]) as cache:
        model(ids[:, :5], **{CACHE: cache})
        hook = model.get_submodule(place).register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 5:], **{CACHE: cache})
        hook.remove()
        with pytest.raises(ValueError, match=r"needs cache=PagedCache\(...\)"):
            model(ids[:, 5:])
        with pytest.raises(ValueError, match="closed, failed or empty"):
            model(ids[:, 5:], **{CACHE: cache})


def test_a_copy_of_the_model_has_a_cache_of_its_own(model):
    """Such as a reference model, copied from a policy that attends through a paged cache."""
    inputs = padded(7, 4)
    paged_kv_cache(model, num_blocks=8)
    for either_model in (copy.deepcopy(model), model):
        kv = paged_kv_cache(either_model, num_blocks=64, block_size=4)
        with PagedCache(kv, **inputs) as cache:
            check_as_plain(either_model, inputs, cache)


def test_keys_and_values_of_two_models_do_not_mix(model):
    """Each prompt of the policy would otherwise find those of the reference model."""
    inputs = padded(7, 4)
    reference = copy.deepcopy(model)
    kv = paged_kv_cache(model, num_blocks=64, block_size=4)
    paged_kv_cache(reference, num_blocks=8)
    with PagedCache(kv, **inputs) as cache:
        with pytest.raises(ValueError, match=r"paged_kv_cache\(model\) of this LlamaForCausalLM, got another's"):
            generate(reference, inputs, cache)
        check_as_plain(model, inputs, cache)


def test_another_default_device(model):
    inputs = padded(6, 5)
    kv = paged_kv_cache(model, num_blocks=8, block_size=4)
    with torch.device("meta"), PagedCache(kv, **inputs) as cache:
        assert cache.num_cached == [0, 0]


def test_beams_and_assisted_generation_are_refused(model):
    inputs = padded(9)
    assistant = build(num_hidden_layers=1)
    kv = paged_kv_cache(model, num_blocks=64, block_size=4)
    for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}):
        with PagedCache(kv, **inputs) as cache, pytest.raises(NotImplementedError, match="without beams and assisted"):
            generate(model, inputs, cache, **options)


def test_a_prompt_that_is_no_tensor_is_named(model):
    kv = paged_kv_cache(model, num_blocks=8)
    for arguments, name in (([[1, 2]],), "input_ids"), ((torch.ones(1, 2).long(), [[1, 1]]), "attention_mask"):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
            PagedCache(kv, *arguments)


def test_what_the_kernels_do_not_know_is_refused(model):
    with pytest.raises(ValueError, match="Gemma3Attention looks ahead .is_causal is False."):
        both(build("Gemma3Text", head_dim=16, use_bidirectional_attention=True), padded(5))
    with pytest.raises(ValueError, match="DogeAttention makes an attention_mask of its own"):
        both(build("Doge"), padded(5))
    with pytest.raises(ValueError, match=r"must attend once in a pass of DiffLlama.* got \{0: 2, 1: 2\}"):
        both(build("DiffLlama"), padded(5))
    refused = r"must attend once in a pass of RecurrentGemma.* got \{0: 0, 1: 0\}|ForCausalLM with linear_attention$"
    with pytest.raises(ValueError, match=refused):
        both(build("RecurrentGemma", num_hidden_layers=3, head_dim=8, lru_width=32), padded(5))
    inputs = padded(6, 5)
    cut = build(num_hidden_layers=3)
    deeper = paged_kv_cache(cut, num_blocks=8)
    del cut.model.layers[2]
    kv = paged_kv_cache(model, num_blocks=8, block_size=4)
    with pytest.raises(ValueError, match=r"each of 3 layers must attend once .* got \{2: 0\}"):
        generate(cut, inputs, PagedCache(deeper, **inputs))
    with pytest.raises(ValueError, match=r"`import rlkernels\.\S+ registers, needs cache=PagedCache.* got neither"):
        generate(model, inputs)
    with pytest.raises(ValueError, match=r"attention_mask must be 0 on the left only .* got 1 at \[1, 0\] and 0 to"):
        PagedCache(kv, inputs["input_ids"], inputs["attention_mask"].flip(1))
    with pytest.raises(ValueError, match="got only padding in row 1"):
        PagedCache(kv, inputs["input_ids"], torch.tensor([[1] * 6, [0] * 6]))
    with pytest.raises(ValueError, match="must be the one that the PagedCache was opened with"):
        generate(model, inputs, PagedCache(kv, inputs["input_ids"]))
    changed_ids = inputs["input_ids"].clone()
    changed_ids[1, -1] += 1
    with PagedCache(kv, **inputs) as cache:
        for _ in range(2):
            with pytest.raises(ValueError, match="those that the PagedCache was opened with, got others in row 1"):
                generate(model, {**inputs, "input_ids": changed_ids}, cache)
    with pytest.raises(ValueError, match="prefill_chunk_size is not supported"):
        generate(model, inputs, PagedCache(kv, **inputs), prefill_chunk_size=2)
    with pytest.raises(rlkernels.OutOfBlocks):
        PagedCache(kv, **padded(40))
    plain = build()
    with pytest.raises(ValueError, match="prepared by paged_kv_cache.* got one in a forward pass of another model"):
        generate(plain, inputs, PagedCache(paged_kv_cache(model, num_blocks=8), **inputs))
    inputs = padded(6)
    with torch.enable_grad(), pytest.raises(ValueError, match="has no gradient"):
        model(**inputs, **{CACHE: PagedCache(paged_kv_cache(model, num_blocks=8), **inputs)})


NAMED = """
from transformers import Qwen2Config, Qwen2ForCausalLM
sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
def make():
    return Qwen2ForCausalLM._from_config(Qwen2Config(**sizes), attn_implementation="rlkernels")
try:
    make()
except ValueError as error:
    print("rlkernels" in str(error))
import rlkernels.integrations.transformers
print(make().config._attn_implementation)
"""


def test_the_import_registers_the_name():
    assert run_python("-c", NAMED).split() == ["True", "rlkernels"]


def test_a_cache_of_another_batch_or_beside_another_attention_is_refused(model):
    inputs = padded(9, 6, beginning=5)
    kv = paged_kv_cache(model, num_blocks=64, block_size=4)
    with PagedCache(kv, **inputs) as cache:
        generate(model, inputs, cache)
        with pytest.raises(ValueError, match=r"attention_mask must have shape .* holds 17 columns already"):
            generate(model, inputs, cache)
    with pytest.raises(ValueError, match="must be an open PagedCache, got one that is closed"):
        generate(model, inputs, cache)
    with PagedCache(kv, **inputs) as cache:  # of which a part is cached, in which masks of other attention differ
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="attend by 'rlkernels' .* got 'sdpa': call set_attn.* registers"):
            generate(model, inputs, cache)
        model.set_attn_implementation("rlkernels")
        assert generate(model, inputs, cache).shape == (2, 18)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(("kind", "extra"), [
    ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    ("Phimoe", MOE | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 16, "short_mscale": 1.2,
                                                     "long_mscale": 1.5}}),
    ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
])  # fmt: skip
def test_rotary_factors_that_change_with_the_length_are_limited_to_the_original_one(kind, extra):
    model = build(kind, **extra)
    inputs = padded(8, 5)
    plain, paged, kv = both(model, inputs)  # 16 tokens at most: the last one is never fed
    assert torch.equal(plain, paged)
    kv.advance_version()
    with torch.no_grad(), PagedCache(kv, plain[:1, :12]) as cache:
        model(plain[:1, :12], **{CACHE: cache})
        with pytest.raises(ValueError, match="at most 16 tokens, the original length of .* rotary factors, got 17"):
            model(plain[:1, 12:], **{CACHE: cache})
        logits = model(plain[:1, 12:-1], **{CACHE: cache}).logits[:, -1]  # the cache is as it was
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(logits, model(plain[:1, :-1]).logits[:, -1], rtol=1e-4, atol=1e-4)


def user_loop(model, inputs, cache, *, positions, steps=4):
    """Return the last logits of each pass of a user's loop; ``cache`` None: Transformers without a cache."""
    ids = inputs["input_ids"]
    mask = inputs["attention_mask"]
    step_logits = []
    with torch.no_grad():
        for _ in range(steps):
            start = cache.get_seq_length() if cache is not None else 0
            arguments = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, start:]} if positions else {}
            arguments |= {"attention_mask": mask, CACHE: cache, "use_cache": cache is not None}
            logits = model(ids[:, start:], **arguments).logits
            step_logits.append(logits[:, -1])
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return torch.stack(step_logits)


@contextmanager
def eager(model):
    """Let the model compute as in Transformers, without our attention."""
    base = getattr(model, "get_base_model", lambda: model)()  # of a PeftModel
    attention = base.config._attn_implementation
    base.set_attn_implementation("eager")
    yield
    base.set_attn_implementation(attention)


def plain_generate(model, inputs):
    with eager(model):
        return generate(model, inputs, use_cache=False)


def check_as_plain(model, inputs, cache, loop=False):
    """Compare with the plain model, by ``generate`` or in a user's loop."""
    if loop:
        with eager(model):
            plain = user_loop(model, inputs, None, positions=True)
        torch.testing.assert_close(user_loop(model, inputs, cache, positions=True), plain, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(generate(model, inputs, cache), plain_generate(model, inputs))


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "OPT", "Bart"])
def test_padding_that_counts_as_positions_is_refused(kind):
    """Check a loop without position ids, and models that take none, which run rows of one length."""
    model = build(kind)
    inputs = padded(13, 10, 13, 9, beginning=8)
    kv = paged_kv_cache(model, num_blocks=96, block_size=4)
    with PagedCache(kv, **inputs) as cache:
        with pytest.raises(ValueError, match="position_ids must be given for rows with padding"):
            user_loop(model, inputs, cache, positions=False)
        if kind != "Bart":
            check_as_plain(model, inputs, cache, loop=True)
    inputs = padded(13, 13, beginning=8) if kind == "Bart" else inputs
    for _ in range(2):  # the second time with what the first one cached
        with PagedCache(kv, **inputs) as cache:
            check_as_plain(model, inputs, cache)


KINDS = st.sampled_from(["Llama", "GPT2"])
ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=4)
MODELS = {}


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(KINDS, st.lists(st.tuples(ROWS, st.booleans()), min_size=1, max_size=3))
def test_any_padding_in_any_order_of_calls(kind, calls):
    """Batches one after the other in one cache: rows of a common beginning of 0 to 9 tokens and 1 to 5 of their own."""
    model = MODELS.setdefault(kind, build(kind))
    kv = paged_kv_cache(model, num_blocks=96, block_size=2)
    beginning = list(range(1, 10))
    for rows, loop in calls:
        texts = [
            beginning[:shared] + [20 + 5 * i + j for j in range(own_length)]
            for i, (shared, own_length) in enumerate(rows)
        ]
        inputs = padded(*map(len, texts))
        for row, text in zip(inputs["input_ids"], texts):
            row[len(row) - len(text) :] = torch.tensor(text)
        with PagedCache(kv, **inputs) as cache:
            check_as_plain(model, inputs, cache, loop)


def test_what_changes_keys_and_is_not_in_their_key_is_refused(model):
    gpt2 = build("GPT2")
    ids = torch.randint(1, 61, (1, 6))
    kv = paged_kv_cache(gpt2, num_blocks=16, block_size=4)
    with torch.no_grad(), PagedCache(kv, ids) as cache:
        for name, value in (
            ("token_type_ids", torch.ones_like(ids)),
            ("inputs_embeds", torch.zeros(1, 6, 32)),
            ("encoder_hidden_states", torch.zeros(1, 6, 32)),
        ):
            with pytest.raises(ValueError, match=f"{name} must not be given to GPT2LMHeadModel with a PagedCache"):
                gpt2(ids, **{CACHE: cache, name: value})
        with pytest.raises(ValueError, match="token_type_ids must not be given"):
            generate(gpt2, {"input_ids": ids, "token_type_ids": torch.ones_like(ids)}, cache)
        with pytest.raises(ValueError, match="position_ids must count .* got 5 for token 0 of row 0"):
            gpt2(ids, position_ids=torch.arange(5, 11)[None], **{CACHE: cache})
        with pytest.raises(ValueError, match=r"GPT2LMHeadModel must be in eval mode, got resid_pdrop 0.1"):
            gpt2.train()(ids, **{CACHE: cache})
        gpt2.eval()(ids, **{CACHE: cache})
    kv = paged_kv_cache(model, num_blocks=32, block_size=4)
    inputs = padded(9, 6)
    mask = inputs["attention_mask"]
    with PagedCache(kv, **inputs) as cache:
        generate(model, inputs, cache)
    with torch.no_grad(), PagedCache(kv, **inputs) as cache:
        start = cache.get_seq_length()
        with pytest.raises(ValueError, match=r"attention_mask must be given, got None: .* \[0, 3\] columns of padding"):
            model(inputs["input_ids"][:, start:], **{CACHE: cache})
        with pytest.raises(ValueError, match=r"position_ids must be given .* Give \(attention_mask.cumsum"):
            model(inputs["input_ids"][:, start:], mask, **{CACHE: cache})
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, start:]
        model(inputs["input_ids"][:, start:], mask, position_ids=position_ids, **{CACHE: cache})
        with pytest.raises(ValueError, match="position_ids must be given for rows with padding"):
            model(inputs["input_ids"][:, :1], torch.cat([mask, mask[:, -1:]], 1), **{CACHE: cache})


@pytest.fixture
def adapted():
    """Return a Llama with two adapters of PEFT, of which "other" is large."""
    peft = pytest.importorskip("peft", reason="this machine lacks peft")
    model = peft.get_peft_model(build(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * (2 if "other" in name else 1))
    return model.eval()


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(
    st.lists(st.sampled_from(["default", "other", "none", "both"]), min_size=2, max_size=5), st.booleans()
)
def test_adapters_of_peft_share_no_blocks(calls, loop):
    model = MODELS.setdefault("peft", adapted.__wrapped__())
    inputs = padded(12, 12, beginning=10)
    kv = paged_kv_cache(model, num_blocks=96, block_size=4)
    for adapter in calls:
        if adapter == "both":
            model.base_model.set_adapter(["default", "other"])
        elif adapter != "none":
            model.set_adapter(adapter)
        with model.disable_adapter() if adapter == "none" else nullcontext(), PagedCache(kv, **inputs) as cache:
            check_as_plain(model, inputs, cache, loop)
    with model.disable_adapter(), PagedCache(kv, **inputs) as cache:
        assert bool(min(cache.num_cached)) == (calls[-1] == "none")


def test_prompts_within_layers_share_no_blocks(model):
    """LLaMA-Adapter has such prompts, whose layers PEFT puts into the model and takes out."""
    peft = pytest.importorskip("peft", reason="this machine lacks peft")
    config = peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    inputs = padded(12)
    kv = paged_kv_cache(adapted, num_blocks=16, block_size=4)
    disable = adapted.disable_adapter
    for context, num_cached in (
        (nullcontext(), 0),
        (nullcontext(), 8),
        (disable(), 0),
        (disable(), 8),
        (nullcontext(), 0),
    ):
        with context, PagedCache(kv, **inputs) as cache:
            assert cache.num_cached == [num_cached]
            generate(model, inputs, cache)


def test_adapters_within_a_batch_or_changed_in_between_are_refused(adapted):
    inputs = padded(6, 6)
    kv = paged_kv_cache(adapted, num_blocks=32, block_size=4)
    with PagedCache(kv, **inputs) as cache:
        adapted.set_adapter("other")
        with pytest.raises(ValueError, match="the adapters of LlamaForCausalLM must stay as they were"):
            generate(adapted, inputs, cache)
        generate(adapted, inputs, PagedCache(kv, **inputs))
        adapted.set_adapter("default")
        twice = generate(adapted, inputs, cache, num_return_sequences=2, do_sample=True, top_k=1)  # opened only now
        assert torch.equal(twice, plain_generate(adapted, inputs).repeat_interleave(2, 0))
    with PagedCache(kv, **inputs) as cache, pytest.raises(ValueError, match="adapter_names must not be given with"):
        generate(adapted, inputs, cache, adapter_names=["default", "other"])
    merged = adapted.merge_and_unload()
    kv.advance_version()
    with PagedCache(kv, **inputs) as cache:
        check_as_plain(merged, inputs, cache)


def test_text_for_a_vision_language_model_and_images_refused():
    text = transformers.LlamaConfig(**SIZES)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(3)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=60, image_seq_length=4)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    inputs = padded(13, 9, beginning=8)
    inputs["input_ids"].clamp_(max=59)
    kv = paged_kv_cache(model, num_blocks=32, block_size=4)
    with PagedCache(kv, **inputs) as cache:
        with pytest.raises(ValueError, match="mm_encoder_outputs must not be given to LlavaForConditionalGen"):
            generate(model, {**inputs, "pixel_values": torch.zeros(2, 3, 8, 8)}, cache)
        check_as_plain(model, inputs, cache)


def test_keys_and_values_of_differing_shape_are_told(model):
    for name in ("k_proj", "v_proj"):  # one head in the place of two
        setattr(model.model.layers[1].self_attn, name, torch.nn.Linear(32, 8, bias=False))
    implementation = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"one shape in all layers, Llama.* \(2, 8\) from layer 0 on, .1, 8. fr"):
        paged_kv_cache(model, num_blocks=8)
    assert model.config._attn_implementation == implementation
