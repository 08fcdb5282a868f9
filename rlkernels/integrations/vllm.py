"""Drafts from earlier rollouts inside vLLM, as a custom proposer of its speculative decoding.

    llm = LLM(
        model,
        speculative_config={
            "method": "custom_class",
            "model": "rlkernels.integrations.vllm.HistoryProposer",
            "num_speculative_tokens": 16,
        },
        additional_config={"rlkernels_history": "history.bin"},
    )

Needs vllm 0.32 or newer.
"""

import logging
import os
import sys
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import torch
import vllm

from rlkernels.history import RolloutHistory

__all__ = ["HistoryProposer", "share_history"]

OLDEST = (0, 32)
HISTORY = "rlkernels_history"  # key of vLLM's additional_config

if tuple(vllm.__version_tuple__[:2]) < OLDEST:
    raise ImportError(f"rlkernels.integrations.vllm needs vllm >= 0.32, found {vllm.__version__}")

logger = logging.getLogger(__name__)
_shared: RolloutHistory | None = None


def share_history(history: RolloutHistory | None) -> None:
    """Gives proposers of this process a history that goes on being filled; None takes it back.

    Only an engine in this process sees it (``VLLM_ENABLE_V1_MULTIPROCESSING=0``); others read a file. Call it before
    the engine is made.

    Raises:
        TypeError: not a RolloutHistory.
    """
    global _shared
    if not isinstance(history, RolloutHistory | None):
        raise TypeError(f"history must be a RolloutHistory or None, got {history!r}")
    _shared = history


@dataclass(eq=False)
class _Tracked:
    """A sequence that vLLM is generating; it tells no names, so sequences are known by their tokens."""

    prompt: np.ndarray  # int32 [P]
    tokens: bytearray  # int32, prompt and answer so far
    handle: int
    draft: list[int] = field(default_factory=list)  # the last one, not judged yet


