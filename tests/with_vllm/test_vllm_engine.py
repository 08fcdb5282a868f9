"""Rollouts by the real vLLM, in this process and on a server of its own, against Transformers and PagedEngine."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import Console
from rollouts import EOS, GREEDY, MEMORY, PROMPTS, SAMPLINGS, count_since, load, run_settings, train
from sampling_cases import compute_logprobs
from support import ROOT
from tiny import generate_greedy
from transformers import AutoTokenizer

from bench._vllm_server import VLLMServer
from python_trainer.config import load_config
from python_trainer.data import Request
from python_trainer.errors import UserError
from python_trainer.model.lora import AdaptedWeight
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.paged.engine import PagedEngine
from python_trainer.rollout.settings import vllm_logprobs_modes
from python_trainer.rollout.vllm.engine import InProcess, VLLMEngine
from python_trainer.rollout.vllm.servers import AdapterFiles, Servers
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer
from rlkernels import RolloutHistory
from rlkernels.integrations.vllm_worker import PolicyWorker
from rlkernels.weights import merged_weight


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def in_process(folder):
    """Return vLLM's backend, started once."""
    return InProcess(load(folder), folder, memory_bytes=MEMORY)


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    """Start a server, and yield its URL."""
    server = VLLMServer(sys.executable, folder, tmp_path_factory.mktemp("server") / "log", MEMORY)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def addresses(address, folder, tmp_path_factory):
    """Start a second server, and yield the URLs of both."""
    server = VLLMServer(sys.executable, folder, tmp_path_factory.mktemp("second") / "log", MEMORY)
    server.start()
    yield [address, server.url]
    server.stop()


@pytest.fixture(params=["in_process", "server"])
def backend(request, folder, tmp_path):
    if request.param == "in_process":
        return request.getfixturevalue("in_process")
    return Servers(load(folder), [request.getfixturevalue("address")], tmp_path / "weights")


@pytest.fixture
def engine(backend, model, tokenizer):
    return VLLMEngine(model, backend, eos_token_ids=[EOS], tokenizer=tokenizer)


def test_greedy_equals_transformers(backend, model):
    endless_answers = [generate_greedy(model, prompt, 30) for prompt in PROMPTS]
    ends = [EOS, endless_answers[1][9], endless_answers[4][4]]
    expected = []
    for ids in endless_answers:
        end = min([i for i, token in enumerate(ids) if token in ends], default=30)
        expected.append(ids[: end + 1])
    assert len({tuple(ids) for ids in expected}) == len(PROMPTS)
    assert sorted({len(ids) for ids in expected})[0] < 30 == max(map(len, expected))
    engine = VLLMEngine(model, backend, eos_token_ids=ends)
    completions = engine.generate([Request(prompt, max_new_tokens=30) for prompt in PROMPTS], GREEDY)
    assert [c.ids for c in completions] == expected
    assert [c.finish_reason for c in completions] == ["stop" if ids[-1] in ends else "length" for ids in expected]
    pair = engine.generate([Request(PROMPTS[0], num_generations=2, max_new_tokens=3)], GREEDY)
    assert [(c.ids, c.logprobs, c.finish_reason) for c in pair] == [(expected[0][:3], [0.0] * 3, "length")] * 2
    assert engine.stats["generated_tokens"] == sum(map(len, expected)) + 6


