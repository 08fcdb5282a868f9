"""Updates and whole steps of TRL's GRPOTrainer, with every prompt computed for each answer, and with each once.

An update is the forward and backward pass of one group in micro-batches, without the optimizer, on a random Llama with
the vocabulary of SmolLM2. On a CPU TRL applies the output layer to prompts too; the arm "head on answers" does not, as
TRL on a GPU: it is the fair rival. "No padding" packs answers, each with its own copy of the prompt. The gradient's
norm is compared. A whole step also generates, with Transformers, and takes the optimizer's step.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

from bench import Case, Missing
from python_trainer.hub import policy_folder

VOCAB = 49152
# prompt, longest answer, answers, answers of a micro-batch
GRID = [(64, 128, 8, 8), (256, 128, 8, 8), (1024, 128, 8, 8), (256, 128, 2, 2), (64, 512, 8, 8)]
MICRO_BATCHES = [(256, 128, 8, size) for size in (1, 2, 4)]
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
    generator = torch.Generator().manual_seed(prompt)
    ids = torch.randint(vocab, (1, prompt), generator=generator).repeat(answers, 1)
    lengths = torch.linspace(longest / 2, longest, answers).long()[torch.randperm(answers, generator=generator)]
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {
        "prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_mask": mask,
        "completion_ids": torch.randint(vocab, (answers, longest), generator=generator),
        "advantages": torch.randn(answers, generator=generator), "num_items_in_batch": mask.sum(),
    }  # fmt: skip


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
