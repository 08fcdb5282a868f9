"""Updates and full steps of TRL's GRPOTrainer: common prefixes are computed once for each sample, or once in all.

An update is the forward and backward pass of a batch in micro-batches, without the optimizer, on a random Llama with
the vocabulary of SmolLM2; ``match`` is the error of the gradients. On a CPU TRL applies the output layer to prompts
too; the arm "head on answers" does not, as TRL on a GPU: it is the fair rival. "No padding" packs answers, each with
its own copy of the prompt. "Two levels" shares only equal prompts. "Paths copied" attends as TRL's AsyncGRPOTrainer,
on our trie; "TRL's head" uses TRL's log-probabilities without logits. A full step also generates, with Transformers,
and runs the optimizer. ``--only`` picks cases by their shapes: "system prompt", "turns", "group of",
"micro-batches of". FlexAttention has no backward pass on a CPU: ``bench.gpu.session`` times it.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.utils.rnn import pad_sequence

from bench import Case, Missing
from bench._case import Provider
from bench._trl import HEAD_ON_ANSWERS
from bench.logprobs import score_by_trl
from bench.tree_attention import copied
from python_trainer.model.hub import policy_folder

VOCAB = 49152
# prompt, longest answer, answers, answers of a micro-batch, layers
GRID = [
    (64, 128, 8, 8, 12), (256, 128, 8, 8, 12), (1024, 128, 8, 8, 12), (256, 128, 2, 2, 12), (64, 512, 8, 8, 12),
    (200, 4000, 8, 4, 4), (2048, 2048, 8, 4, 4),
]  # fmt: skip
# tokens of a system prompt, prompts, answers to each, tokens of a prompt and of the longest answer; samples of a
# micro-batch of arms that share nothing, whose time it hardly changes, and of the others, to fit in 20 GB; layers
SYSTEM_PROMPTS = [
    (1000, 16, 4, 100, 100, 8, 64, 12), (1000, 16, 4, 100, 500, 8, 32, 12), (1000, 4, 4, 100, 2000, 4, 16, 4),
]  # fmt: skip
# rollouts, turns, tokens of a system prompt, a message, an answer and the thinking before it; the same sizes; layers
TURNS = [(4, 8, 140, 60, 20, 40, 8, 32, 12), (1, 8, 0, 1000, 300, 500, 2, 8, 4), (1, 8, 0, 1000, 300, 4000, 1, 8, 4)]
MICRO_BATCHES = (300, 16, 4, 50, 60), (1, 2, 4, 8, 16, 32, 64)  # a system prompt; samples of a micro-batch
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
    """Make one group whose answers have from half to all of the longest length."""
    return batch_of(*with_system_prompt(0, 1, answers, prompt, longest, vocab))


Samples = tuple[list[torch.Tensor], list[torch.Tensor]]  # prompts and answers


def with_system_prompt(system: int, prompts: int, answers: int, prompt: int, longest: int, vocab: int = VOCAB
                       ) -> Samples:  # fmt: skip
    """Make groups after one system prompt; answers have from half to all of the longest length."""
    generator = torch.Generator().manual_seed(prompt)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(vocab, (count,), generator=generator)

    system_ids = tokens(system)
    prompt_ids = [torch.cat([system_ids, tokens(prompt)]) for _ in range(prompts)]
    lengths = torch.linspace(longest / 2, longest, answers).long()
    ends = [tokens(int(n)) for _ in range(prompts) for n in lengths[torch.randperm(answers, generator=generator)]]
    return [prompt_ids[i // answers] for i in range(prompts * answers)], ends


def turns(rollouts: int, count: int, system: int, message: int, answer: int, thinking: int) -> Samples:
    """Make each turn of a conversation a sample, whose prompt has the messages and answers before without thinking."""
    generator = torch.Generator().manual_seed(count)
    prompts = []
    answers = []
    system_ids = torch.randint(VOCAB, (system,), generator=generator)
    for _ in range(rollouts):
        history = system_ids
        for _ in range(count):
            history = torch.cat([history, torch.randint(VOCAB, (message,), generator=generator)])
            thought, reply = torch.randint(VOCAB, (thinking + answer,), generator=generator).split([thinking, answer])
            prompts.append(history)
            answers.append(torch.cat([thought, reply]))
            history = torch.cat([history, reply])
    return prompts, answers


def batch_of(prompts: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Make TRL's batch, with prompts padded on the left and answers on the right."""
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


def attend_with_copies(self: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                       scale: float, window: int | None, **options: Any) -> torch.Tensor:  # fmt: skip
    """Stand in for ``TreeLayout.attend``: SDPA for each segment, with copies of its path's keys and values."""
    if "copies" not in self.kernel_tables:
        self.kernel_tables["copies"] = copied(self, scale)
    return self.kernel_tables["copies"].attend(query, key, value)


SHARED = "rlkernels.integrations.trl_shared"
ATTEND = "rlkernels.prefix_cache.TreeLayout.attend"
Patches = Mapping[str, Callable[..., Any]]
COMPACT: Patches = dict([HEAD_ON_ANSWERS])


def patched(run: Callable[[], float], patches: Patches) -> Callable[[], float]:
    def call() -> float:
        with ExitStack() as stack:
            for name, function in patches.items():
                stack.enter_context(patch(name, function))
            return run()

    return call


