"""Rewards from a model of one's own: a sequence-classification model of Transformers with a single label."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from python_trainer.data import Messages
from python_trainer.errors import UserError

BATCH_TOKENS = 1 << 14  # of a forward pass, padding included


class RewardModel:
    """What the model in a folder gives to prompt and answer together, as a reward function.

    Texts are one after the other, messages go through the chat template of the model's own tokenizer.

    Raises:
        UserError: the folder holds no such model, or none that is complete.
    """

    def __init__(self, path: str):
        disable_progress_bar()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            options: dict[str, Any] = {"dtype": "auto", "local_files_only": True, "output_loading_info": True}
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(Path(path), **options)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"task.reward: {path} holds no sequence-classification model: {first}") from error
        self.model, found = loaded[0].eval(), loaded[1]
        if missing := sorted(found["missing_keys"]):
            raise UserError(f"task.reward: {path} is no reward model: it lacks the weights {', '.join(missing[:3])}")
        config = self.model.config.get_text_config()
        if config.num_labels != 1:
            raise UserError(f"task.reward: a reward model has 1 label, {path} has {config.num_labels}")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        config.pad_token_id = self.tokenizer.pad_token_id  # it finds the last token by it

    def to(self, device: torch.device) -> None:
        """Where it computes."""
        self.model.to(device)

    @torch.inference_mode()
    def __call__(
        self, prompts: Sequence[str | Messages], completions: Sequence[str | Messages], **_: object
    ) -> list[float]:
        """One number for each completion."""
        rows = [self._encode(prompt, said) for prompt, said in zip(prompts, completions, strict=True)]
        rewards = [0.0] * len(rows)
        for part in batches([len(row) for row in rows]):
            inputs = self.tokenizer.pad(
                {"input_ids": [rows[i] for i in part]}, padding_side="right", return_tensors="pt"
            ).to(self.model.device)
            scores = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
            for i, score in zip(part, scores.float().tolist()):
                rewards[i] = score
        return rewards

    def _encode(self, prompt: str | Messages, said: str | Messages) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(f"{prompt}{said}")["input_ids"])
        text = self.tokenizer.apply_chat_template([*prompt, *said], tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of rows that share a pass, of like length, with at most BATCH_TOKENS tokens or one row."""
    part: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if part and lengths[i] * (len(part) + 1) > BATCH_TOKENS:
            yield part
            part = []
        part.append(i)
    if part:
        yield part