def _expand(
    x: torch.Tensor, ends: torch.Tensor, total: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """A number of each of B sequences [B] -> of each of their tokens [total]; ``ends`` [B] are sums of their counts."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    expanded = x.repeat_interleave(counts, output_size=total)
    return expanded.masked_fill(expanded == replace_from, replace_to)


def _mend_temperatures() -> None:
    """Replaces a function of vLLM where it is wrong.

    On a CPU vLLM 0.32 writes the temperature and top-p of verified tokens into a copy that it throws away, and samples
    with what the memory held before, whatever made the drafts.
    """
    from vllm.platforms import current_platform

    # an engine has imported it; by itself it can not be imported on a CPU
    rejection_sampler: Any = sys.modules.get("vllm.v1.sample.rejection_sampler")
    if current_platform.is_cpu() and rejection_sampler is not None:
        asked = torch.tensor([0.25, 0.0, 4.0]), torch.tensor([2, 3, 6]), 6, 0, 1
        if not torch.equal(rejection_sampler.expand_batch_to_tokens(*asked), _expand(*asked)):
            rejection_sampler.expand_batch_to_tokens = _expand


class HistoryProposer:
    """Continues sequences as :class:`rlkernels.RolloutHistory` remembers them; vLLM verifies what it proposes.

    The history is the file that ``additional_config={"rlkernels_history": path}`` names, written by
    ``RolloutHistory.save`` and read again whenever it has been replaced, or else the one given to
    :func:`share_history`. A sequence is looked up under the longest prompt in it that what vLLM got as its prompt
    begins with, so the prefix of a suffix rollout counts as the start of an answer; where there is none, under all of
    it.

    Args:
        vllm_config: vLLM's, with ``num_speculative_tokens`` the longest draft.

    Raises:
        ValueError: no history was given, or the file is damaged.
        TypeError: what was given is not a path.
        OSError: the file cannot be read.
    """

    def __init__(self, vllm_config: Any) -> None:
        additional = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
        self._path: str | os.PathLike[str] | None = additional.get(HISTORY)
        if self._path is None and _shared is None:
            raise ValueError(
                f"no history: pass additional_config={{{HISTORY!r}: path}} to vLLM (it has {sorted(additional)}), or "
                "call share_history(history) first, in the process of the engine (VLLM_ENABLE_V1_MULTIPROCESSING=0)"
            )
        if not isinstance(self._path, str | os.PathLike | None):
            raise TypeError(
                f"additional_config[{HISTORY!r}] must be the path of a file that RolloutHistory.save wrote, got "
                f"{self._path!r}"
            )
        _mend_temperatures()
        self._limit: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_length: int = vllm_config.model_config.max_model_len
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        # Preempted sequences come back, and cannot be told from finished ones: so many that have left are kept.
        self._max_absent: int = vllm_config.scheduler_config.max_num_seqs
        self._present: list[_Tracked] = []
        self._absent: list[_Tracked] = []  # longest absent first
        self._stamp = self._file_stamp()
        self._history = self._first_history()

    def _first_history(self) -> RolloutHistory:
        if self._path is None:
            assert _shared is not None
            return _shared
        try:
            return RolloutHistory.load(self._path)
        except OSError as error:
            said = f"additional_config[{HISTORY!r}] must be a file that RolloutHistory.save wrote: {error.strerror}"
            raise type(error)(error.errno, said, os.fspath(self._path)) from error

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Part of vLLM's interface: there is no model to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for the B sequences of a step.

        Args:
            sampled_token_ids: B lists, what each sequence has just got: the accepted draft tokens and one more; empty
                while its prompt is not computed whole.
            num_tokens_no_spec: integers [>= B], length of each sequence, these tokens included.
            token_ids_cpu: int32 [>= B, longest], the sequences.
            slot_mappings: not used.

        Returns:
            B drafts of 0 .. num_speculative_tokens tokens.
        """
        self._refresh()
        rows = [i for i, new in enumerate(sampled_token_ids) if new]
        if not rows:
            return [[] for _ in sampled_token_ids]
        lengths = [int(num_tokens_no_spec[i]) for i in rows]
        news = [np.asarray(sampled_token_ids[i], np.int32) for i in rows]
        before = [token_ids_cpu[i, : n - len(new)].astype(np.int32) for i, n, new in zip(rows, lengths, news)]
        tracked = self._recognise(before)
        self._judge(tracked, news)
        handles = [seq.handle for seq in tracked]
        self._history.extend_tracked(handles, np.concatenate(news), [len(new) for new in news])
        ids, counts = self._history.draft_tracked(handles, max_tokens=self._limit)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, seq, new, length, guess, count in zip(
            rows, tracked, news, lengths, ids.tolist(), counts.tolist(), strict=True
        ):
            room = max(self._max_length - length - 1, 0)
            seq.tokens += new.tobytes()
            # a history of another tokenizer may hold ids that this model does not have
            seq.draft = list(takewhile(lambda t: t < self._vocab_size, guess[: min(count, room)]))
            drafts[row] = list(seq.draft)
        return drafts

    def _recognise(self, before: list[np.ndarray]) -> list[_Tracked]:
        """The tracked sequences that hold these tokens, new ones where there are none; the others become absent."""
        known: dict[tuple[int, bytes], list[_Tracked]] = {}
        for seq in (*self._absent, *self._present):
            known.setdefault(_key(seq.tokens), []).append(seq)
        found = []
        for ids in before:
            tokens = bytearray(ids.tobytes())
            same = known.get(_key(tokens), [])
            at = next((j for j, seq in enumerate(same) if seq.tokens == tokens), None)
            found.append(_Tracked(ids, tokens, self._follow(ids, ids)) if at is None else same.pop(at))
        left = {id(seq) for group in known.values() for seq in group}
        for seq in self._present:
            if id(seq) in left:
                seq.draft = []
        absent = [seq for seq in (*self._absent, *self._present) if id(seq) in left]
        surplus = max(len(absent) - self._max_absent, 0)
        for seq in absent[:surplus]:
            self._history.release(seq.handle)
        self._present, self._absent = found, absent[surplus:]
        return found

    def _follow(self, prompt: np.ndarray, tokens: np.ndarray) -> int:
        """Tracks a sequence that began as ``prompt``; what follows the prompt that the history knows is its answer."""
        length = self._history.longest_prompt(prompt) or len(prompt)
        handle = self._history.track(tokens[:length])
        self._history.extend(handle, tokens[length:])
        return handle

    def _judge(self, tracked: list[_Tracked], news: list[np.ndarray]) -> None:
        """Tells the history what became of the last drafts."""
        offered, accepted = [], []
        for seq, new in zip(tracked, news):
            right = min(len(new) - 1, len(seq.draft))
            # where the next token is right too, vLLM had no room to verify it
            cut = right < len(seq.draft) and new[right] == seq.draft[right]
            offered.append(right if cut else len(seq.draft))
            accepted.append(right)
        self._history.observe([seq.handle for seq in tracked], offered, accepted)

    def _refresh(self) -> None:
        """Reads the file again if it is another one now."""
        stamp = self._file_stamp()
        if stamp == self._stamp or self._path is None:
            return
        self._stamp = stamp
        try:
            self._history = RolloutHistory.load(self._path)
        except (OSError, ValueError) as error:
            logger.warning("the history %s was not read again: %s", self._path, error)
            return
        for seq in (*self._absent, *self._present):
            seq.handle = self._follow(seq.prompt, np.frombuffer(seq.tokens, np.int32))

    def _file_stamp(self) -> tuple[int, ...] | None:
        try:
            facts = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return facts and (facts.st_ino, facts.st_mtime_ns, facts.st_size)


def _key(tokens: bytearray) -> tuple[int, bytes]:
    """What tells most sequences apart: the length and the last 16 tokens."""
    return len(tokens), bytes(tokens[-64:])
