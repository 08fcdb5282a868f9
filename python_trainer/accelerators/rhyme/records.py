"""What the retrospective database holds, as plain objects."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from python_trainer.errors import UserError


@dataclass(frozen=True)
class RunFacts:
    """What a training run is."""

    family: str
    parameters: int
    tokenizer: str  # fingerprint
    task: str
    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredRun:
    """A run in the database and how much of it is there."""

    id: int
    created: float
    facts: RunFacts
    steps: int
    rollouts: int
    generated_tokens: int
    last_reward: float | None
    last_accuracy: float | None


@dataclass
class StepRecord:
    """One step of a training trajectory."""

    step: int
    policy_version: int
    reward: float  # mean over the fresh answers, on the task's scale
    accuracy: float
    sketch: dict[str, torch.Tensor]
    generated_tokens: int = 0
    # of each group, where answers are right or wrong: prompts uint8 [G, 16], the key; answers and right int32 [G]
    outcomes: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class StoredAnswer:
    """One stored answer."""

    run_id: int
    step: int
    policy_version: int
    prompt_key: str
    text: str
    finished: bool
    reward: float
    response_ids: list[int]
    logprobs: list[float]  # of the policy that wrote it; NaN where unknown
    tokenizer: str = ""  # fingerprint; filled in when read


def prompt_key(prompt: str | list[dict[str, str]]) -> str:
    """Names a prompt by its text or messages, for models of every tokenizer: 32 hexadecimal digits."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def pack_tensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """safetensors bytes."""
    return save({name: value.contiguous() for name, value in tensors.items()})


def unpack_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Undoes :func:`pack_tensors`.

    Raises:
        UserError: these are not its bytes.
    """
    try:
        return load(bytes(data))
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UserError(
            f"tensors of the retrospective database are damaged ({' '.join(str(error).split())})"
        ) from error
