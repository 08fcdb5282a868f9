"""PagedEngine against ``model.generate`` and plain forward passes, under every kind of batching."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from python_trainer.errors import UserError
from python_trainer.rollout import PagedEngine, Request, SamplingParams, attention
from python_trainer.rollout import engine as engine_module
from python_trainer.rollout.ordering import LengthHistory
from rlkernels import backend

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
}
GREEDY = SamplingParams(temperature=0.0)


def make(name: str = "qwen2") -> torch.nn.Module:
    torch.manual_seed(1)
    return MODELS[name]()


def engine_for(model: torch.nn.Module, *, eos=(), blocks: int = 512, block_size: int = 4, **kwargs) -> PagedEngine:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    return PagedEngine(
        model, eos_token_ids=eos, memory_bytes=blocks * block_size * token, block_size=block_size, **kwargs
    )


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def mixed_requests(**changes) -> list[Request]:
    """Several lengths; some share a beginning, some have prefixes, some have several samples."""
    a, b, c = prompts([19, 6, 1])
    settings = [
        {"prompt_ids": a, "num_samples": 3},
        {"prompt_ids": b},
        {"prompt_ids": [*a[:10], *b], "prefix_ids": b, "num_samples": 2},
        {"prompt_ids": c, "prefix_ids": a, "num_samples": 4},
        {"prompt_ids": a, "prefix_ids": c, "num_samples": 2},
    ]
    return [
        Request(**{"max_new_tokens": 20 + 3 * i, "sample_id": 10 * i, **one, **changes})
        for i, one in enumerate(settings)
    ]


def own_greedy(model, prompt: list[int], count: int, eos=None) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                         eos_token_id=eos or None, pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()


def assert_same(got, expected):
    assert [c.ids for c in got] == [c.ids for c in expected]
    for one, other in zip(got, expected):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@torch.no_grad()
def full_logits(model, ids: list[int]) -> torch.Tensor:
    model.eval()
    return model(input_ids=torch.tensor([ids])).logits[0].float()


def kept_logprobs(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities after temperature, top-k and top-p in their order, written as plainly as possible."""
    scaled = logits.double() / sampling.temperature
    order = scaled.argsort(descending=True, stable=True)
    probs = scaled.softmax(-1)
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
        probs = probs / probs.sum()
    before = probs[order].cumsum(-1) - probs[order]
    probs[order[before >= sampling.top_p]] = 0
    return (probs / probs.sum()).log()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_greedy_equals_generate(name, with_eos, fused):
    model = make(name)
    requests = [Request(prompt, max_new_tokens=30) for prompt in prompts([1, 2, 15, 16, 17, 40])]
    # two tokens that greedy decoding reaches in some of the answers
    free = engine_for(model).generate(requests, GREEDY)
    eos = [free[2].ids[4], free[3].ids[9]] if with_eos else []
    engine = engine_for(model, eos=eos, fused=fused)
    got = engine.generate(requests, GREEDY)
    assert engine.fused == fused
    reasons = set()
    for request, completion in zip(requests, got):
        assert completion.ids == own_greedy(model, request.prompt_ids, 30, eos)
        assert completion.finish_reason == ("stop" if completion.ids[-1] in eos else "length")
        reasons.add(completion.finish_reason)
    assert not with_eos or "stop" in reasons


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=3),
        SamplingParams(temperature=0.7, top_p=0.8, seed=1),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.9, top_k=12),
    ],
)
def test_logprobs_are_those_of_a_full_forward_pass(name, sampling):
    model = make(name)
    requests = mixed_requests()
    # both ways through the model, in turn
    completions = iter(engine_for(model, fused=bool(sampling.top_k)).generate(requests, sampling))
    for request in requests:
        context = [*request.prompt_ids, *request.prefix_ids]
        for _ in range(request.num_samples):
            completion = next(completions)
            logits = full_logits(model, context + completion.ids)
            for i, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs)):
                expected = kept_logprobs(logits[len(context) + i - 1], sampling)[token]
                assert logprob == pytest.approx(expected.item(), abs=1e-4)