def check_logprobs(engine, model, sampling):
    """Check that log-probabilities are the model's, before top-k and top-p, or NaN where vLLM's mode lacks them."""
    prefix = list(range(8))
    requests = [Request(prompt, prefix, 3, 20, sample_id=10 * i) for i, prompt in enumerate(PROMPTS)]
    completions = engine.generate(requests, sampling)
    assert len({tuple(c.ids) for c in completions}) == len(completions) == 15
    for i, completion in enumerate(completions):
        expected = compute_logprobs(model, [*PROMPTS[i // 3], *prefix], completion.ids, sampling)
        if engine.backend.logprobs_mode not in vllm_logprobs_modes(sampling):
            expected = [math.nan] * len(expected)
        assert completion.logprobs == pytest.approx(expected, abs=2e-4, nan_ok=True)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_logprobs_are_those_of_the_model(engine, model, sampling):
    check_logprobs(engine, model, sampling)


def test_samples_follow_seed_and_sample_id(engine):
    group = Request(PROMPTS[2], num_generations=4, max_new_tokens=12, sample_id=40)
    batched = engine.generate([Request(PROMPTS[1], num_generations=3, max_new_tokens=9), group], SamplingParams(seed=5))
    single = [
        engine.generate([Request(PROMPTS[2], max_new_tokens=12, sample_id=40 + j)], SamplingParams(seed=5))[0]
        for j in (3, 0)
    ]
    assert [c.ids for c in single] == [batched[6].ids, batched[3].ids] and batched[6].ids != batched[3].ids
    assert engine.generate([group], SamplingParams(seed=6))[0].ids != batched[3].ids


def test_more_prompt_tokens_than_one_pass_takes(engine):
    """On a CPU vLLM 0.32 cannot sample by a seed after a prompt that it divided over two passes."""
    prompts = torch.randint(EOS, (96, 100), generator=torch.Generator().manual_seed(0)).tolist()
    answers = engine.generate([Request(ids, (), 1, 2, sample_id=i) for i, ids in enumerate(prompts)], SAMPLINGS[0])
    assert [len(answer.ids) for answer in answers].count(2) > 80


def test_new_weights_take_over_and_no_stale_cache_is_used(engine, model):
    request = Request(PROMPTS[4], max_new_tokens=16)
    old_answer = engine.generate([request], GREEDY)[0].ids
    old_stats = engine.stats
    assert engine.generate([request], GREEDY)[0].ids == old_answer
    assert count_since(engine, old_stats)["cached_tokens"] == 64  # two blocks of 32 out of 80 tokens
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    new_answer = generate_greedy(model, PROMPTS[4], 16)
    assert new_answer != old_answer
    engine.policy_updated()
    old_stats = engine.stats
    assert engine.generate([request], GREEDY)[0].ids == new_answer
    counts = count_since(engine, old_stats)
    assert counts["cached_tokens"] == 0 and counts["prefill_tokens"] == 80


def test_a_folder_without_weights_leaves_those_that_vllm_has(tmp_path):
    class Worker(PolicyWorker):
        model_runner = SimpleNamespace(device="cpu")

        def reload_weights(self, weights_iterator):
            raise AssertionError("vLLM drops its weights before it reads others")

    for folder in (tmp_path, str(tmp_path / "missing")):
        with pytest.raises(FileNotFoundError, match="holds no safetensors file"):
            Worker().load_policy(folder)


def test_a_server_merges_adapters_itself(address, model, tmp_path):
    """Its answers are those of a server that gets the merged weights."""
    targets = ("q_proj.weight", "v_proj.weight", "down_proj.weight")
    names = [name for name in model.state_dict() if name.endswith(targets)]
    adapters = AdapterFiles(model, names, tmp_path / "weights")
    engine = VLLMEngine(model, Servers(model, [address], tmp_path / "weights", adapters), eos_token_ids=[EOS])
    base = {name: model.get_parameter(name).detach().clone() for name in names}
    requests = [Request(prompt, (), 3, 20, sample_id=10 * i) for i, prompt in enumerate(PROMPTS)]
    generator = torch.Generator().manual_seed(0)
    answers, sent_bytes = [], []
    for update in range(3):
        if update:
            for name, weight in base.items():
                lora_b = torch.randn(len(weight), 4, generator=generator) * 0.2
                lora_a = torch.randn(4, weight.shape[1], generator=generator) * 0.2
                adapted = AdaptedWeight(weight, lora_a, lora_b, 0.75)
                adapters.remember(name, adapted)
                with torch.no_grad():
                    model.get_parameter(name).copy_(merged_weight(*adapted))
            engine.policy_updated()
        old_bytes = engine.stats["weight_bytes"]
        answers.append(engine.generate(requests, SamplingParams(seed=1)))
        sent_bytes.append(engine.stats["weight_bytes"] - old_bytes)
        whole_engine = VLLMEngine(model, Servers(model, [address], tmp_path / "whole"), eos_token_ids=[EOS])
        expected = whole_engine.generate(requests, SamplingParams(seed=1))
        assert [c.ids for c in answers[-1]] == [c.ids for c in expected]
        for answer, expected_answer in zip(answers[-1], expected, strict=True):
            assert answer.logprobs == pytest.approx(expected_answer.logprobs, abs=1e-5)
    assert [c.ids for c in answers[0]] != [c.ids for c in answers[1]] != [c.ids for c in answers[2]]
    adapter_bytes = sum(4 * 4 * sum(weight.shape) for weight in base.values())
    max_header_bytes = 300 * 2 * len(names)
    assert adapter_bytes < sent_bytes[1] == sent_bytes[2] < adapter_bytes + max_header_bytes < sent_bytes[0]
    assert sent_bytes[0] == whole_engine.stats["weight_bytes"]
    engine.close()
    assert not (tmp_path / "weights").exists()


def test_a_failed_step_leaves_no_requests(in_process, model, monkeypatch):
    """vLLM would wait for their tokens for ever."""
    engine = VLLMEngine(model, in_process, eos_token_ids=[EOS])
    requests = [Request(PROMPTS[2], (), 3, 8), Request(PROMPTS[1], max_new_tokens=8)]
    expected = engine.generate(requests, SAMPLINGS[0])
    vllm_engine = in_process._llm.llm_engine

    def interrupt(*step):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(vllm_engine.engine_core.engine_core.scheduler, "update_from_output", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests, SAMPLINGS[0])
    assert not vllm_engine.has_unfinished_requests() and not vllm_engine.output_processor.parent_requests
    assert [c.ids for c in engine.generate(requests, SAMPLINGS[0])] == [c.ids for c in expected]


def test_suffix_rollouts_share_their_prefix(engine):
    prompt, prefix = PROMPTS[4][:50], PROMPTS[4][50:]
    old_stats = engine.stats
    split_answers = engine.generate([Request(prompt, prefix, 4, 10, sample_id=3)], SamplingParams(seed=1))
    counts = count_since(engine, old_stats)
    assert counts["cached_tokens"] == 3 * 64 and counts["prefill_tokens"] == 80 + 3 * 16
    assert counts["prompt_tokens"] == 320 and counts["forward_passes"] >= 10 and counts["preemptions"] == 0
    whole_answers = engine.generate([Request(PROMPTS[4], (), 4, 10, sample_id=3)], SamplingParams(seed=1))
    # a later turn draws other random numbers than the first
    assert [c.ids for c in split_answers] != [c.ids for c in whole_answers]
    requests = [Request(prompt, prefix, 1, 10), Request(PROMPTS[4], (), 1, 10)]
    split_answer, whole_answer = engine.generate(requests, GREEDY)
    assert split_answer.ids == whole_answer.ids


def test_the_models_limit(engine, model):
    prompt = PROMPTS[4] + PROMPTS[4][:45]  # 125 tokens
    requests = [Request(prompt, max_new_tokens=9), Request([*prompt, 1, 2, 3], num_generations=2, max_new_tokens=9),
                Request([1], max_new_tokens=0), Request([1], num_generations=0)]  # fmt: skip
    completions = engine.generate(requests, GREEDY)
    paged_completions = PagedEngine(model, eos_token_ids=[EOS], memory_bytes=MEMORY).generate(requests, GREEDY)
    assert list(map(vars, completions)) == list(map(vars, paged_completions))
    assert [len(c.ids) for c in completions] == [3, 0, 0, 0]


def test_stop_strings_end_answers_as_in_the_paged_engine(engine, model, tokenizer):
    answers = [generate_greedy(model, prompt, 30) for prompt in PROMPTS]
    texts = [tokenizer.decode(ids) for ids in answers]
    sampling = SamplingParams(temperature=0.0, stop=(texts[1][8:10], texts[2][12:14], texts[4][5:8]))
    requests = [Request(prompt, max_new_tokens=30) for prompt in PROMPTS]
    requests.append(Request(PROMPTS[1], answers[1][:9], max_new_tokens=20))  # a stop begins in the prefix
    paged = PagedEngine(model, eos_token_ids=[EOS], memory_bytes=MEMORY, tokenizer=tokenizer)
    expected = paged.generate(requests, sampling)
    assert [c.finish_reason for c in expected[1:3]] == ["stop", "stop"] and len(expected[-1].ids) == 1
    assert list(map(vars, engine.generate(requests, sampling))) == list(map(vars, expected))


def test_training(folder, tmp_path):
    """Check also the model that a run leaves behind: vLLM reads it, and gives Transformers' tokens."""
    rows = train(run_settings(folder, tmp_path), tmp_path / "run")
    assert max(row["rpo/prefix_share"] for row in rows[1:]) > 0  # of a single step cuts may leave nothing
    second_rows = train(run_settings(folder, tmp_path), tmp_path / "again")
    assert [row["reward"] for row in second_rows[1:]] == [row["reward"] for row in rows[1:]]

    from vllm import LLM
    from vllm import SamplingParams as Sampling

    exported = tmp_path / "run" / "model"
    llm = LLM(str(exported), dtype="float32", enforce_eager=True, kv_cache_memory_bytes=MEMORY, block_size=32)
    vllm_prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(vllm_prompts, Sampling(temperature=0, max_tokens=20), use_tqdm=False)
    model = load(exported)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [generate_greedy(model, p, 20) for p in PROMPTS]
    assert any(generate_greedy(model, p, 20) != generate_greedy(load(folder), p, 20) for p in PROMPTS)


@pytest.mark.parametrize("where", ["in_process", "server"])
def test_training_on_answers_in_turns_with_an_environment(where, folder, tmp_path, request):
    """The guessing game of the examples: hints are put between turns, and what vLLM drew is what is trained on."""
    settings = yaml.safe_load((ROOT / "examples" / "guessing_game.yaml").read_text())
    rollout = {"engine": "vllm", "prompts_per_step": 3, "num_generations": 8, "max_completion_length": 12}
    if where == "server":
        rollout |= {"vllm_server": request.getfixturevalue("address"), "stop": ["0", "1", "2", "3"]}
    settings["task"] |= {"numbers": 3, "max_turns": 2}
    settings |= {"max_steps": 3, "model": {"path": str(folder), "device": "cpu"}}
    settings["rollout"] = settings.get("rollout", {}) | rollout | {"memory_bytes": MEMORY}
    Trainer(load_config(settings), tmp_path / "run", console=Console(quiet=True)).run()
    rows = [row for row in read_metrics(tmp_path / "run") if "reward" in row]
    assert len(rows) == 3 and all(row["environment/failures"] == 0 for row in rows)
    assert max(row["environment/turns"] for row in rows) > 1
    assert all(row["completions/generated_length"] < row["completions/mean_length"] for row in rows)  # hints
    assert all(row["sampling/logp_difference/max"] < 1e-3 for row in rows)


@pytest.mark.parametrize(("where", "parallel"), [("servers", "ddp"), ("engines", "ddp"), ("engines", "fsdp2")])
def test_several_trainers_are_given_the_answers_of_one(folder, gloo, tmp_path, request, where, parallel):
    """Two servers answer, or an engine each, which must leave the connection of the two processes as it is."""
    servers = {"vllm_server": request.getfixturevalue("addresses")} if where == "servers" else {}
    settings = run_settings(folder, tmp_path, **servers)
    one_rows = train(settings, tmp_path / "one")
    assert max(row["rpo/prefix_share"] for row in one_rows[1:]) > 0  # of a single step cuts may leave nothing
    gloo.run_on_ranks(tmp_path, gloo.train, settings, tmp_path / "two", parallel)
    two_rows = read_metrics(tmp_path / "two")
    for name in ("reward", "tokens/generated"):
        assert [row[name] for row in two_rows[1:]] == [row[name] for row in one_rows[1:]]
    assert max(row["sampling/logp_difference/max"] for row in two_rows[1:]) < 1e-3
    assert servers or two_rows[-1]["total/weight_bytes"] == 2 * one_rows[-1]["total/weight_bytes"] > 0
    assert not list(tmp_path.glob("*/.vllm"))


def test_a_head_that_an_adapter_has_untied(folder, model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    model.config.tie_word_embeddings = False
    engine = VLLMEngine(model, InProcess(model, folder, memory_bytes=MEMORY), eos_token_ids=[EOS])
    answer = engine.generate([Request(PROMPTS[1], max_new_tokens=12)], SAMPLINGS[0])[0]
    assert answer.logprobs == pytest.approx(compute_logprobs(model, PROMPTS[1], answer.ids, SAMPLINGS[0]), abs=1e-4)


def test_logprobs_before_top_p_and_with_drafts(folder, model):
    """Raw ones, also of tokens that a draft had right."""
    backend = InProcess(model, folder, memory_bytes=MEMORY, logprobs_mode="raw_logprobs", longest_draft=8)
    engine = VLLMEngine(model, backend, eos_token_ids=[EOS])
    sampling = SAMPLINGS[2]
    assert sampling.top_p < 1 and vllm_logprobs_modes(sampling) == [backend.logprobs_mode]
    check_logprobs(engine, model, sampling)
    engine.drafter = Drafter(RolloutHistory(), max_tokens=8, pass_overhead=None)
    for prompt in PROMPTS:
        for answer in engine.generate([Request(prompt, list(range(8)), 3, 20)], sampling):
            engine.drafter.history.add(prompt, answer.response_ids)
    check_logprobs(engine, model, sampling)
    assert engine.stats["accepted_tokens"] > 0


def test_what_vllm_cannot_run_is_named(folder, tmp_path):
    settings = run_settings(folder, tmp_path, memory_bytes=1)
    with pytest.raises(UserError, match="vLLM cannot run the model"):
        Trainer(load_config(settings), tmp_path / "run")
