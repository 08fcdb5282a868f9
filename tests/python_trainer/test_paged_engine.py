"""PagedEngine against ``model.generate`` and plain forward passes, under every kind of batching, up to its limits.

Requests may come while others are generated, and answers are handed out as they end. The fused pass in bfloat16 lays
weights out once, until they change.
"""

import sys
from collections import Counter
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import transformers
from accuracy import assert_as_plain
from paged import (
    GREEDY,
    LONGROPE,
    MODELS,
    SIZES,
    VOCAB,
    Letters,
    assert_same,
    engine_for,
    make,
    mixed_requests,
    prompts,
)
from sampling_cases import compute_logprobs
from support import Launches, assert_equal
from tiny import generate_greedy

from python_trainer.data import Request
from python_trainer.errors import UserError
from python_trainer.model import forward as forward_module
from python_trainer.model.forward import attend_by
from python_trainer.model.fused import FusedDecoder, Product, reorders_bfloat16
from python_trainer.model.traits import longest_sequence
from python_trainer.rollout.engine import SamplingParams, StopStrings
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.paged import engine as engine_module
from python_trainer.rollout.paged import graphs
from python_trainer.rollout.paged.engine import PagedEngine
from rlkernels import keyed_uniform, prefix_cache
from rlkernels.prefix_cache import torch_flash


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
    completions = engine.generate(requests, GREEDY)
    assert engine.fused == fused
    for request, completion in zip(requests, completions):
        assert completion.ids == generate_greedy(model, request.prompt_ids, 30, eos)
        assert completion.finish_reason == ("stop" if completion.ids[-1] in eos else "length")
    assert not with_eos or "stop" in [completion.finish_reason for completion in completions]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sampling", [
    SamplingParams(seed=3),
    SamplingParams(temperature=0.7, top_p=0.8, seed=1),
    SamplingParams(temperature=1.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.9, top_k=12),
])  # fmt: skip
def test_logprobs_are_those_of_a_full_forward_pass(name, sampling):
    model = make(name)
    requests = mixed_requests()
    # both ways through the model, in turn
    completions = iter(engine_for(model, fused=bool(sampling.top_k)).generate(requests, sampling))
    for request in requests:
        context = [*request.prompt_ids, *request.prefix_ids]
        for _ in range(request.num_generations):
            completion = next(completions)
            expected = compute_logprobs(model, context, completion.ids, sampling)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_batching_and_memory_do_not_change_samples():
    model = make()
    requests = mixed_requests()
    sampling = SamplingParams(seed=5)
    expected = engine_for(model).generate(requests, sampling)
    singles = engine_for(model)
    one_by_one = [completion for request in requests for completion in singles.generate([request], sampling)]
    assert_same(one_by_one, expected)
    other_seed = engine_for(model).generate(requests, SamplingParams(seed=6))
    assert [c.ids for c in other_seed] != [c.ids for c in expected]

    changes = [{"fused": False}, {"max_sequences": 1}, {"max_sequences": 3}, {"block_size": 1}, {"block_size": 64}]
    for settings in (*changes, {"max_batch_tokens": 5, "max_sequences": 4}):
        assert_same(engine_for(model, **settings).generate(requests, sampling), expected)
    for blocks in (14, 17, 25, 40):
        tight = engine_for(model, blocks=blocks)
        assert_same(tight.generate(requests, sampling), expected)
        assert tight.stats["preemptions"] > 0 and tight.cache.stats["blocks_pinned"] == 0


def test_requests_may_come_while_others_are_generated():
    """Every rollout is returned once, as the same object that submit gave."""
    model = make()
    requests = mixed_requests()
    sampling = SamplingParams(temperature=0.9, seed=5)
    expected = engine_for(model).generate(requests, sampling)
    engine = engine_for(model)
    first = engine.submit(requests[:2], sampling)
    assert not any(rollout.finish_reason for rollout in first)
    finished = engine.poll()
    assert finished and len(finished) < len(first)
    later = engine.generate(requests[2:], sampling)  # waits for its own, and keeps what else ends for the next poll
    assert_same(later, expected[len(first) :])
    while polled := engine.poll():
        assert all(rollout.finish_reason for rollout in polled)
        finished += polled
    assert_same(first, expected[: len(first)])
    assert sorted(map(id, finished)) == sorted(map(id, first))
    assert engine.stats["generated_tokens"] == sum(len(r.logprobs) for r in [*first, *later])


