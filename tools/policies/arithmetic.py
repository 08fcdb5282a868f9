"""Makes the base policies of the arithmetic task: ``python -m tools.policies.arithmetic --size main --output DIR``.

Supervised learning on fresh sums, none of which is a prompt of the shipped task (seed 0), in three phases: short sums;
sums of all lengths; and sums of all lengths where in some answers one random step is wrong (a unit or a ten too many
or too few) and later steps build on it. The policy learns to slip as often, on short and long sums alike. Greedy
decoding stays right, sampled answers are right a little under half of the time: reinforcement learning has something
to unlearn that carries over to any sum. On one thread and processor the result depends on nothing but the seed.

``large`` is made on a GPU (``--device cuda``), for answers of 500 tokens: ``main`` and ``small`` ship with the package,
it does not. Its phases end after so many seconds at the latest, and as nobody has tuned it by hand it is measured at
the end: while too many or too few of its sampled answers are right, it learns on with another share of slips.
``tiny`` goes the same way in seconds, to try the way itself.
"""

import argparse
import json
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from python_trainer.data import Example
from python_trainer.tasks.arithmetic import (
    SIZES,
    TERMS,
    Variant,
    draw_examples,
    draw_terms,
    final_answer,
    prompt_of,
    solution,
)

PAD, START, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, EOS_ID = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES: dict[str, dict[str, float]] = {
    "main": {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2},
    "small": {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 3, "num_key_value_heads": 1},
    "large": {
        "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_hidden_layers": 8, "initializer_range": 0.02,
    },
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
}  # fmt: skip
BATCH = {"main": 64, "small": 64, "large": 256, "tiny": 4}  # examples a step
CHUNK_TOKENS = {"cpu": 1536, "cuda": 32768}  # in one forward and backward pass, padding included
SLIPS = (-10, -1, 1, 10)
RIGHT = (0.35, 0.65)  # share of its sampled answers that are to be right, where a policy is measured
FACTS = "pretrain.json"  # beside the weights of a policy that was measured: steps, seconds, accuracies


@dataclass(frozen=True)
class Part:
    """A share of the training examples."""

    share: float
    terms: dict[int, float]  # number of terms -> weight
    slip_share: float  # share of its answers with one wrong step, in the phase with slips


SHORT = [Part(1.0, TERMS["short"], 0.68)]
ALL = [
    Part(0.83, TERMS["short"], 0.68),
    Part(0.06, {n: 1.0 for n in range(11, 20)}, 0.55),  # joins the short and the long variant
    Part(0.11, TERMS["long"], 0.45),
]
UP_TO_LONGEST = [
    Part(0.60, TERMS["short"], 0.5),
    Part(0.10, {n: 1.0 for n in range(11, 20)}, 0.5),
    Part(0.10, TERMS["long"], 0.5),
    Part(0.08, {n: 1.0 for n in range(25, 40)}, 0.5),
    Part(0.12, TERMS["longest"], 0.5),
]


@dataclass(frozen=True)
class Stretch:
    """One stretch of training with its own optimizer state."""

    name: str
    steps: int
    lr: float  # of Muon; AdamW's is 0.7 of it
    decay: float  # share of the steps over which the learning rate falls to zero at the end
    seconds: float = math.inf  # time that counts as all steps; the rate falls with whichever is further
    warmup: int | None = None  # steps over which the rate rises; None: a tenth


@dataclass(frozen=True, kw_only=True)
class Phase(Stretch):
    """A stretch on sums."""

    mixture: list[Part]
    slips: bool  # whether some answers have a wrong step


@dataclass(frozen=True)
class Aim:
    """What a policy is measured on, and how often it learns on until as many answers are right as should be."""

    variant: Variant
    prompts: int  # of the test split that are answered for it
    rounds: int = 2  # of learning on, at most