def update(trainer: Any, batch: dict[str, Any], size: int, patches: Patches) -> Callable[[], float]:
    """Return an update in micro-batches of ``size`` answers that gives the norm of the gradient."""
    chunks = {name: value.split(size) for name, value in batch.items() if value.ndim}
    scalars = {name: value for name, value in batch.items() if not value.ndim}

    def run() -> float:
        trainer.model.zero_grad(set_to_none=True)
        for i in range(len(batch["prompt_ids"]) // size):
            trainer._compute_loss(
                trainer.model, {name: chunk[i] for name, chunk in chunks.items()} | scalars
            ).backward()
        return torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm().item()

    return patched(run, patches)


ARMS: dict[str, Patches] = {  # those named TRL are TRL's trainer and pad, the others ours
    "TRL": {},
    "TRL, head on answers": COMPACT,
    "rlkernels, no padding": {f"{SHARED}.pack": pack_alone},
    "rlkernels, two levels": {f"{SHARED}.packs_tries": lambda device: False},
    "rlkernels": {},
    "paths copied": {ATTEND: attend_with_copies},
    "TRL's head": {f"{SHARED}.linear_token_logprobs": score_by_trl},
}
PADDED = ("TRL", "TRL, head on answers")
UNSHARED = (*PADDED, "rlkernels, no padding")


def update_case(label: str, samples: Callable[[], Samples], sizes: tuple[int, int], layers: int,
                arms: Sequence[str] = tuple(ARMS)) -> Case:  # fmt: skip
    """Make the case of a batch; trainers are made when they run, so that skipped cases cost nothing.

    Args:
        sizes: samples of a micro-batch of arms that share nothing, and of the others.
    """
    batch = functools.cache(lambda: batch_of(*samples()))

    def provider(arm: str) -> Provider:
        @functools.cache
        def run() -> tuple[Any, Callable[[], float]]:
            trainer = trainer_of(arm in PADDED, layers, batch())
            return trainer, update(trainer, batch(), sizes[arm not in UNSHARED], ARMS[arm])

        def gradients() -> list[torch.Tensor | None]:
            trainer, call = run()
            call()
            if not getattr(trainer, "shares_prefixes", True):
                raise RuntimeError(f"the arm {arm} left the batch to TRL: its log tells why")
            return [p.grad for p in trainer.model.parameters()]

        return gradients

    providers = {arm: provider(arm) for arm in arms}
    size_text = " and ".join(str(size) for size in dict.fromkeys(sizes))
    shape = f"{label}, {size_text} a micro-batch" + (f", {layers} layers" if layers not in (2, 12) else "")
    return Case("trl_update", shape, providers, reference=next(arm for arm in arms if arm in PADDED))


def trainer_of(padded: bool, layers: int, batch: Mapping[str, torch.Tensor]) -> Any:
    """Make TRL's trainer, or ours, on a random Llama with this many layers; with two layers a narrow one."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOTrainer

    from rlkernels.integrations.trl import SharedPrefixGRPOTrainer

    width = 90 if layers == 2 else 288
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=16_384, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    (answers, prompt), (_, longest) = batch["prompt_ids"].shape, batch["completion_ids"].shape
    cls = GRPOTrainer if padded else SharedPrefixGRPOTrainer
    return make_trainer(cls, LlamaForCausalLM(config), prompt, longest, answers)


def cases(quick: bool) -> Iterator[Case]:
    if find_spec("trl") is None:
        yield Case("trl_update", "", {"TRL": Missing("pip install trl==1.16.0")}, reference=None)
        return
    for prompt, longest, answers, size, layers in [(32, 16, 4, 2, 2)] if quick else GRID:
        label = f"prompt {prompt}, answers {longest // 2} to {longest}, group of {answers}"
        samples = functools.partial(with_system_prompt, 0, 1, answers, prompt, longest)
        yield update_case(label, samples, (size, size), layers)
    for system, prompts, group, prompt, longest, *sizes, layers in (
        [(8, 2, 2, 4, 6, 2, 4, 2)] if quick else SYSTEM_PROMPTS
    ):
        label = f"system prompt {system}, {prompts} prompts of {prompt}, {group} answers to each of up to {longest}"
        samples = functools.partial(with_system_prompt, system, prompts, group, prompt, longest)
        yield update_case(label, samples, (sizes[0], sizes[1]), layers, tuple(ARMS)[1:])
    for *numbers, unshared, shared, layers in [(1, 2, 2, 4, 3, 2, 1, 2, 2)] if quick else TURNS:
        rollouts, count, system, message, answer, thinking = numbers
        label = f"{rollouts} rollouts of {count} turns: messages {message}, thinking {thinking}, answers {answer}"
        yield update_case(label, functools.partial(turns, *numbers), (unshared, shared), layers, tuple(ARMS)[1:])
    (system, prompts, group, prompt, longest), micro_batches = ((8, 2, 2, 4, 6), (1, 4)) if quick else MICRO_BATCHES
    for size in micro_batches:
        label = f"micro-batches of {size}: system prompt {system}, {prompts} prompts of {prompt}, {group} answers each"
        samples = functools.partial(with_system_prompt, system, prompts, group, prompt, longest)
        arms = ("TRL, head on answers", "rlkernels, no padding", "rlkernels, two levels", "rlkernels")
        yield update_case(label, samples, (size, size), 2 if quick else 12, arms)
    prompt, longest, answers = (32, 16, 4) if quick else STEP

    def step_of(padded: bool, patches: Patches) -> Callable[[], float]:
        """Return a full step: generation, reward, update and the optimizer."""

        @functools.cache
        def make_step() -> Callable[[], float]:
            trainer = trainer_of(padded, layers, make_batch(prompt, longest, answers))
            return patched(lambda: float(trainer.train().global_step), patches)

        return lambda: make_step()()

    layers = 2 if quick else 12
    yield Case(
        op="trl_step",
        shape=f"prompt {prompt}, answers {longest}, group of {answers}",
        providers={
            "TRL": step_of(True, {}), "TRL, head on answers": step_of(True, COMPACT), "rlkernels": step_of(False, {}),
        },
        reference=None,
    )  # fmt: skip
