"""Remembered answers on disk: token ids by prompt, in one safetensors file that knows what it belongs to."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from python_trainer.errors import UserError
from python_trainer.model.loading import tokenizer_fingerprint
from python_trainer.run_directory import write_bytes

FORMAT = "rlkernels answers 1"


def pack_answers(answers: dict[int, list[int]]) -> dict[str, torch.Tensor]:
    """``keys`` int64 [N], ``lengths`` int64 [N] and all ``ids`` int32, one answer after the other."""
    return {
        "keys": torch.tensor(list(answers), dtype=torch.int64),
        "lengths": torch.tensor([len(answer) for answer in answers.values()], dtype=torch.int64),
        "ids": torch.tensor([token for answer in answers.values() for token in answer], dtype=torch.int32),
    }


def unpack_answers(tensors: dict[str, torch.Tensor]) -> dict[int, list[int]]:
    """Undoes :func:`pack_answers`."""
    parts = tensors["ids"].split(tensors["lengths"].tolist())
    return {key: part.tolist() for key, part in zip(tensors["keys"].tolist(), parts)}


def save_answers(path: Path, answers: dict[int, list[int]], prompts: Sequence[Sequence[int]], tokenizer: Any) -> None:
    """Writes the file in one step: whoever reads it sees all of it or what was there before.

    Args:
        answers: token ids by index of the prompt.
        prompts: token ids of every prompt; with the vocabulary of the tokenizer they tell where the file belongs.

    Raises:
        UserError: the file cannot be written.
    """
    tensors = pack_answers(answers)
    metadata = _belongs_to(prompts, tokenizer) | {"format": FORMAT, "checksum": _checksum(tensors)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, save(tensors, metadata))
    except OSError as error:
        raise UserError(f"cannot write remembered answers to {path}: {error.strerror}") from error


def load_answers(path: Path, prompts: Sequence[Sequence[int]], tokenizer: Any) -> dict[int, list[int]]:
    """Reads what :func:`save_answers` wrote.

    Raises:
        UserError: the file is damaged, or was made for other prompts or with another tokenizer.
    """
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(f"{path} holds no remembered answers (format {metadata.get('format')!r})")
            for name, value in _belongs_to(prompts, tokenizer).items():
                if metadata.get(name) != value:
                    raise UserError(f"{path} holds answers of a run with other {name}: remove it, or give another file")
            tensors = {name: file.get_tensor(name) for name in ("keys", "lengths", "ids")}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged ({error}): remove it, and it is made anew") from error
    if metadata["checksum"] != _checksum(tensors):
        raise UserError(f"{path} is damaged (its checksum does not fit): remove it, and it is made anew")
    return unpack_answers(tensors)


def _belongs_to(prompts: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, str]:
    listed = json.dumps([list(prompt) for prompt in prompts])
    return {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "prompts": hashlib.blake2b(listed.encode(), digest_size=16).hexdigest(),
    }


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