PHASES = {
    "main": [
        Phase("short sums", 500, 4e-3, 0.0, mixture=SHORT, slips=False),
        Phase("all lengths", 400, 4e-3, 0.5, mixture=ALL, slips=False),
        Phase("slips", 200, 2e-3, 1.0, mixture=ALL, slips=True),
    ],
    "small": [
        Phase("short sums", 800, 6e-3, 0.0, mixture=SHORT, slips=False),
        Phase("all lengths", 600, 6e-3, 0.6, mixture=ALL, slips=False),
        Phase("slips", 400, 3e-3, 1.0, mixture=ALL, slips=True),
    ],
    "large": [
        Phase("short sums", 300, 2e-3, 0.0, 45, mixture=SHORT, slips=False),
        Phase("all lengths", 800, 2e-3, 0.5, 150, mixture=UP_TO_LONGEST, slips=False),
        Phase("slips", 200, 1e-3, 1.0, 40, mixture=UP_TO_LONGEST, slips=True),
    ],
    "tiny": [
        Phase("short sums", 2, 2e-3, 0.0, 10, mixture=SHORT, slips=False),
        Phase("slips", 1, 1e-3, 1.0, 10, mixture=ALL, slips=True),
    ],
}
AIMS = {"large": Aim("longest", 256), "tiny": Aim("short", 4, rounds=1)}


def byte_tokenizer() -> Qwen2Tokenizer:
    """Qwen2's byte-level BPE without merges: token i is byte i, then the three special tokens."""
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


def policy_of(shape: Mapping[str, float], pad_id: int = PAD_ID, eos_id: int = EOS_ID) -> Qwen2ForCausalLM:
    """A policy with random weights, float32, whose last token ends answers.

    Args:
        shape: fields of its configuration.
    """
    config = Qwen2Config(
        vocab_size=eos_id + 1,
        num_hidden_layers=3,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.04,
        pad_token_id=pad_id,
        eos_token_id=eos_id,
    )
    for name, value in shape.items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    return Qwen2ForCausalLM(config)


def new_policy(size: str) -> Qwen2ForCausalLM:
    """The same in one of the shapes above."""
    return policy_of(SHAPES[size])


@cache
def shipped(variant: Variant) -> list[list[Example]]:
    """Training, gate and test examples of the shipped task."""
    return draw_examples(variant, 0, tuple(SIZES.values()))