def test_batching_and_memory_do_not_change_samples():
    model, requests, sampling = make(), mixed_requests(), SamplingParams(seed=5)
    expected = engine_for(model).generate(requests, sampling)
    singles = engine_for(model)
    one_by_one = [completion for request in requests for completion in singles.generate([request], sampling)]
    assert_same(one_by_one, expected)

    starts = torch.tensor([0] + [request.num_samples for request in requests]).cumsum(0).tolist()
    order = [3, 0, 4, 2, 1]
    shuffled = engine_for(model).generate([requests[i] for i in order], sampling)
    assert_same(shuffled, [c for i in order for c in expected[starts[i] : starts[i + 1]]])

    changes = [{"fused": False}, {"max_sequences": 1}, {"max_sequences": 3}, {"block_size": 1}, {"block_size": 64}]
    for settings in (*changes, {"max_batch_tokens": 5, "max_sequences": 4}):
        assert_same(engine_for(model, **settings).generate(requests, sampling), expected)


@pytest.mark.parametrize("blocks", [14, 17, 25, 40])
def test_running_out_of_blocks_preempts_and_recomputes(blocks):
    model, requests, sampling = make(), mixed_requests(), SamplingParams(seed=5)
    expected = engine_for(model).generate(requests, sampling)
    tight = engine_for(model, blocks=blocks)
    got = tight.generate(requests, sampling)
    assert_same(got, expected)
    assert tight.stats["preemptions"] > 0
    assert tight.cache.stats["blocks_pinned"] == 0


def test_each_prompt_is_computed_once(monkeypatch):
    model = make()
    engine = engine_for(model)
    computed = []
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda module, inputs, output: computed.append(inputs[0].shape[-1]))
    prompt, other = prompts([24, 9])
    engine.generate([Request(prompt, num_samples=5, max_new_tokens=1)], GREEDY)
    assert sum(computed) == 24
    assert engine.stats["prefill_tokens"] == 24 and engine.stats["cached_tokens"] == 4 * 24
    # the same prompt in a later call: all full blocks are there, one token at least is computed
    engine.generate([Request(prompt, max_new_tokens=1)], GREEDY)
    assert sum(computed) == 24 + 4
    # a beginning that two requests of one call share
    computed.clear()
    fresh = [7, *prompt]
    engine.generate([Request([*fresh[:16], *other], max_new_tokens=1), Request(fresh, max_new_tokens=1)], GREEDY)
    assert sum(computed) == 25 + 9
    assert engine.stats["generated_tokens"] == 8
    # a new policy: nothing is shared with the past
    computed.clear()
    engine.policy_updated()
    engine.generate([Request(prompt, max_new_tokens=1)], GREEDY)
    assert sum(computed) == 24
    assert engine.stats["forward_passes"] == 4


