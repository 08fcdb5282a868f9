"""Memory of an update: the plan of ``train --dry-run``, against the high-water mark of a process."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from bench import Measurement, Row
from bench._runner import reset_resident_peak, resident_peak
from python_trainer.config import load_config
from python_trainer.data import Rollout
from python_trainer.loop.learner import Learner
from python_trainer.loop.memory import Device, plan_memory
from python_trainer.model.policy import load_policy

PROMPTS = 4
NUM_GENERATIONS = 8
PROMPT_TOKENS = 24


@dataclass(frozen=True)
class Size:
    """A Qwen2 of this shape, and the sizes of its training batch."""

    name: str
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    answer: int  # tokens
    micro_batch: int  # tokens


TINY = Size("tiny", 512, 128, 384, 4, 4, 2, answer=120, micro_batch=2048)  # trained by the fused passes
WIDE = Size("wide vocabulary", 49_152, 256, 768, 4, 4, 2, answer=104, micro_batch=1700)  # logits come in blocks
MIDDLING = Size("middling", 8192, 768, 2048, 10, 12, 4, answer=52, micro_batch=900)  # 69 million: too many to fuse
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, recomputed": {"gradient_checkpointing": True},
    "bfloat16, masters": {"dtype": "bfloat16"},
    "bfloat16, recomputed": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "LoRA": {"lora": {"r": 8}},
    "LoRA, recomputed": {"lora": {"r": 8}, "gradient_checkpointing": True},
}


def make_folder(size: Size, folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = WordLevel({"<eos>": 0, "a": 1}, unk_token="<eos>")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="<eos>").save_pretrained(folder)


def settings(size: Size, folder: Path, kind: str) -> dict[str, Any]:
    return {
        "model": {"path": str(folder), "device": "cpu", "gradient_checkpointing": False, **KINDS[kind]},
        "rollout": {
            "prompts_per_step": PROMPTS, "num_generations": NUM_GENERATIONS, "max_completion_length": size.answer,
        },
        "optimizer": {"micro_batch_tokens": size.micro_batch},
    }  # fmt: skip


def plan_bytes(values: dict[str, Any]) -> int:
    """Return the planned bytes of an update without the KV cache, which :func:`update` does not have."""
    plan = plan_memory(load_config(values), Device("cpu", 1 << 40), prompt=PROMPT_TOKENS)
    return max(plan.phases["the update"], plan.phases["the optimizer step"]) - plan.parts["KV cache"]


def measure_bytes(runs: Sequence[dict[str, Any]]) -> list[int]:
    """Return the measured bytes of an update with each of these settings, one after the other in a new process."""
    # malloc returns freed memory to the system at once: else the high-water mark would include its pools
    variables = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "bench.memory", json.dumps(runs)],
        env=os.environ | variables, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False,
    )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"the measured process failed: {process.stderr[-2000:]}")
    return [int(word) for word in process.stdout.split()[-len(runs) :]]


def update(values: dict[str, Any], num_updates: int = 2) -> int:
    """Load the policy, make updates, and return the peak memory of the last above that before loading."""
    config = load_config(values)
    gc.collect()
    resident_bytes = reset_resident_peak()
    assert resident_bytes is not None, "this machine lacks /proc/self/clear_refs"
    learner = Learner(load_policy(config.model), config)
    generator = torch.Generator().manual_seed(0)
    vocab = learner.policy.model.config.vocab_size
    rollouts = []
    for group in range(PROMPTS):
        prompt = torch.randint(1, vocab, (PROMPT_TOKENS,), generator=generator).tolist()
        for sample in range(NUM_GENERATIONS):
            answer = torch.randint(1, vocab, (config.rollout.max_completion_length,), generator=generator).tolist()
            rollouts.append(Rollout(prompt, answer, 0, [-1.0] * len(answer), group=group, reward=float(sample % 2)))
    for number in range(1, num_updates + 1):  # the first update allocates the moments
        reset_resident_peak()
        learner.update(rollouts, number)
    return resident_peak() - resident_bytes


def rows(size: Size) -> Iterator[Row]:
    """Give a row for each kind of training."""
    kinds = [kind for kind, model in KINDS.items() if "lora" not in model or find_spec("peft")]
    with TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        make_folder(size, folder)
        runs = [settings(size, folder, kind) for kind in kinds]
        planned = dict(zip(kinds, map(plan_bytes, runs)))
        measured = dict(zip(kinds, measure_bytes(runs)))
    for kind, model in KINDS.items():
        row = Row("plan", "python_trainer", f"{size.name}, {kind}", dtype=model.get("dtype", "float32"))
        if kind in kinds:
            row.peak_bytes = measured[kind]
            row.extra = f"told {planned[kind] / 1e6:.0f} MB: {planned[kind] / measured[kind]:.2f} of it"
        else:
            row.missing = "PEFT is not installed; pip install peft"
        yield row


def cases(quick: bool) -> Iterator[Measurement]:
    for size in (TINY,) if quick else (TINY, WIDE, MIDDLING):
        yield Measurement([f"{size.name}, {kind}" for kind in KINDS], partial(rows, size))


if __name__ == "__main__":
    for values in json.loads(sys.argv[1]):
        update(values, 1)  # warm-up: loads libraries, starts threads, compiles products of each shape
        print(update(values))