def test_requests_without_room_are_finished_at_once_and_still_handed_out():
    engine = engine_for(make())
    rollouts = engine.submit([Request([1, 2], max_new_tokens=0, num_generations=2)], GREEDY)
    assert [r.finish_reason for r in rollouts] == ["length"] * 2
    assert list(map(id, engine.poll())) == list(map(id, rollouts)) and engine.poll() == []
    engine.generate(mixed_requests()[:1], SamplingParams(temperature=0.5))  # nothing is in the way


def test_each_prompt_is_computed_once():
    model = make()
    engine = engine_for(model)
    computed = []
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda module, inputs, output: computed.append(inputs[0].shape[-1]))
    prompt, ending = prompts([24, 9])
    engine.generate([Request(prompt, num_generations=5, max_new_tokens=1)], GREEDY)
    assert sum(computed) == 24
    assert engine.stats["prefill_tokens"] == 24 and engine.stats["cached_tokens"] == 4 * 24
    # the same prompt in a later call: all full blocks are there, one token at least is computed
    engine.generate([Request(prompt, max_new_tokens=1)], GREEDY)
    assert sum(computed) == 24 + 4
    # a beginning that two requests of one call share
    computed.clear()
    fresh = [7, *prompt]
    engine.generate([Request([*fresh[:16], *ending], max_new_tokens=1), Request(fresh, max_new_tokens=1)], GREEDY)
    assert sum(computed) == 25 + 9
    assert engine.stats["generated_tokens"] == 8
    # a new policy: nothing is shared with the past
    computed.clear()
    engine.policy_updated()
    engine.generate([Request(prompt, max_new_tokens=1)], GREEDY)
    assert sum(computed) == 24
    assert engine.stats["forward_passes"] == 4


def test_ends():
    model = make()
    prompt = prompts([10])[0]
    request = Request(prompt, max_new_tokens=12)
    free = engine_for(model).generate([request], GREEDY)[0]
    last = next(i for i in range(3, 12) if free.ids[i] not in free.ids[:i])
    stopped = engine_for(model, eos=[VOCAB + 5, free.ids[last]]).generate([request], GREEDY)
    assert stopped[0].ids == free.ids[: last + 1] and stopped[0].finish_reason == "stop"
    limit = model.config.max_position_embeddings
    long = prompts([limit - 3, limit])
    bounded = engine_for(model).generate([Request(p, max_new_tokens=50) for p in long], GREEDY)
    assert [(len(c.ids), c.finish_reason) for c in bounded] == [(3, "length"), (0, "length")]
    engine = engine_for(model)
    assert engine.generate([], GREEDY) == []
    assert engine.generate([Request(prompt, num_generations=0)], GREEDY) == []


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
    apart = engine.generate([Request(prompt, free.ids[: end - 1], max_new_tokens=3, stops_from=end - 1)], sampling)[0]
    assert apart.ids == free.ids[end - 1 : end + 2], "what others said begins no stop string"
    assert StopStrings(Letters(), ["~~"]).ends([*map(ord, "a~~~")]), "they may overlap"
    over = engine.generate([Request(prompt, free.ids[:end], max_new_tokens=3)], sampling)[0]
    assert over.ids == free.ids[end : end + 3]


def test_model_stays_trainable_and_as_it_was():
    model = make()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = engine_for(model)
    implementation = model.config._attn_implementation
    ids = torch.tensor([prompts([12])[0]])

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    engine.generate(mixed_requests(), SamplingParams())
    assert model.config._attn_implementation == implementation
    assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
    assert_equal(gradients(), expected)


