"""Drafts from earlier rollouts: answers of earlier epochs predict those of this one."""

import os
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlkernels import _check
from rlkernels import backend as _backend
from rlkernels._files import replace_file
from rlkernels.history import reference

__all__ = ["RolloutHistory"]

HISTORY_TOKENS = 10_000_000  # most tokens of answers in the history that a run or an engine fills
Ids = Sequence[int] | np.ndarray | torch.Tensor
INT64 = -(2**63), 2**63 - 1


class RolloutHistory:
    """Earlier responses by prompt, and drafts for new ones (after RhymeRL's HistoSpec, arXiv 2508.18588).

    A draft continues earlier occurrences of the last tokens of a sequence: under the same prompt, in the sequence and
    its prompt, and, without a long match, under other prompts. Longer matches, later epochs and better rewards weigh
    more. A draft ends where verifying the next token would not pay. Verify drafts with
    :func:`rlkernels.verify_drafts`; wrong ones cost time, never correctness.

    Thread-safe, except on the "torch" backend.

    Args:
        max_tokens: most response tokens; None is unbounded. Eviction starts with the lowest epoch, within it with the
            lowest reward, then with the oldest response. A longer response is cut.
        token_cost: time to verify one more draft token, as a share of the time of a decode step without drafts.
        depth: most tokens of context that are compared, >= 5.
        backend: "auto" | "cpu" | "torch" (plain Python).
    """

    def __init__(
        self, *, max_tokens: int | None = None, token_cost: float = 0.02, depth: int = 24, backend: str = "auto"
    ) -> None:
        _check.in_range("token_cost", token_cost, 0.0, 1.0)
        depth = _check.integer("depth", depth, max(reference.SHARED_GRAMS), 64)
        self._core = _implementation(backend)(_bound(max_tokens), token_cost, depth)

    def add(self, prompt_ids: Ids, response_ids: Ids, *, reward: float = 0.0, epoch: int = 0) -> None:
        """Store a finished response; include its end-of-sequence token if drafts may end sequences.

        Args:
            prompt_ids: integers [P].
            response_ids: integers [L]; an empty response stores nothing.
            reward: finite, any scale; only the order and the spread within a prompt matter.
            epoch: pass over the data or policy version, a 64-bit integer that grows with time.
        """
        _check.number("reward", reward)
        reward = float(reward)
        if not abs(reward) < float("inf"):
            raise ValueError(f"reward must be finite, got {reward}")
        epoch = _check.integer("epoch", epoch, *INT64)
        self._core.add(_ids("prompt_ids", prompt_ids), _ids("response_ids", response_ids), reward, epoch)

    def resize(self, max_tokens: int | None) -> None:
        """Set another ``max_tokens``, and evict responses beyond it."""
        self._core.resize(_bound(max_tokens))

    def draft(
        self, prompt_ids_list: Sequence[Ids], generated_ids_list: Sequence[Ids], *, max_tokens: int
    ) -> list[list[int]]:
        """Return drafts for sequences, given by prompt and generated tokens, without feedback.

        Args:
            prompt_ids_list: B prompts.
            generated_ids_list: B responses so far; may be empty.
            max_tokens: longest draft, >= 0.

        Returns:
            B drafts of 0 .. max_tokens tokens; empty for unknown context.
        """
        max_tokens = _check.integer("max_tokens", max_tokens, 0, _check.MOST)
        for name, lists in (("prompt_ids_list", prompt_ids_list), ("generated_ids_list", generated_ids_list)):
            if not hasattr(lists, "__len__"):
                raise TypeError(f"{name} must be a list of token lists, got {lists!r}")
        if len(prompt_ids_list) != len(generated_ids_list):
            raise ValueError(
                f"generated_ids_list must have one entry per prompt, {len(prompt_ids_list)}, got "
                f"{len(generated_ids_list)}"
            )
        return [
            self._core.draft(_ids("prompt_ids_list", p), _ids("generated_ids_list", g), max_tokens)
            for p, g in zip(prompt_ids_list, generated_ids_list)
        ]

    def track(self, prompt_ids: Ids) -> int:
        """Start to follow a sequence, and return its handle. Call :meth:`release` at its end."""
        return self._core.track(_ids("prompt_ids", prompt_ids))

    def extend(self, handle: int, ids: Ids) -> None:
        """Add generated tokens, accepted draft tokens included."""
        self._core.extend(_check.integer("handle", handle, *INT64), _ids("ids", ids))

    def extend_tracked(self, handles: Ids, ids: Ids, lengths: Ids) -> None:
        """Run :meth:`extend` for B sequences in one call.

        Args:
            handles: B handles.
            ids: the new tokens of all sequences, one after the other.
            lengths: integers [B], how many of them belong to each.
        """
        handle_array = _ids("handles", handles, np.int64)
        counts = _ids("lengths", lengths, np.int64)
        tokens = _ids("ids", ids)
        if len(handle_array) != len(counts):
            raise ValueError(f"lengths must have one entry per handle ({len(handle_array)}), got {len(counts)}")
        if counts.sum() != len(tokens):
            raise ValueError(f"lengths must add up to the number of ids ({len(tokens)}), got {counts.sum()}")
        self._core.extend_tracked(handle_array, tokens, counts)

    def draft_tracked(
        self, handles: Ids, *, max_tokens: int, token_cost: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return drafts for tracked sequences; feedback bounds the length of each.

        Args:
            handles: B handles.
            max_tokens: longest draft, >= 0.
            token_cost: for this call; None uses the history's.

        Returns:
            (ids, lengths): int64 [B, max_tokens], -1 beyond each length, and int64 [B]; on the CPU.

        Raises:
            ValueError: a handle that is not tracked.
        """
        max_tokens = _check.integer("max_tokens", max_tokens, 0, _check.MOST)
        if token_cost is not None:
            _check.in_range("token_cost", token_cost, 0.0, 1.0)
        ids, lengths = self._core.draft_tracked(_ids("handles", handles, np.int64), max_tokens, token_cost)
        return torch.from_numpy(ids), torch.from_numpy(lengths)

    def observe(self, handles: Ids, offered: Ids, accepted: Ids) -> None:
        """Give feedback on the last drafts: the tokens offered to the verifier, and those it accepted.

        The window of a sequence starts at 16. It doubles if all offered tokens were accepted, else it shrinks to twice
        the accepted ones, but not below 6. If drafts cost more than they save (``token_cost``), drafting pauses for 8
        drafts, then 16, ... 1024, until it pays again or ``token_cost`` falls.

        Args:
            handles: B handles.
            offered: integers [B]; 0 changes nothing.
            accepted: integers [B], 0 <= accepted <= offered.
        """
        handle_array = _ids("handles", handles, np.int64)
        num_offered = _ids("offered", offered, np.int64)
        num_accepted = _ids("accepted", accepted, np.int64)
        lengths = [len(handle_array), len(num_offered), len(num_accepted)]
        if len(set(lengths)) > 1:
            raise ValueError(f"handles, offered and accepted must have one length, got {', '.join(map(str, lengths))}")
        if (num_accepted > num_offered).any():
            worst = int((num_accepted - num_offered).argmax())
            raise ValueError(
                f"accepted must be between 0 and offered ({num_offered[worst]}), got {num_accepted[worst]}"
            )
        self._core.observe(handle_array, num_offered, num_accepted)

    def release(self, handle: int) -> None:
        """Forget a tracked sequence."""
        self._core.release(_check.integer("handle", handle, *INT64))

    def longest_prompt(self, ids: Ids) -> int:
        """Return the length of the longest stored prompt with which ``ids`` begin; 0 without one."""
        return self._core.longest_prompt(_ids("ids", ids))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rollouts (not the handles) to one file atomically.

        A symbolic link stays and leads to the new file, which has the permissions of the replaced one.
        """
        replace_file(path, self._core.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, backend: str = "auto") -> "RolloutHistory":
        """Read a file written by :meth:`save`.

        Raises:
            ValueError: the file is no rollout history, has another version, or is damaged.
        """
        with open(path, "rb") as file:
            return cls._read(file.read(), os.fsencode(path).decode(errors="replace"), backend)

    def to_bytes(self) -> torch.Tensor:
        """Return the content of a saved file as a tensor uint8 [N] on the CPU, for checkpoints."""
        return torch.from_numpy(self._core.to_bytes())

    @classmethod
    def from_bytes(cls, data: torch.Tensor, *, backend: str = "auto") -> "RolloutHistory":
        """Undo :meth:`to_bytes`; raises ValueError as :meth:`load` does."""
        _check.tensor("data", data, ndim=1, dtype=torch.uint8)
        return cls._read(data.numpy(force=True).tobytes(), "the tensor", backend)

    @classmethod
    def _read(cls, data: bytes, name: str, backend: str) -> "RolloutHistory":
        history = cls.__new__(cls)
        history._core = _implementation(backend).from_bytes(data, name)
        return history

    @property
    def stats(self) -> dict[str, Any]:
        """Return tokens, rollouts, prompts, handles, evicted rollouts, newest_epoch, bytes and bytes_per_token."""
        stats: dict[str, Any] = self._core.stats()
        stats["bytes_per_token"] = stats["bytes"] / max(stats["tokens"], 1)
        return stats


def _implementation(backend: str) -> Any:
    if _backend.choose("rollout_history", torch.device("cpu"), backend) == "cpu":
        from rlkernels import _C

        return _C.RolloutHistory
    return reference.History


def _bound(max_tokens: int | None) -> int | None:
    return None if max_tokens is None else _check.integer("max_tokens", max_tokens, 1, INT64[1])


def _ids(name: str, value: Ids, dtype: type = np.int32) -> np.ndarray:
    """Return a one-dimensional array of integers >= 0 that fit int32."""
    try:
        array = value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
    except TypeError:  # of a tensor whose dtype NumPy lacks
        raise TypeError(f"{name} must be integers, got {reprlib.repr(value)}") from None
    except ValueError:  # lists of different lengths
        raise ValueError(f"{name} must have 1 dimension, got {reprlib.repr(value)}") from None
    if array.ndim == 0:
        raise TypeError(f"{name} must be a list of integers, got {reprlib.repr(value)}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, dtype)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    low = array.min()
    high = array.max()
    if low < 0 or high >= 2**31:
        raise ValueError(f"{name} must be between 0 and 2**31 - 1, got {low if low < 0 else high}")
    return np.ascontiguousarray(array, dtype)
