"""Updates and whole steps of TRL's GRPOTrainer: what samples begin with is computed for each of them, or once.

An update is the forward and backward pass of a batch in micro-batches, without the optimizer, on a random Llama with
the vocabulary of SmolLM2. On a CPU TRL applies the output layer to prompts too; the arm "head on answers" does not, as
TRL on a GPU: it is the fair rival. "No padding" packs answers, each with its own copy of the prompt. "Two levels"
shares equal prompts alone, in batches that share more: a system prompt, or turns of which each is a sample behind those
before it, without what was thought there. The gradient's norm is compared. A whole step also generates, with
Transformers, and takes the optimizer's step.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.utils.rnn import pad_sequence

from bench import Case, Missing
from python_trainer.hub import policy_folder

VOCAB = 49152
# prompt, longest answer, answers, answers of a micro-batch
GRID = [(64, 128, 8, 8), (256, 128, 8, 8), (1024, 128, 8, 8), (256, 128, 2, 2), (64, 512, 8, 8)]
MICRO_BATCHES = [(256, 128, 8, size) for size in (1, 2, 4)]
# tokens of a system prompt, prompts, answers to each, tokens of a prompt and of the longest answer
SYSTEM_PROMPTS = [(1000, 8, 4, 100, 100), (1000, 4, 4, 100, 400)]
TURNS = [(2, 6, 200, 100, 200)]  # rollouts, turns, tokens of a message, of an answer, of the thinking before it
STEP = (256, 128, 8)


def make_trainer(cls: Any, model: Any, prompt: int, longest: int, answers: int, device: str = "cpu") -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback
    from trl import GRPOConfig

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=answers, num_generations=answers, max_steps=1,
        gradient_accumulation_steps=1, max_completion_length=longest, bf16=False, use_cpu=device == "cpu", report_to=[],
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = cls(
        model=model, args=settings, train_dataset=Dataset.from_dict({"prompt": ["7+" * (prompt // 2)]}),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        processing_class=AutoTokenizer.from_pretrained(policy_folder("sums")),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def make_batch(prompt: int, longest: int, answers: int, vocab: int = VOCAB) -> dict[str, Any]:
    """One group whose answers have from half to all of the longest length."""
    return batch_of(*with_system_prompt(0, 1, answers, prompt, longest, vocab))


Samples = tuple[list[torch.Tensor], list[torch.Tensor]]  # prompts and answers


def with_system_prompt(system: int, prompts: int, answers: int, prompt: int, longest: int, vocab: int = VOCAB
                       ) -> Samples:  # fmt: skip
    """Groups behind one system prompt; answers have from half to all of the longest length."""
    generator = torch.Generator().manual_seed(prompt)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(vocab, (count,), generator=generator)

    first = tokens(system)
    beginnings = [torch.cat([first, tokens(prompt)]) for _ in range(prompts)]
    lengths = torch.linspace(longest / 2, longest, answers).long()
    ends = [tokens(int(n)) for _ in range(prompts) for n in lengths[torch.randperm(answers, generator=generator)]]
    return [beginnings[i // answers] for i in range(prompts * answers)], ends


def turns(rollouts: int, count: int, message: int, answer: int, thinking: int) -> Samples:
    """Every turn of a conversation a sample, whose prompt holds messages and answers before it without the thinking."""
    generator = torch.Generator().manual_seed(count)
    prompts, answers = [], []
    for _ in range(rollouts):
        history = torch.randint(VOCAB, (0,), generator=generator)
        for _ in range(count):
            history = torch.cat([history, torch.randint(VOCAB, (message,), generator=generator)])
            thought, said = torch.randint(VOCAB, (thinking + answer,), generator=generator).split([thinking, answer])
            prompts.append(history)
            answers.append(torch.cat([thought, said]))
            history = torch.cat([history, said])
    return prompts, answers


def batch_of(prompts: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]) -> dict[str, Any]:
    """TRL's batch, with prompts padded on the left and answers on the right."""
    generator = torch.Generator().manual_seed(len(answers))
    batch: dict[str, Any] = {}
    for name, rows, side in (("prompt", prompts, "left"), ("completion", answers, "right")):
        batch[f"{name}_ids"] = pad_sequence(list(rows), batch_first=True, padding_side=side)
        ones = [torch.ones_like(row) for row in rows]
        batch[f"{name}_mask"] = pad_sequence(ones, batch_first=True, padding_side=side)
    advantages = torch.randn(len(answers), generator=generator)
    return batch | {"advantages": advantages, "num_items_in_batch": batch["completion_mask"].sum()}


def pack_alone(rows: Sequence[Any], scored: Any, *, prefix_lens: Any) -> Any:
    """Pack each row with its own copy of the prompt."""
    from rlkernels.prefix_cache import pack

    return pack(rows, scored, prefix_lens=[0] * len(rows))