def test_a_model_in_training_mode_generates_without_dropout():
    model = make("Phi", resid_pdrop=0.5, embd_pdrop=0.5)
    engine = engine_for(model)
    expected = engine.generate(mixed_requests(), GREEDY)
    model.train()
    model.model.layers[0].eval()  # frozen
    modes = [module.training for module in model.modules()]
    engine.policy_updated()
    assert_same(engine.generate(mixed_requests(), GREEDY), expected)
    assert engine.pass_seconds(2, 2) > 0
    assert [module.training for module in model.modules()] == modes


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.5)
    model = peft.get_peft_model(make(), config)
    request = Request(prompts([9])[0], max_new_tokens=12)
    engine = engine_for(model)
    adapted = engine.generate([request], GREEDY)
    assert adapted[0].ids == generate_greedy(model, request.prompt_ids, 12)
    with model.disable_adapter():
        engine.policy_updated()
        assert engine.generate([request], GREEDY)[0].ids == generate_greedy(model, request.prompt_ids, 12)
    assert engine.generate([request], GREEDY)[0].ids != adapted[0].ids  # until the engine is told
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(UserError, match="cannot run PeftModelForCausalLM on flattened tokens"):
        engine_for(peft.get_peft_model(make(), prefix))


def test_parts_of_a_model_keep_their_attention():
    text = transformers.LlamaConfig(**SIZES)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=60, image_seq_length=4)
    model = transformers.LlavaForConditionalGeneration(config)
    parts = {"text_config": "eager", "vision_config": "sdpa"}
    model.set_attn_implementation(parts)
    request = Request([token % 60 for token in prompts([9])[0]], max_new_tokens=5)
    engine = PagedEngine(model, eos_token_ids=(), memory_bytes=1 << 20)
    answer = engine.generate([request], GREEDY)[0]
    assert answer.ids == generate_greedy(model, request.prompt_ids, 5)
    assert {part: getattr(config, part)._attn_implementation for part in parts} == parts


def test_hooks_are_run():
    model = make()
    engine = engine_for(model)
    request = Request(prompts([9])[0], max_new_tokens=6)
    plain = engine.generate([request], GREEDY)
    assert engine.fused
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 0)
    engine.policy_updated()
    hooked = engine.generate([request], GREEDY)
    assert hooked[0].ids == generate_greedy(model, request.prompt_ids, 6) != plain[0].ids
    hook.remove()
    engine.policy_updated()
    assert_same(engine.generate([request], GREEDY), plain)


def test_long_answers_first_are_the_same_answers_in_fewer_passes():
    model = make()
    limits = [3, 3, 3, 3, 40, 3, 3, 40]
    requests = [Request(p, max_new_tokens=n) for p, n in zip(prompts([5] * len(limits)), limits)]
    plain = engine_for(model, max_sequences=2)
    expected = plain.generate(requests, GREEDY)
    engine = engine_for(model, max_sequences=2)
    engine.lengths = LengthHistory()
    for _ in range(2):  # nothing is known in the first round: max_new_tokens decides
        num_passes = engine.stats["forward_passes"]
        assert_same(engine.generate(requests, GREEDY), expected)
        assert engine.stats["forward_passes"] - num_passes < plain.stats["forward_passes"]
        engine.lengths.observe(requests, expected)
    assert engine.lengths.predict([Request(requests[4].prompt_ids, max_new_tokens=99)]) == [40]