def test_policy_updated_leaves_nothing_of_the_old_weights():
    model, requests = make(), mixed_requests()
    engine = engine_for(model)
    before = engine.generate(requests, GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    engine.policy_updated()
    after = engine.generate(requests, GREEDY)
    assert_same(after, engine_for(copy.deepcopy(model)).generate(requests, GREEDY))
    assert [c.ids for c in after] != [c.ids for c in before]


@pytest.mark.parametrize("sampling", [SamplingParams(seed=11), SamplingParams(temperature=1.5, top_p=0.85, seed=2)])
def test_samples_follow_the_models_distribution(sampling):
    model, count = make(), 4000
    prompt = prompts([5])[0]
    drawn = engine_for(model).generate([Request(prompt, num_samples=count, max_new_tokens=2)], sampling)
    first = kept_logprobs(full_logits(model, prompt)[-1], sampling).exp()
    expected = torch.stack(
        [p * kept_logprobs(full_logits(model, [*prompt, token])[-1], sampling).exp() for token, p in enumerate(first)]
    )
    seen = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for completion in drawn:
        seen[tuple(completion.ids)] += 1
    assert not seen[expected == 0].any()
    # pairs too rare for the test are counted together
    likely = expected * count >= 8
    observed = torch.cat([seen[likely], seen[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * count
    assert likely.sum() > 20
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_noise_depends_on_seed_sample_and_position_only():
    model = make()
    engine = engine_for(model)
    prompt = prompts([8])[0]
    whole = engine.generate([Request(prompt, num_samples=3, max_new_tokens=20, sample_id=100)], SamplingParams(seed=4))
    assert len({tuple(c.ids) for c in whole}) == 3
    # a prefix taken from the sample itself continues to the same sample
    rest = engine.generate(
        [Request(prompt, whole[1].ids[:7], max_new_tokens=13, sample_id=101)], SamplingParams(seed=4)
    )
    assert rest[0].ids == whole[1].ids[7:]
    other = engine.generate([Request(prompt, max_new_tokens=20, sample_id=101)], SamplingParams(seed=5))
    assert other[0].ids != whole[1].ids


def test_ends():
    model = make()
    prompt = prompts([10])[0]
    free = engine_for(model).generate([Request(prompt, max_new_tokens=12)], GREEDY)[0]
    last = next(i for i in range(3, 12) if free.ids[i] not in free.ids[:i])
    stopped = engine_for(model, eos=[VOCAB + 5, free.ids[last]]).generate([Request(prompt, max_new_tokens=12)], GREEDY)
    assert stopped[0].ids == free.ids[: last + 1] and stopped[0].finish_reason == "stop"
    limit = model.config.max_position_embeddings
    long = prompts([limit - 3, limit])
    bounded = engine_for(model).generate([Request(p, max_new_tokens=50) for p in long], GREEDY)
    assert [(len(c.ids), c.finish_reason) for c in bounded] == [(3, "length"), (0, "length")]
    engine = engine_for(model)
    assert engine.generate([], GREEDY) == []
    assert engine.generate([Request(prompt, num_samples=0)], GREEDY) == []
    nothing = engine.generate([Request(prompt, max_new_tokens=0, num_samples=2)], GREEDY)
    assert [(c.ids, c.logprobs) for c in nothing] == [([], [])] * 2


class Letters:
    """A tokenizer whose token i is a letter."""

    def decode(self, ids, **kwargs) -> str:
        return "".join(chr(ord("A") + i) for i in ids)


def test_stop_strings():
    model = make()
    prompt = prompts([10])[0]
    engine = engine_for(model, tokenizer=Letters())
    free = engine.generate([Request(prompt, max_new_tokens=16)], SamplingParams(seed=1))[0]
    text = Letters().decode(free.ids)
    sampling = SamplingParams(seed=1, stop=("~~~", text[5:8]))
    end = text.index(text[5:8]) + 3
    stopped = engine.generate([Request(prompt, max_new_tokens=16)], sampling)[0]
    assert stopped.ids == free.ids[:end] and stopped.finish_reason == "stop"
    # begun in the prefix, ended in the completion; one inside the prefix is over and done
    begun = engine.generate([Request(prompt, free.ids[: end - 1], max_new_tokens=9)], sampling)[0]
    assert begun.ids == free.ids[end - 1 : end] and begun.finish_reason == "stop"
    over = engine.generate([Request(prompt, free.ids[:end], max_new_tokens=3)], sampling)[0]
    assert over.ids == free.ids[end : end + 3]


def test_model_stays_trainable_and_as_it_was():
    model = make()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.model.layers[1].eval()
    engine = engine_for(model)
    modes = [module.training for module in model.modules()]
    implementation = model.config._attn_implementation
    ids = torch.tensor([prompts([12])[0]])

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    engine.generate(mixed_requests(), SamplingParams())
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == implementation
    assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected))


def test_an_error_inside_leaves_model_and_cache_usable(monkeypatch):
    model = make()
    engine = engine_for(model)
    implementation = model.config._attn_implementation
    expected = engine_for(model).generate(mixed_requests(), GREEDY)
    calls = []

    def fail_later(module, inputs):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    hook = model.model.norm.register_forward_pre_hook(fail_later)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(mixed_requests(), GREEDY)
    hook.remove()
    assert engine.cache.stats["blocks_pinned"] == 0
    assert model.config._attn_implementation == implementation
    assert [c.ids for c in engine.generate(mixed_requests(), GREEDY)] == [c.ids for c in expected]


def test_rotary_embeddings_by_length_leave_no_trace():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "rope_parameters": rope}))
    request = Request(prompts([20])[0], max_new_tokens=10)
    got = engine_for(model).generate([request], GREEDY)[0]
    assert got.ids == own_greedy(model, request.prompt_ids, 10)
    model.train()
    ids = torch.tensor([request.prompt_ids])
    model(input_ids=ids, labels=ids).loss.backward()


