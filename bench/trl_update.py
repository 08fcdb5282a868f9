"""An update of TRL's GRPOTrainer, with every prompt computed for each answer, and with each prompt computed once.

Forward and backward pass of one micro-batch of one group, without the optimizer, on a random Llama with the vocabulary
of SmolLM2. On a CPU TRL applies the output layer to prompts too; the arm "head on answers" does not, as TRL on a GPU:
it is the fair rival. The gradient's norm is compared.
"""

import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from bench import Case, Missing
from python_trainer.hub import policy_folder

VOCAB = 49152
GRID = [(64, 128, 8), (256, 128, 8), (1024, 128, 8), (256, 128, 2), (64, 512, 8)]  # prompt, longest answer, answers


def make_trainer(cls: Any, model: Any, answers: int, longest: int) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=answers, num_generations=answers,
        gradient_accumulation_steps=1, max_completion_length=longest, bf16=False, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = cls(
        model=model, args=settings, train_dataset=Dataset.from_dict({"prompt": ["x"]}),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        processing_class=AutoTokenizer.from_pretrained(policy_folder("sums")),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def make_batch(prompt: int, longest: int, answers: int) -> dict[str, Any]:
    """One group whose answers have from half to all of the longest length."""
    generator = torch.Generator().manual_seed(prompt)
    ids = torch.randint(VOCAB, (1, prompt), generator=generator).repeat(answers, 1)
    lengths = torch.linspace(longest / 2, longest, answers).long()[torch.randperm(answers, generator=generator)]
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {
        "prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_mask": mask,
        "completion_ids": torch.randint(VOCAB, (answers, longest), generator=generator),
        "advantages": torch.randn(answers, generator=generator), "num_items_in_batch": mask.sum(),
    }  # fmt: skip


def update(trainer: Any, batch: dict[str, Any], compact: bool = False) -> Callable[[], float]:
    """Return an update that gives the norm of the gradient."""
    import trl.trainer.utils as utils

    def run() -> float:
        trainer.model.zero_grad(set_to_none=True)
        use_triton = utils._use_triton
        if compact:
            utils._use_triton = lambda device: True  # decides whether the output layer sees answers only
        try:
            trainer._compute_loss(trainer.model, batch).backward()
        finally:
            utils._use_triton = use_triton
        return torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm().item()

    return run


def cases(quick: bool) -> Iterator[Case]:
    if find_spec("trl") is None:
        yield Case("trl_update", "", {"TRL": Missing("pip install trl==1.16.0")}, reference=None)
        return
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOTrainer

    from rlkernels.integrations.trl import SharedPrefixGRPOTrainer

    width, layers = (90, 2) if quick else (288, 12)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    for prompt, longest, answers in [(32, 16, 4)] if quick else GRID:
        batch, trainers = make_batch(prompt, longest, answers), {}
        for cls in (GRPOTrainer, SharedPrefixGRPOTrainer):
            torch.manual_seed(0)
            trainers[cls] = make_trainer(cls, LlamaForCausalLM(config), answers, longest)
        yield Case(
            op="trl_update",
            shape=f"prompt {prompt}, answers {longest // 2} to {longest}, group of {answers}",
            providers={
                "TRL": update(trainers[GRPOTrainer], batch),
                "TRL, head on answers": update(trainers[GRPOTrainer], batch, compact=True),
                "rlkernels": update(trainers[SharedPrefixGRPOTrainer], batch),
            },
            reference="TRL",
            work=("tokens", int(batch["completion_mask"].sum())),
        )