@pytest.mark.parametrize(
    "options", [{}, {"fused": False}, {"max_batch_tokens": 40, "max_sequences": 12}, {"blocks": 75}]
)
def test_long_prefixes_are_read_once_per_group(monkeypatch, options):
    """The same tokens as without; in chunks, when preempted, and with short neighbours in between."""
    options = {"blocks": 512} | options
    calls = []
    plain = forward_module.shared_prefix_attention
    monkeypatch.setattr(forward_module, "shared_prefix_attention", lambda *a, **k: calls.append(a[4]) or plain(*a, **k))
    model = make()
    monkeypatch.setattr(engine_module, "MIN_SHARED_TOKENS", 128)
    a, b, c = prompts([132, 9, 128])
    requests = [
        Request(a, num_generations=4, max_new_tokens=20, sample_id=0),
        Request(b, num_generations=3, max_new_tokens=25, sample_id=10),
        Request(c[:100], prefix_ids=c[100:], num_generations=2, max_new_tokens=30, sample_id=20),
        Request(a, num_generations=1, max_new_tokens=12, sample_id=30),
    ]
    sampling = SamplingParams(seed=3)
    unshared = engine_for(model, **options | {"share_reads": False})
    engine = engine_for(model, **options)
    calls.clear()  # of the checks of the model
    expected = unshared.generate(requests, sampling)
    assert not calls
    completions = engine.generate(requests, sampling)
    assert_same(completions, expected)
    assert calls and max(int(lens.max()) for lens in calls) >= 128
    assert (engine.stats["preemptions"] > 0) == (options["blocks"] == 75)
    calls.clear()
    engine.generate(requests[1:2], sampling)
    assert not calls  # nothing long enough to share


def test_launches_of_a_decode_pass_are_few(monkeypatch):
    """Count those of a GPU without proven kernels: plain torch, and FlashAttention, which is one launch here.

    test_pretend_gpu counts how often the host waits.
    """
    engine = engine_for(make(), fused=False)
    monkeypatch.setenv("RLKERNELS_BACKEND", "torch")
    monkeypatch.setattr(torch_flash, "accepts_cache", lambda query, cache: True)
    monkeypatch.setattr(torch_flash, "supports", lambda *tensors: True)
    lse = torch.zeros(4, 256)
    monkeypatch.setattr(torch_flash, "_flash", lambda query, *_: (query.clone(), lse[:, : len(query)], None, None))
    for check in ("_check_lengths", "_check_values"):  # a CPU looks at all numbers
        monkeypatch.setattr(prefix_cache, check, lambda *_: None)
    monkeypatch.setattr(engine_module, "keyed_uniform", partial(keyed_uniform, backend="cpu"))  # one call on the host
    engine.submit(
        [Request(prompt, max_new_tokens=8, num_generations=4) for prompt in prompts([9, 5])], SamplingParams()
    )
    pass_counts = []
    with torch.no_grad(), attend_by(engine.model):
        run = engine._runner(17)
        for _ in range(3):
            with Launches() as launches:
                engine._step(run)
            pass_counts.append(launches.counts)
    for counts in pass_counts[1:]:  # the first computes the prompts
        assert not {"sort", "argsort", "topk", "bitwise_xor"} & counts.keys(), "sorts, or random numbers"
        # 3 layers of Transformers with attention, sampling
        assert 100 < counts.total() <= 351, (counts.total(), counts)


def test_a_pass_runs_few_lines_of_python_for_each_sequence():
    """Count the lines of a decoding pass, whose logits are given, with 8 and with 40 sequences."""
    num_lines = Counter()

    def count(frame, event, arg):
        num_lines[sequences] += event == "line"
        return count

    for sequences in (8, 40):
        engine = engine_for(make())
        engine.submit([Request([1, 2, 3], num_generations=sequences, max_new_tokens=9)], SamplingParams())
        for traced in (False, False, True):
            before = sys.gettrace()
            sys.settrace(count if traced else before)
            engine._step(lambda ids, positions, rows, paged: (torch.zeros(len(rows), VOCAB), None))
            sys.settrace(before)
    assert 0 < num_lines[40] - num_lines[8] <= 12 * 32


def with_graphs(monkeypatch, record):
    """Return a model, an engine and one that records its passes by ``record``, a stand-in for CUDA graphs."""
    monkeypatch.setattr(graphs, "record", record)
    model = make()
    plain, engine = (engine_for(model, fused=False, max_sequences=7) for _ in range(2))
    engine.graphs = graphs.DecodeGraphs(model, engine.cache)
    return model, plain, engine