def test_bfloat16_logprobs():
    model = make().to(torch.bfloat16)
    request = Request(prompts([14])[0], num_samples=4, max_new_tokens=20)
    for completion in engine_for(model).generate([request], SamplingParams(seed=1)):
        logits = full_logits(model, [*request.prompt_ids, *completion.ids])
        exact = full_logits(copy.deepcopy(model).float(), [*request.prompt_ids, *completion.ids])
        rows = torch.arange(len(completion.ids)) + 13
        picked = torch.tensor(completion.ids)
        plain, gold = (x.log_softmax(-1)[rows, picked] for x in (logits, exact))
        error = (torch.tensor(completion.logprobs) - gold).abs().mean()
        assert error <= 2 * (plain - gold).abs().mean() + 1e-3


def test_hooks_are_run():
    model = make()
    engine = engine_for(model)
    request = Request(prompts([9])[0], max_new_tokens=6)
    plain = engine.generate([request], GREEDY)
    assert engine.fused
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 0)
    engine.policy_updated()
    hooked = engine.generate([request], GREEDY)
    assert hooked[0].ids == own_greedy(model, request.prompt_ids, 6) != plain[0].ids
    hook.remove()
    engine.policy_updated()
    assert_same(engine.generate([request], GREEDY), plain)


def test_absolute_positions_and_sliding_window():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=2,
                                      initializer_range=0.3, bos_token_id=None, eos_token_id=None)).eval()  # fmt: skip
    request = Request(prompts([11])[0], max_new_tokens=10)
    got = PagedEngine(gpt2, eos_token_ids=(), memory_bytes=1 << 20).generate([request], GREEDY)[0]
    assert got.ids == own_greedy(gpt2, request.prompt_ids, 10)
    # inside its window a sliding layer attends to everything; the engine stops there
    windowed = engine_for(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=24)))
    assert len(windowed.generate([Request(prompts([20])[0], max_new_tokens=10)], GREEDY)[0].ids) == 4


def test_models_it_cannot_run():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2))
    with pytest.raises(UserError, match="MambaForCausalLM"):
        PagedEngine(mamba, eos_token_ids=())
    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8))
    with pytest.raises(UserError, match="softcap"):
        PagedEngine(gemma, eos_token_ids=())
    assert gemma.config._attn_implementation != "rlkernels_packed"


@pytest.mark.parametrize(
    ("request_", "sampling", "message"),
    [
        (Request([1] * 161), GREEDY, "161 tokens, more than the model's limit of 160"),
        (Request([1] * 150, [2] * 20), GREEDY, "170 tokens"),
        (Request([]), GREEDY, "empty"),
        (Request([1, VOCAB]), GREEDY, "between 0 and 60, got 1 .. 61"),
        (Request([-1]), GREEDY, "got -1"),
        (Request([1], num_samples=-2), GREEDY, "num_samples.* -2"),
        (Request([1], max_new_tokens=-1), GREEDY, "max_new_tokens.* -1"),
        (Request([1]), SamplingParams(temperature=-0.5), "temperature.*-0.5"),
        (Request([1]), SamplingParams(temperature=float("nan")), "temperature.*nan"),
        (Request([1]), SamplingParams(top_p=0.0), "top_p.*0.0"),
        (Request([1]), SamplingParams(top_k=-1), "top_k.*-1"),
        (Request([1]), SamplingParams(stop=("x",)), "tokenizer"),
        (Request([1] * 40, max_new_tokens=60), GREEDY, "100 tokens do not fit.*memory_bytes"),
    ],
)
def test_bad_requests(request_, sampling, message):
    engine = engine_for(make(), blocks=20)
    with pytest.raises(UserError, match=message):
        engine.generate([request_], sampling)


@pytest.mark.parametrize("name", ["block_size", "max_sequences", "max_batch_tokens"])
def test_bad_settings(name):
    with pytest.raises(UserError, match=f"{name} must be at least 1, got 0"):
        PagedEngine(make(), eos_token_ids=(), **{name: 0})


def test_too_little_memory():
    with pytest.raises(UserError, match="memory_bytes must be at least"):
        PagedEngine(make(), eos_token_ids=(), memory_bytes=10)


