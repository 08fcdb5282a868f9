"""A decode pass and a micro-batch of a bfloat16 model in the shape of Qwen2.5-0.5B, with random weights.

Runs with plain torch, with all of our Triton kernels, and with the choice of ``auto`` after the proof. Each is compared
with the same model in float32, timed, and profiled.
"""

import copy
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from python_trainer.data import Request, Rollout
from python_trainer.model.packing import pack_rollouts
from python_trainer.model.policy import Policy
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.paged.engine import PagedEngine
from rlkernels.proof.worker import finding, seconds_of, synchronize

Message = dict[str, Any]
NUM_GENERATIONS = 8
JUDGED_PROMPTS = 2  # whose samples are compared with float32
MIN_ALLOWED_ERROR = 1e-3  # error always allowed: log-probabilities in nats, gradients relative to their norm
PROFILED_ROWS = 20


@dataclass(frozen=True)
class Size:
    """Sizes of the model and its inputs; the dry run has smaller ones."""

    config: dict[str, Any]
    prompts: int  # of decoding
    prompt: int  # tokens
    few: int  # tokens of a short answer, whose time is subtracted from that of a long one
    more: int  # tokens of a long answer
    groups: int  # of a micro-batch
    answer: int  # tokens
    repeats: int


QWEN = Size(
    {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
     "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6},
    prompts=32, prompt=256, few=8, more=40, groups=4, answer=480, repeats=3,
)  # fmt: skip
TINY = Size(
    {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6},
    prompts=1, prompt=5, few=1, more=3, groups=1, answer=4, repeats=1,
)  # fmt: skip


def make_model(size: Size, device: torch.device) -> Qwen2ForCausalLM:
    """Make a model in evaluation mode. Larger attention weights make attention matter as in a trained model."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen2Config(**size.config, tie_word_embeddings=True, rope_parameters=rope, bos_token_id=None,
                         eos_token_id=None)  # fmt: skip
    with device:
        model: Any = Qwen2ForCausalLM(config)
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(layer.self_attn, name).weight.mul_(3)
    return model.eval()


def tokens(size: Size, count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, size.config["vocab_size"], (count, length), generator=generator).tolist()


@contextmanager
def backend(who: str) -> Iterator[None]:
    """Set ``RLKERNELS_BACKEND`` to ``who``."""
    with patch.dict(os.environ, {"RLKERNELS_BACKEND": who}):
        yield


def sequence_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities of the answer's tokens, float32 [len(answer)]."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    logits = model(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def logprob_error(logprobs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return (torch.cat(list(logprobs)).double() - torch.cat(list(expected)).double()).abs().mean().item()


def gradients(model: Any) -> list[torch.Tensor]:
    """Return the gradients of all parameters, float32, and remove them from the model."""
    grads = [p.grad.float() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return grads


def gradient_error(grads: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference over the norm of ``expected``."""
    difference = sum((a - b).square().sum() for a, b in zip(grads, expected))
    return torch.as_tensor(difference / sum(b.square().sum() for b in expected)).sqrt().item()


def verdict(errors: Sequence[float], plain: Sequence[float]) -> Message:
    """Allow twice the error of plain Transformers in bfloat16 for each error; report the one closest to its limit."""
    bounds = [(error, 2 * p + MIN_ALLOWED_ERROR) for error, p in zip(errors, plain)]
    comparison = finding(max(bounds, key=lambda bound: (not bound[0] <= bound[1], bound[0] / bound[1])))  # NaN is worst
    return {"ok": comparison["right"], "error": comparison["error"], "allowed": comparison["allowed"]}


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Return the peak memory of tensors during the call; None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def profiled(call: Callable[[], Any], device: torch.device) -> Message:
    """Profile a call: return the slowest rows and the number of kernel launches."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds) as profiler:
        call()
        synchronize(device)
    rows = list(profiler.key_averages())
    launches = sum(row.count for row in rows if "LaunchKernel" in row.key)
    rows.sort(key=lambda row: (row.self_device_time_total, row.self_cpu_time_total), reverse=True)
    listed = [
        {"name": row.key[:90], "device_ms": round(row.self_device_time_total / 1e3, 3),
         "host_ms": round(row.self_cpu_time_total / 1e3, 3), "calls": row.count}
        for row in rows[:PROFILED_ROWS]
    ]  # fmt: skip
    return {"launches": launches, "profile": listed}


def decode(size: Size, device: torch.device) -> Message:
    """Measure a decode pass, which adds a token to each sequence."""
    model = make_model(size, device)
    prompts = tokens(size, size.prompts, size.prompt, seed=1)
    shape = size.config
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    token_bytes = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim
    cache_bytes = 2 * size.prompts * NUM_GENERATIONS * (size.prompt + size.more + 16) * token_bytes
    engine = PagedEngine(
        model, eos_token_ids=(), max_sequences=size.prompts * NUM_GENERATIONS, memory_bytes=cache_bytes
    )

    def generate(length: int) -> list[Any]:
        engine.policy_updated()  # so that no prompt is cached
        requests = [
            Request(ids, num_generations=NUM_GENERATIONS, max_new_tokens=length, sample_id=NUM_GENERATIONS * i)
            for i, ids in enumerate(prompts)
        ]
        with torch.no_grad():
            return engine.generate(requests, SamplingParams(seed=1))

    answers = generate(size.more)[: min(JUDGED_PROMPTS, size.prompts) * NUM_GENERATIONS]
    with torch.no_grad():
        pairs = [(prompts[i // NUM_GENERATIONS], answer.ids) for i, answer in enumerate(answers)]
        plain = [sequence_logprobs(model, *pair) for pair in pairs]
        float32_model = copy.deepcopy(model).float()
        exact = [sequence_logprobs(float32_model, *pair) for pair in pairs]
        del float32_model
    logprobs = [torch.tensor(answer.logprobs, device=device) for answer in answers]
    row = verdict([logprob_error(logprobs, exact)], [logprob_error(plain, exact)])
    if not row["ok"]:
        return row
    short_s, long_s = (
        statistics.median(seconds_of(partial(generate, n), 1, device) for _ in range(size.repeats))
        for n in (size.few, size.more)
    )
    pass_s = (long_s - short_s) / (size.more - size.few)
    sequences = size.prompts * NUM_GENERATIONS
    return row | {
        "median_s": pass_s, "tokens_per_s": sequences / pass_s, "whole_s": long_s,
        "what": f"{sequences} sequences of {size.prompt} to {size.prompt + size.more} tokens",
        "peak_bytes": peak_bytes(lambda: generate(size.few), device), **profiled(lambda: generate(size.few), device),
    }  # fmt: skip


def make_policy(model: Qwen2ForCausalLM) -> Policy:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<eos>": 0}, unk_token="<eos>")), eos_token="<eos>"
    )
    return Policy(model, tokenizer, name="random weights")


def train(size: Size, device: torch.device) -> Message:
    """Measure forward and backward of a packed micro-batch, from token ids to the gradients of all weights."""
    model = make_model(size, device)
    policy = make_policy(model)

    def answers(groups: int) -> list[Rollout]:
        prompts = tokens(size, groups, size.prompt, seed=2)
        texts = tokens(size, groups * NUM_GENERATIONS, size.answer, seed=3)
        return [Rollout(prompts[i // NUM_GENERATIONS], text) for i, text in enumerate(texts)]

    def learn(rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return log-probabilities [B, L]; leave the gradients of their mean in the model."""
        packed = pack_rollouts(rollouts, range(len(rollouts)), device=device)
        with policy.packed_attention():
            logprobs, *_ = policy.token_logprobs(packed, 1.0)
            logprobs.sum().div(packed.mask.sum()).backward()
        return logprobs.detach()[torch.tensor(packed.samples, device=device).argsort()]

    def one_by_one(model: Any, rollouts: Sequence[Rollout]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        sequences = []
        for answer in rollouts:
            logprobs = sequence_logprobs(model, answer.prompt_ids, answer.response_ids)
            logprobs.sum().div(len(rollouts) * size.answer).backward()
            sequences.append(logprobs.detach())
        return sequences, gradients(model)

    judged = answers(min(JUDGED_PROMPTS, size.groups))
    logprobs, grads = list(learn(judged)), gradients(model)
    plain, plain_grads = one_by_one(model, judged)
    exact, exact_grads = one_by_one(copy.deepcopy(model).float(), judged)
    row = verdict(
        [logprob_error(logprobs, exact), gradient_error(grads, exact_grads)],
        [logprob_error(plain, exact), gradient_error(plain_grads, exact_grads)],
    )
    del grads, plain_grads, exact_grads
    if not row["ok"]:
        return row

    micro_batch = answers(size.groups)

    def step() -> None:
        learn(micro_batch)
        model.zero_grad(set_to_none=True)

    peak = peak_bytes(step, device)
    step_s = statistics.median(seconds_of(step, 1, device) for _ in range(size.repeats))
    num_tokens = size.groups * (size.prompt + NUM_GENERATIONS * (size.answer - 1))
    return row | {
        "median_s": step_s, "tokens_per_s": num_tokens / step_s, "peak_bytes": peak,
        "what": f"{size.groups} prompts of {size.prompt}, {NUM_GENERATIONS} answers of {size.answer} each",
        **profiled(step, device),
    }  # fmt: skip


PARTS = {"decode": decode, "train": train}


def measure(part: str, who: str, device: torch.device) -> Message:
    """Return the row of a job of the worker."""
    with backend(who):
        return {"dtype": "bfloat16"} | PARTS[part](QWEN if device.type == "cuda" else TINY, device)