def test_recorded_passes_draw_the_same(monkeypatch):
    """A stand-in for CUDA graphs computes again what was recorded, from the tensors that were recorded."""
    recorded = []

    def record(run, pool):
        recorded.append(run())
        return lambda result=recorded[-1]: result.copy_(run()), recorded[-1]

    model, plain, engine = with_graphs(monkeypatch, record)
    sampling = SamplingParams(seed=3)
    assert_same(engine.generate(mixed_requests(), sampling), plain.generate(mixed_requests(), sampling))
    sizes = {size for size, _ in engine.graphs.recorded}
    assert len(recorded) == len(engine.graphs.recorded) and max(sizes) == 8 and sizes <= {1, 2, 3, 4, 6, 8}
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    for either in (plain, engine):
        either.policy_updated()
    assert_same(engine.generate(mixed_requests(), sampling), plain.generate(mixed_requests(), sampling))
    num_recorded = len(recorded)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # lies elsewhere
    engine.generate(mixed_requests(), sampling)
    assert len(recorded) > num_recorded
    engine.graphs = graphs.DecodeGraphs(model, engine.cache)
    refused = RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(graphs, "record", Mock(side_effect=refused))
    with pytest.warns(UserWarning, match="without CUDA graphs, more slowly: operation not permitted"):
        completions = engine.generate(mixed_requests(), sampling)
    assert_same(completions, plain.generate(mixed_requests(), sampling))


def test_recorded_passes_hold_a_bounded_memory(monkeypatch):
    """A stand-in records 10 bytes for each pass, and frees 1,000 that torch kept of others; the limit is 5 bytes."""
    held_bytes = [0]
    kept_bytes = [1000]
    peaks = []

    def record(run, pool):
        torch.cuda.empty_cache()
        held_bytes[0] += 10
        result = run()
        return lambda: result.copy_(run()), result

    monkeypatch.setattr(torch.cuda, "empty_cache", kept_bytes.clear)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held_bytes[0] + sum(kept_bytes))
    monkeypatch.setattr(graphs, "held_bytes", lambda device, count=graphs.held_bytes: count(torch.device("cuda")))
    _, plain, engine = with_graphs(monkeypatch, record)
    sampling = SamplingParams(seed=3)
    engine.graphs.most_bytes = 5
    lookup = engine.graphs.logits
    monkeypatch.setattr(engine.graphs, "logits", lambda *args: peaks.append(engine.graphs.bytes) or lookup(*args))
    assert_same(engine.generate(mixed_requests(), sampling), plain.generate(mixed_requests(), sampling))
    assert max(peaks) == 10 < held_bytes[0], "the one that goes over the limit is held too; then all are forgotten"


def test_absolute_positions_and_sliding_window():
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=2,
                                     initializer_range=0.3, bos_token_id=None, eos_token_id=None)  # fmt: skip
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    request = Request(prompts([11])[0], max_new_tokens=10)
    completion = PagedEngine(gpt2, eos_token_ids=(), memory_bytes=1 << 20).generate([request], GREEDY)[0]
    assert completion.ids == generate_greedy(gpt2, request.prompt_ids, 10)
    windowed = make("Mistral", sliding_window=24).eval()
    request = Request(prompts([20])[0], max_new_tokens=30)
    expected = generate_greedy(windowed, request.prompt_ids, 30)
    for fused in (True, False):
        completions = engine_for(windowed, fused=fused).generate([request] * 3, GREEDY)  # that share the prompt
        assert [completion.ids for completion in completions] == [expected] * 3
    assert longest_sequence(windowed, 24) == (24, "the model's sliding window"), "on a GPU the engine stops there"


def test_angles_that_depend_on_the_longest_sequence():
    options = {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 40}
    model = make("Phi3", **options).eval()
    engine = engine_for(model)
    assert engine.max_positions == 40 and "original length of the model's rotary factors" in engine.limited_by
    request = Request(prompts([20])[0], max_new_tokens=30)
    assert engine.generate([request], GREEDY)[0].ids == generate_greedy(model, request.prompt_ids, 20)  # and ends there
    # what Transformers compares with is another number
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 40}
    model = make("Llama", rope_parameters=rope)
    engine = engine_for(model)
    assert engine.max_positions == engine_for(make()).max_positions == 160
    assert engine.generate([request], GREEDY)[0].ids == generate_greedy(model, request.prompt_ids, 30)
    with torch.no_grad():
        model(torch.zeros(1, 400, dtype=torch.int64))  # the caller's own pass, which changes the angles
    whole = Request(request.prompt_ids, max_new_tokens=140)  # up to the limit
    assert engine.fused
    assert engine.generate([whole], GREEDY)[0].ids == generate_greedy(model, whole.prompt_ids, 140)


