"""Supervised training of small base policies: tokenizer, shapes, corpus, optimizer loop, saving."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, START, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, EOS_ID = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES: dict[str, dict[str, float]] = {
    "medium": {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2},
    "small": {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 3, "num_key_value_heads": 1},
    "large": {
        "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_hidden_layers": 8, "initializer_range": 0.02,
    },
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
}  # fmt: skip
CHUNK_TOKENS = {"cpu": 1536, "cuda": 32768}  # in one forward and backward pass, padding included


@dataclass(frozen=True)
class Stretch:
    """One stretch of training with its own optimizer state."""

    name: str
    steps: int
    lr: float  # of Muon; AdamW's is 0.7 of it
    decay: float  # share of the steps over which the learning rate falls to zero at the end
    seconds: float = math.inf  # time that counts as all steps; the rate falls with whichever is further


def byte_tokenizer() -> Qwen2Tokenizer:
    """Make Qwen2's byte-level BPE without merges: token i is byte i, then the three special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]  # shown as code points from 256 on, as in GPT-2
    vocab = {chr(b) if b in printable else chr(256 + others.index(b)): b for b in range(256)}
    return Qwen2Tokenizer(
        vocab=vocab | {PAD: PAD_ID, START: START_ID, EOS: EOS_ID},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # every byte is a token
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def new_policy(size: str) -> Qwen2ForCausalLM:
    """Return a policy in one of the shapes above, with random weights, float32, whose last token ends answers."""
    config = Qwen2Config(
        vocab_size=EOS_ID + 1,
        num_hidden_layers=3,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.04,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    )
    for name, value in SHAPES[size].items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    return Qwen2ForCausalLM(config)


class Corpus(ABC):
    """Endless examples."""

    @abstractmethod
    def example(self) -> tuple[list[int], int]:
        """Return token ids, and how many of them are the prompt, which is not learnt."""

    def batch(self, size: int, chunk_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw ``size`` examples as (ids, labels) chunks [B, T], by length; labels: -100 on prompt and padding."""
        examples = sorted((self.example() for _ in range(size)), key=lambda e: len(e[0]), reverse=True)
        while examples:
            longest = len(examples[0][0])
            chunk, examples = examples[: chunk_tokens // longest], examples[chunk_tokens // longest :]
            ids = torch.full((len(chunk), longest), PAD_ID)
            labels = torch.full((len(chunk), longest), -100)
            for row, (tokens, prompt_len) in enumerate(chunk):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                labels[row, prompt_len : len(tokens)] = ids[row, prompt_len : len(tokens)]
            yield ids, labels


def learn(policy: Qwen2ForCausalLM, chunks: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add the gradient of the mean next-token loss over all answer tokens; return that loss, on the policy's device.

    On a GPU in bfloat16 where autocast says so, with float32 weights.
    """
    tokens, device = sum(int((labels >= 0).sum()) for _, labels in chunks), policy.device
    total = torch.zeros((), device=device)
    for ids, labels in chunks:
        ids, labels = ids.to(device), labels.to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            logits = policy(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T - 1, V]
        losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels[:, 1:], reduction="none")
        loss = losses.sum() / tokens
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    return total


def train(policy: Qwen2ForCausalLM, phase: Stretch, corpus: Corpus, batch: int, chunk_tokens: int | None = None) -> int:
    """Train with Muon on matrices and AdamW on the rest, which reaches a several times lower loss than AdamW alone.

    Returns the steps made: fewer than those of the phase where its time was up.
    """
    start, chunk_tokens = time.monotonic(), chunk_tokens or CHUNK_TOKENS[policy.device.type]
    parameters = dict(policy.named_parameters())
    matrices = [name for name, p in parameters.items() if p.ndim == 2 and "embed" not in name]
    muon = torch.optim.Muon(
        [parameters.pop(name) for name in matrices], lr=phase.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(parameters.values(), lr=0.7 * phase.lr, betas=(0.9, 0.98), weight_decay=0.0)
    warmup = max(1, phase.steps // 10)  # steps over which the rate rises

    def spent() -> float:
        """Return the share of the phase's time."""
        return (time.monotonic() - start) / phase.seconds

    def scale(step: int) -> float:
        done = max(step, phase.steps * spent())
        left = (phase.steps - done) / max(1.0, phase.decay * phase.steps)
        return max(0.0, min(1.0, (done + 1) / warmup, left))

    optimizers = [muon, adamw]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, scale) for optimizer in optimizers]
    timers = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *timers) as progress:
        bar = progress.add_task(phase.name, total=phase.steps)
        for step in range(phase.steps):
            if spent() >= 1:
                return step
            loss = learn(policy, list(corpus.batch(batch, chunk_tokens)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
            progress.update(bar, advance=1)
            if step % 10 == 0 or step == phase.steps - 1:  # reading it waits for a GPU
                progress.update(bar, description=f"{phase.name}, loss {float(loss):.4f}")
    return phase.steps


def save(policy: Qwen2ForCausalLM, folder: Path) -> None:
    """Write weights in bfloat16, config, generation config, and the tokenizer of bytes."""
    ends = {"pad_token_id": policy.config.pad_token_id, "eos_token_id": policy.config.eos_token_id}
    policy.generation_config = GenerationConfig(do_sample=True, **ends)
    policy.bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