@pytest.mark.parametrize(
    "options", [{}, {"fused": False}, {"max_batch_tokens": 40, "max_sequences": 12}, {"blocks": 75}]
)
def test_long_prefixes_are_read_once_per_group(monkeypatch, options):
    """The same tokens as without; in chunks, when preempted, and with short neighbours in between."""
    options = {"blocks": 512} | options
    calls = []
    plain = attention.shared_prefix_attention
    monkeypatch.setattr(attention, "shared_prefix_attention", lambda *a, **k: calls.append(a[4]) or plain(*a, **k))
    model = make()
    monkeypatch.setattr(engine_module, "MIN_SHARED_TOKENS", 128)
    a, b, c = prompts([132, 9, 128])
    requests = [
        Request(a, num_samples=4, max_new_tokens=20, sample_id=0),
        Request(b, num_samples=3, max_new_tokens=25, sample_id=10),
        Request(c[:100], prefix_ids=c[100:], num_samples=2, max_new_tokens=30, sample_id=20),
        Request(a, num_samples=1, max_new_tokens=12, sample_id=30),
    ]
    sampling = SamplingParams(seed=3)
    expected = engine_for(model, **options | {"share_reads": False}).generate(requests, sampling)
    assert not calls
    engine = engine_for(model, **options)
    got = engine.generate(requests, sampling)
    assert_same(got, expected)
    assert calls and max(int(lens.max()) for lens in calls) >= 128
    assert (engine.stats["preemptions"] > 0) == (options["blocks"] == 75)
    calls.clear()
    engine.generate(requests[1:2], sampling)
    assert not calls  # nothing long enough to share


def test_padded_rows_give_the_same_answers(monkeypatch):
    """What a GPU without a proven attention kernel does: prompts in chunks, decoding and drafts, all in one pass."""
    requests = [Request(ids, num_samples=n, max_new_tokens=12) for ids, n in zip(prompts([3, 17, 1, 40]), [2, 1, 3, 2])]
    sampling = SamplingParams(temperature=0.8, seed=3)

    def answers(padded):
        used = []

        def is_padded(self, query):
            used.append(padded)
            return padded

        monkeypatch.setattr(attention.Paging, "is_padded", is_padded)
        engine = engine_for(make(), fused=False, max_sequences=6, max_batch_tokens=16)
        out = engine.generate(requests, sampling)
        assert used and any(used) == padded
        return out

    for plain, padded in zip(answers(False), answers(True), strict=True):
        assert plain.ids == padded.ids
        torch.testing.assert_close(torch.tensor(plain.logprobs), torch.tensor(padded.logprobs), atol=1e-5, rtol=1e-4)


def test_padded_rows_are_for_gpus_without_a_kernel(monkeypatch):
    lens = torch.tensor([5, 7], dtype=torch.int32)
    paging = attention.Paging(None, None, None, lens, torch.tensor([0, 1, 4], dtype=torch.int32))
    there = [SimpleNamespace(device=torch.device(name), shape=(4, 2, 8)) for name in ("cpu", "cuda")]
    assert [paging.is_padded(query) for query in there] == [False, True]
    monkeypatch.setattr(attention, "LARGEST_SCORES", 2 * 3 * 7 * 2 - 1)
    assert not paging.is_padded(there[1])
    monkeypatch.undo()
    monkeypatch.setitem(backend.OPS, "paged_attention", replace(backend.OPS["paged_attention"], proven=("triton",)))
    assert not paging.is_padded(there[1])


def test_long_answers_first_are_the_same_answers_in_fewer_passes():
    model, limits = make(), [3, 3, 3, 3, 40, 3, 3, 40]
    requests = [Request(p, max_new_tokens=n) for p, n in zip(prompts([5] * len(limits)), limits)]
    plain = engine_for(model, max_sequences=2)
    wanted = plain.generate(requests, GREEDY)
    engine = engine_for(model, max_sequences=2, lengths=LengthHistory())
    for _ in range(2):  # nothing is known in the first round: max_new_tokens decides
        before = engine.stats["forward_passes"]
        assert_same(engine.generate(requests, GREEDY), wanted)
        assert engine.stats["forward_passes"] - before < plain.stats["forward_passes"]
    assert engine.lengths.predict([requests[4].prompt_ids]) == [40]