def test_passes_are_measured_where_there_is_room():
    engine = engine_for(make(), blocks=80)  # of 4 tokens
    assert engine.pass_seconds(8, 8) > 0 and engine.cache.stats["blocks_pinned"] == 0
    assert engine.pass_seconds(9, 8) is None and engine.pass_seconds(1, 129) is None


def test_a_model_it_cannot_run():
    with pytest.raises(UserError, match="MambaForCausalLM"):
        PagedEngine(make("Mamba", state_size=4), eos_token_ids=())


def test_too_little_memory():
    with pytest.raises(UserError, match="memory_bytes must be at least"):
        PagedEngine(make(), eos_token_ids=(), memory_bytes=10)
    with pytest.raises(UserError, match="100 tokens, .* does not fit into a KV cache of 80 .*memory_bytes"):
        engine_for(make(), blocks=20).generate([Request([1] * 40, max_new_tokens=60)], GREEDY)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("width", "outputs"), [(1, [1]), (32, [32, 16, 16]), (47, [61]), (96, [48, 48]), (576, [1001])]
)
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@torch.no_grad()
def test_packed_products_are_as_exact_as_linear(bias, width, outputs, rows):
    layers = [torch.nn.Linear(width, n, bias=bias).bfloat16() for n in outputs]
    product = Product(*layers, join_weights=True)
    x = torch.randn(rows, width).bfloat16()
    assert product.reordered == reorders_bfloat16()
    result = product(x)
    plain = torch.cat([layer(x) for layer in layers], 1)
    exact = torch.cat([layer.double()(x.double()) for layer in layers], 1)
    assert result.dtype == torch.bfloat16
    assert_as_plain([result], [plain], [exact], floor=0)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])  # with biases, and with norms of heads
def test_answers_in_bfloat16_have_the_logprobs_of_the_model(name):
    """The error against float64 is at most twice that of the model's own layers, in the mean."""
    model = make(name).bfloat16()
    sampling = SamplingParams(seed=3)
    exact = make(name).bfloat16().double()
    errors = []
    for fused in (True, False):
        engine = engine_for(model, fused=fused)
        assert engine.fused == fused
        error = []
        for answer in engine.generate(mixed_requests(), sampling):
            context = [*answer.prompt_ids, *answer.response_ids[: answer.prefix_len]]
            expected = compute_logprobs(exact, context, answer.ids, sampling)
            error.append((torch.tensor(answer.logprobs) - torch.tensor(expected)).abs())
        errors.append(torch.cat(error).mean().item())
    assert errors[0] <= 2 * errors[1] < 0.2


def test_one_snapshot_until_the_weights_change(monkeypatch):
    """Polls in between take none."""
    snapshots = []
    monkeypatch.setattr(engine_module, "FusedDecoder", lambda *a, **k: snapshots.append(1) or FusedDecoder(*a, **k))
    engine = engine_for(make().bfloat16(), max_sequences=2)
    short = prompts([4, 6, 9, 12])
    engine.submit([Request(ids, max_new_tokens=20 + i) for i, ids in enumerate(short[:3])], GREEDY)
    engine.poll(1)
    engine.submit([Request(short[3], max_new_tokens=60)], GREEDY)  # longer than any so far
    assert len(engine.poll(4)) == 4 - 1 and len(snapshots) == 1
    assert engine._decoder is None, "held while there is nothing to generate"
    engine.policy_updated()
    engine.generate([Request(short[0])], GREEDY)
    assert len(snapshots) == 2