class Corpus(ABC):
    """Endless examples."""

    pad_id = PAD_ID

    @abstractmethod
    def example(self) -> tuple[list[int], int]:
        """Token ids, and how many of them are the prompt, which is not learnt."""

    def batch(self, size: int, chunk_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """``size`` examples as (ids, labels) chunks [B, T], sorted by length; labels: -100 on prompt and padding."""
        examples = sorted((self.example() for _ in range(size)), key=lambda e: len(e[0]), reverse=True)
        while examples:
            longest = len(examples[0][0])
            chunk, examples = examples[: chunk_tokens // longest], examples[chunk_tokens // longest :]
            ids = torch.full((len(chunk), longest), self.pad_id)
            labels = torch.full((len(chunk), longest), -100)
            for row, (tokens, prompt_len) in enumerate(chunk):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                labels[row, prompt_len : len(tokens)] = ids[row, prompt_len : len(tokens)]
            yield ids, labels


class Sums(Corpus):
    """Sums that are no prompt of the shipped task."""

    def __init__(self, seed: int, phase: Phase):
        self.rng = random.Random(f"pretrain/{seed}/{phase.name}")
        self.phase = phase
        self.held_out = {example.prompt for variant in TERMS for split in shipped(variant) for example in split}

    def example(self) -> tuple[list[int], int]:
        while True:
            (part,) = self.rng.choices(self.phase.mixture, [part.share for part in self.phase.mixture])
            terms = draw_terms(self.rng, part.terms)
            prompt = prompt_of(terms)
            if prompt not in self.held_out:
                break
        slips = self.phase.slips and self.rng.random() < part.slip_share
        slip_step = self.rng.randrange(len(terms) - 1) if slips else None
        answer = solution(terms, slip_step, self.rng.choice(SLIPS))
        return [*(prompt + answer).encode(), EOS_ID], len(prompt)


def learn(policy: Qwen2ForCausalLM, chunks: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Gradient of the mean next-token loss over all answer tokens; returns that loss, on the policy's device.

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
    """Muon on the weight matrices, AdamW on the rest; in as many steps it gets several times lower than AdamW alone.

    Returns the steps made: fewer than those of the phase where its time was up.
    """
    start, chunk_tokens = time.monotonic(), chunk_tokens or CHUNK_TOKENS[policy.device.type]
    parameters = dict(policy.named_parameters())
    matrices = [name for name, p in parameters.items() if p.ndim == 2 and "embed" not in name]
    muon = torch.optim.Muon(
        [parameters.pop(name) for name in matrices], lr=phase.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(parameters.values(), lr=0.7 * phase.lr, betas=(0.9, 0.98), weight_decay=0.0)
    warmup = phase.steps // 10 if phase.warmup is None else phase.warmup

    def spent() -> float:
        """Share of the phase's time."""
        return (time.monotonic() - start) / phase.seconds

    def scale(step: int) -> float:
        done = max(step, phase.steps * spent())
        left = (phase.steps - done) / max(1.0, phase.decay * phase.steps)
        return max(0.0, min(1.0, (done + 1) / max(1, warmup), left))

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


def right_answers(policy: Qwen2ForCausalLM, variant: Variant, prompts: int) -> dict[str, float]:
    """Share of the first test prompts of the shipped task that are answered right, one answer each.

    Returns:
        ``sampled``: at temperature 1; ``greedy``.
    """
    from python_trainer.rollout import PagedEngine, Request, SamplingParams  # the trainer's engine, slow to import

    *_, test = shipped(variant)
    asked = [str(example.prompt) for example in test[:prompts]]
    longest = max(len(solution([int(term) for term in prompt[:-1].split("+")])) for prompt in asked) + 2
    engine = PagedEngine(policy, eos_token_ids=EOS_ID)
    requests = [Request([*prompt.encode()], sample_id=i, max_new_tokens=longest) for i, prompt in enumerate(asked)]
    found = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        right = 0
        for example, answer in zip(test, engine.generate(requests, SamplingParams(temperature=temperature))):
            text = bytes(token for token in answer.ids if token < PAD_ID).decode(errors="replace")
            right += answer.finish_reason == "stop" and final_answer(text) == example.columns["answer"]
        found[name] = right / len(asked)
    return found


def settle(policy: Qwen2ForCausalLM, phase: Phase, aim: Aim, seed: int, batch: int) -> list[dict[str, float]]:
    """Learns on with other shares of slips until as many sampled answers are right as they should.

    Args:
        phase: the last one, with slips.

    Returns:
        What was measured each time: ``sampled`` and ``greedy`` accuracy, ``slip_share`` of the phase before.
    """
    found, (low, high) = [], RIGHT
    for number in range(aim.rounds + 1):
        right = right_answers(policy, aim.variant, aim.prompts)
        found.append({**right, "slip_share": phase.mixture[-1].slip_share})
        shares = ", ".join(f"{share:.1%} {name}" for name, share in right.items())
        print(f"right answers, {aim.variant} sums: {shares}", flush=True)
        if low <= right["sampled"] <= high or number == aim.rounds:
            break
        # as if (1 - slip share) x what else is right had been measured
        factor = (low + high) / 2 / max(right["sampled"], 0.05)
        mixture = [replace(p, slip_share=min(max(1 - (1 - p.slip_share) * factor, 0.0), 0.9)) for p in phase.mixture]
        phase = replace(phase, name=f"slips, round {number + 2}", mixture=mixture)
        train(policy, phase, Sums(seed, phase), batch)
    return found


def save(policy: Qwen2ForCausalLM, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Weights in bfloat16, config, generation config and tokenizer, that of bytes where none is given."""
    ends = {"pad_token_id": policy.config.pad_token_id, "eos_token_id": policy.config.eos_token_id}
    policy.generation_config = GenerationConfig(do_sample=True, **ends)
    policy.bfloat16().save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="main")
    parser.add_argument("--output", type=Path, required=True, help="folder for the policy, Hugging Face format")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="more or fewer steps in every phase")
    parser.add_argument("--batch", type=int, help="examples a step (default: 64; large: 256)")
    parser.add_argument("--device", choices=CHUNK_TOKENS, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    start, batch = time.monotonic(), args.batch or BATCH[args.size]
    torch.manual_seed(args.seed)
    policy = new_policy(args.size).to(args.device)
    if args.device == "cpu":
        torch.set_num_threads(1)
        # bfloat16 products inside float32 training: about four times as fast on processors that have them
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
        policy.set_attn_implementation("eager")  # on a CPU twice as fast as sdpa with sequences this short
    steps, phases = {}, [replace(p, steps=max(1, round(p.steps * args.steps_scale))) for p in PHASES[args.size]]
    for phase in phases:
        steps[phase.name] = train(policy, phase, Sums(args.seed, phase), batch)
    if args.size not in AIMS:
        save(policy, args.output)
        return
    settled = settle(policy, phases[-1], AIMS[args.size], args.seed, batch)
    facts = {"size": args.size, "parameters": policy.num_parameters(), "steps": steps, "batch": batch,
             "settled": settled, "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
    save(policy, args.output)
    (args.output / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
