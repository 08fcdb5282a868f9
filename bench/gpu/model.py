"""A decode pass and a micro-batch of a bfloat16 model of the shape of Qwen2.5-0.5B, weights at random, made in place.

With plain torch, with our Triton kernels wherever there is one, and with what ``auto`` takes after the proof. Each is
judged against the same model in float32, measured, and profiled.
"""

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from python_trainer.data import Request, Rollout
from python_trainer.model.packing import pack
from python_trainer.model.policy import Policy
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.paged.engine import PagedEngine

Message = dict[str, Any]
SAMPLES = 8  # of each prompt
JUDGED = 2  # prompts whose samples are held against float32
FLOOR = 1e-3  # of log-probabilities in nats, and of gradients relative to their norm
PROFILED_ROWS = 20


@dataclass(frozen=True)
class Size:
    """The model and what it is given; the dry run has one of its own."""

    config: dict[str, Any]
    prompts: int  # of decoding
    prompt: int  # tokens
    few: int  # tokens of an answer: prefill and few passes, taken off the time of more
    more: int
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
    """In evaluation mode. Attention weighs more than new weights give it: as in a trained model, it has to matter."""
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
    """``who`` is what ``RLKERNELS_BACKEND`` holds."""
    with patch.dict(os.environ, {"RLKERNELS_BACKEND": who}):
        yield


def sequence_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of the answer's tokens, float32 [len(answer)]."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    logits = model(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def logprob_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    return (torch.cat(list(found)).double() - torch.cat(list(exact)).double()).abs().mean().item()


