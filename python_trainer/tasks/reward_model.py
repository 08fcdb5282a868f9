"""Rewards from a model of one's own: a sequence-classification model of Transformers with a single label."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from python_trainer.data import Messages
from python_trainer.errors import UserError, first_line
from python_trainer.model.loading import check_weight_names
from python_trainer.model.turns import encode_texts, join_messages

BATCH_TOKENS = 1 << 14  # of a forward pass, padding included


class RewardModel:
    """Reward function: the score of prompt and answer by the model in a folder.

    It joins texts, and passes messages through the chat template of its own tokenizer.

    Raises:
        UserError: the folder holds no such model, or none that is complete.
    """

    def __init__(self, path: str):
        disable_progress_bar()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            options: dict[str, Any] = {"dtype": "auto", "local_files_only": True, "output_loading_info": True}
            check_weight_names(Path(path))
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(Path(path), **options)
        except Exception as error:  # of Transformers, torch and the readers of files
            raise UserError(
                f"task.reward: {path} holds no sequence-classification model: {first_line(error)}"
            ) from error
        model, loading_info = loaded
        self.model = model.eval()
        if missing := sorted(loading_info["missing_keys"]):
            raise UserError(f"task.reward: {path} is no reward model: it lacks the weights {', '.join(missing[:3])}")
        config = self.model.config.get_text_config()
        if config.num_labels != 1:
            raise UserError(f"task.reward: a reward model has 1 label, {path} has {config.num_labels}")
        self.folder = Path(path)
        self.pad: int | None = config.pad_token_id

    def to(self, device: torch.device) -> None:
        """Move the model to a device."""
        self.model.to(device)

    @torch.inference_mode()
    def __call__(
        self, prompts: Sequence[str | Messages], completions: Sequence[str | Messages], **_: object
    ) -> list[float]:
        """Return one number for each completion."""
        rows = [self._encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        rewards = [0.0] * len(rows)
        # the model scores the last token of a row, which it finds by its pad token
        max_rows = 1 if self.pad is None else len(rows)
        for batch in batches([len(row) for row in rows], max_rows=max_rows):
            tokens = [torch.tensor(rows[i]) for i in batch]
            ids = pad_sequence(tokens, batch_first=True, padding_value=self.pad or 0).to(self.model.device)  # [rows, T]
            mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True).to(self.model.device)
            scores = self.model(input_ids=ids, attention_mask=mask).logits[:, 0]
            for i, score in zip(batch, scores.float().tolist()):
                rewards[i] = score
        return rewards

    def _encode(self, prompt: str | Messages, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            return encode_texts(self.tokenizer, [f"{prompt}{completion}"])[0][0]
        text = self.tokenizer.apply_chat_template(join_messages(prompt, completion), tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def batches(lengths: Sequence[int], max_rows: int) -> Iterator[list[int]]:
    """Yield indices of rows of similar length that share a pass: of at most BATCH_TOKENS tokens, or one row."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) >= max_rows or lengths[i] * (len(batch) + 1) > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