COMPACT = {"trl.trainer.utils._use_triton": lambda device: True}  # the output layer sees answers only
Patches = Mapping[str, Callable[..., Any]]


def patched(run: Callable[[], float], patches: Patches | None) -> Callable[[], float]:
    def call() -> float:
        with ExitStack() as stack:
            for name, function in (patches or {}).items():
                stack.enter_context(patch(name, function))
            return run()

    return call


def update(trainer: Any, batch: dict[str, Any], size: int, patches: Patches | None = None) -> Callable[[], float]:
    """Return an update in micro-batches of ``size`` answers that gives the norm of the gradient."""
    parts = {name: value.split(size) for name, value in batch.items() if value.ndim}
    numbers = {name: value for name, value in batch.items() if not value.ndim}

    def run() -> float:
        trainer.model.zero_grad(set_to_none=True)
        for i in range(len(batch["prompt_ids"]) // size):
            trainer._compute_loss(trainer.model, {name: part[i] for name, part in parts.items()} | numbers).backward()
        return torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm().item()

    return patched(run, patches)


def step(trainer: Any, patches: Patches | None = None) -> Callable[[], float]:
    """Return a whole step: generation, reward, update and the optimizer."""
    return patched(lambda: float(trainer.train().global_step), patches)


def cases(quick: bool) -> Iterator[Case]:
    if find_spec("trl") is None:
        yield Case("trl_update", "", {"TRL": Missing("pip install trl==1.16.0")}, reference=None)
        return
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOTrainer

    from rlkernels.integrations.trl import SharedPrefixGRPOTrainer

    alone = {"rlkernels.integrations.trl_shared.pack": pack_alone}
    two_levels: Patches = {"rlkernels.integrations.trl_shared.packs_tries": lambda device: False}
    width, layers = (90, 2) if quick else (288, 12)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip

    def trainers(prompt: int, longest: int, answers: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        theirs = make_trainer(GRPOTrainer, LlamaForCausalLM(deepcopy(config)), prompt, longest, answers)
        torch.manual_seed(0)
        return theirs, make_trainer(
            SharedPrefixGRPOTrainer, LlamaForCausalLM(deepcopy(config)), prompt, longest, answers
        )

    batches: dict[str, Samples] = {}
    for system, prompts, group, prompt, longest in [(8, 2, 2, 4, 6)] if quick else SYSTEM_PROMPTS:
        label = f"system prompt {system}, {prompts} prompts of {prompt}, {group} answers to each of up to {longest}"
        batches[label] = with_system_prompt(system, prompts, group, prompt, longest)
    for rollouts, count, message, said, thinking in [(1, 2, 4, 3, 2)] if quick else TURNS:
        label = f"{rollouts} rollouts of {count} turns: messages {message}, thinking {thinking}, answers {said}"
        batches[label] = turns(rollouts, count, message, said, thinking)
    for label, samples in batches.items():
        batch = batch_of(*samples)
        size = len(batch["prompt_ids"])
        theirs, ours = trainers(batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1], size)
        yield Case(
            op="trl_update",
            shape=label,
            providers={
                "TRL, head on answers": update(theirs, batch, size, COMPACT),
                "rlkernels, no padding": update(ours, batch, size, alone),
                "rlkernels, two levels": update(ours, batch, size, two_levels),
                "rlkernels": update(ours, batch, size),
            },
            reference="TRL, head on answers",
            work=("tokens", int(batch["completion_mask"].sum())),
        )
    for prompt, longest, answers, size in [(32, 16, 4, 2)] if quick else GRID + MICRO_BATCHES:
        batch = make_batch(prompt, longest, answers)
        theirs, ours = trainers(prompt, longest, answers)
        yield Case(
            op="trl_update",
            shape=f"prompt {prompt}, answers {longest // 2} to {longest}, group of {answers}, {size} a micro-batch",
            providers={
                "TRL": update(theirs, batch, size),
                "TRL, head on answers": update(theirs, batch, size, COMPACT),
                "rlkernels, no padding": update(ours, batch, size, alone),
                "rlkernels": update(ours, batch, size),
            },
            reference="TRL",
            work=("tokens", int(batch["completion_mask"].sum())),
        )
    prompt, longest, answers = (32, 16, 4) if quick else STEP
    theirs, ours = trainers(prompt, longest, answers)
    yield Case(
        op="trl_step",
        shape=f"prompt {prompt}, answers {longest}, group of {answers}",
        providers={
            "TRL": step(theirs), "TRL, head on answers": step(theirs, COMPACT), "rlkernels": step(ours),
        },
        reference=None,
    )  # fmt: skip