def gradients(model: Any) -> list[torch.Tensor]:
    """Return the gradients of all parameters, float32, and take them out of the model."""
    out = [p.grad.float() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return out


def gradient_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    difference = sum((a - b).square().sum() for a, b in zip(found, exact))
    return torch.as_tensor(difference / sum(b.square().sum() for b in exact)).sqrt().item()


def verdict(errors: Sequence[float], plain: Sequence[float]) -> Message:
    """At most twice the error of plain Transformers in bfloat16, each; the one closest to failing is reported."""
    allowed = [2 * p + FLOOR for p in plain]
    error, limit = max(zip(errors, allowed), key=lambda pair: pair[0] / pair[1] if pair[0] == pair[0] else float("inf"))
    fine = all(e <= a for e, a in zip(errors, allowed))  # NaN is not
    return {"ok": fine, "error": error if error == error else None, "allowed": limit}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """The most memory that tensors took during the call, all together; None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def profiled(call: Callable[[], Any], device: torch.device) -> Message:
    """Return where the time goes: the slowest rows, and how many kernels were launched."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds) as found:
        call()
        synchronize(device)
    rows = list(found.key_averages())
    launches = sum(row.count for row in rows if "LaunchKernel" in row.key)
    rows.sort(key=lambda row: (row.self_device_time_total, row.self_cpu_time_total), reverse=True)
    listed = [
        {"name": row.key[:90], "device_ms": round(row.self_device_time_total / 1e3, 3),
         "host_ms": round(row.self_cpu_time_total / 1e3, 3), "calls": row.count}
        for row in rows[:PROFILED_ROWS]
    ]  # fmt: skip
    return {"launches": launches, "profile": listed}


def decode(size: Size, device: torch.device) -> Message:
    """A pass over all sequences, each of which gets a token."""
    model = make_model(size, device)
    prompts = tokens(size, size.prompts, size.prompt, seed=1)
    shape = size.config
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    token_bytes = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim
    room = 2 * size.prompts * SAMPLES * (size.prompt + size.more + 16) * token_bytes
    engine = PagedEngine(model, eos_token_ids=(), max_sequences=size.prompts * SAMPLES, memory_bytes=room)

    def generate(length: int) -> list[Any]:
        engine.policy_updated()  # prompts are computed anew
        requests = [
            Request(ids, num_generations=SAMPLES, max_new_tokens=length, sample_id=SAMPLES * i)
            for i, ids in enumerate(prompts)
        ]
        with torch.no_grad():
            return engine.generate(requests, SamplingParams(seed=1))

    answers = generate(size.more)[: min(JUDGED, size.prompts) * SAMPLES]
    with torch.no_grad():
        pairs = [(prompts[i // SAMPLES], answer.ids) for i, answer in enumerate(answers)]
        plain = [sequence_logprobs(model, *pair) for pair in pairs]
        wide = copy.deepcopy(model).float()
        exact = [sequence_logprobs(wide, *pair) for pair in pairs]
        del wide
    found = [torch.tensor(answer.logprobs, device=device) for answer in answers]
    row = verdict([logprob_error(found, exact)], [logprob_error(plain, exact)])
    if not row["ok"]:
        return row
    few, more = (
        statistics.median(seconds(lambda n=n: generate(n), device) for _ in range(size.repeats))  # type: ignore[misc]
        for n in (size.few, size.more)
    )
    each = (more - few) / (size.more - size.few)
    sequences = size.prompts * SAMPLES
    return row | {
        "median_s": each, "tokens_per_s": sequences / each, "whole_s": more,
        "what": f"{sequences} sequences of {size.prompt} to {size.prompt + size.more} tokens",
        "peak_bytes": peak_bytes(lambda: generate(size.few), device), **profiled(lambda: generate(size.few), device),
    }  # fmt: skip


def make_policy(model: Qwen2ForCausalLM) -> Policy:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<eos>": 0}, unk_token="<eos>")), eos_token="<eos>"
    )
    return Policy(model, tokenizer, name="random weights")


def train(size: Size, device: torch.device) -> Message:
    """Forward and backward over a packed micro-batch, from token ids to the gradients of all weights."""
    model = make_model(size, device)
    policy = make_policy(model)

    def answers(groups: int) -> list[Rollout]:
        prompts = tokens(size, groups, size.prompt, seed=2)
        texts = tokens(size, groups * SAMPLES, size.answer, seed=3)
        return [Rollout(prompts[i // SAMPLES], text) for i, text in enumerate(texts)]

    def learn(given: Sequence[Rollout]) -> torch.Tensor:
        """-> log-probabilities [B, L]; the gradients of their mean are in the model."""
        packed = pack(given, range(len(given)), device=device)
        with policy.packed_attention():
            logprobs, *_ = policy.score(packed, 1.0)
            logprobs.sum().div(packed.mask.sum()).backward()
        return logprobs.detach()[torch.tensor(packed.samples, device=device).argsort()]

    def one_by_one(model: Any, given: Sequence[Rollout]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        found = []
        for answer in given:
            logprobs = sequence_logprobs(model, answer.prompt_ids, answer.response_ids)
            logprobs.sum().div(len(given) * size.answer).backward()
            found.append(logprobs.detach())
        return found, gradients(model)

    few = answers(min(JUDGED, size.groups))
    ours, own_gradients = list(learn(few)), gradients(model)
    plain, plain_gradients = one_by_one(model, few)
    exact, exact_gradients = one_by_one(copy.deepcopy(model).float(), few)
    row = verdict(
        [logprob_error(ours, exact), gradient_error(own_gradients, exact_gradients)],
        [logprob_error(plain, exact), gradient_error(plain_gradients, exact_gradients)],
    )
    del own_gradients, plain_gradients, exact_gradients
    if not row["ok"]:
        return row

    many = answers(size.groups)

    def step() -> None:
        learn(many)
        model.zero_grad(set_to_none=True)

    peak = peak_bytes(step, device)
    taken = statistics.median(seconds(step, device) for _ in range(size.repeats))
    count = size.groups * (size.prompt + SAMPLES * (size.answer - 1))
    return row | {
        "median_s": taken, "tokens_per_s": count / taken, "peak_bytes": peak,
        "what": f"{size.groups} prompts of {size.prompt}, {SAMPLES} answers of {size.answer} each",
        **profiled(step, device),
    }  # fmt: skip


PARTS = {"decode": decode, "train": train}


def run(part: str, who: str, device: torch.device, without: Sequence[Sequence[str]], say: Callable[[Message], None]
        ) -> Message:  # fmt: skip
    """A job of the worker: one row."""
    if without:
        return {"ok": True}
    say({"begin": who})
    row: Message = {"op": part, "provider": who, "shape": who, "dtype": "bfloat16", "device": str(device)}
    try:
        with backend(who):
            row |= PARTS[part](QWEN if device.type == "cuda" else TINY, device)
    except (RuntimeError, ValueError) as error:
        row |= {"ok": False, "missing": f"{type(error).__name__}: {error}"[:300]}
        synchronize(device)  # raises where the device is broken
    say({"row": row})
    return {"ok": True}
