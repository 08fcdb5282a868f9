"""Drafts from earlier rollouts inside vLLM, as a custom proposer of its speculative decoding.

    llm = LLM(
        model,
        speculative_config={
            "method": "custom_class",
            "model": "rlkernels.integrations.vllm.HistoryProposer",
            "num_speculative_tokens": 16,
        },
    )

Needs vllm 0.32 or newer.
"""

import copy
import fcntl
import logging
import os
import sys
import weakref
from dataclasses import dataclass, field
from itertools import takewhile
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
import vllm

from rlkernels.history import HISTORY_TOKENS, RolloutHistory

__all__ = ["HistoryProposer", "share_history"]

HISTORY, RECORD = "rlkernels_history", "rlkernels_record"  # keys of vLLM's additional_config
NEW_SHARE = 0.1  # of a recorded history's tokens: more new tokens than this are written at once
LONGEST_DRAFT = 128  # vLLM's MAX_SPEC_LEN: its sampler ends the engine at a longer one

if tuple(vllm.__version_tuple__[:2]) < (0, 32):
    raise ImportError(f"rlkernels.integrations.vllm needs vllm >= 0.32, found {vllm.__version__}")

logger = logging.getLogger(__name__)
_shared: RolloutHistory | None = None


def share_history(history: RolloutHistory | None) -> None:
    """Let the proposers of this process that have no file draft from a history; None: no drafts.

    Only an engine in this process sees it (``VLLM_ENABLE_V1_MULTIPROCESSING=0``). An engine that starts with a shared
    history does not fill it: its owner adds the answers.

    Args:
        history: the source of drafts from the next step on.

    Raises:
        TypeError: not a RolloutHistory.
    """
    global _shared
    if not isinstance(history, RolloutHistory | None):
        raise TypeError(f"history must be a RolloutHistory or None, got {history!r}")
    _shared = history


@dataclass(eq=False)
class _Tracked:
    """A sequence that vLLM is generating; vLLM gives no request ids here, so its tokens identify it."""

    prompt: np.ndarray  # int32 [P]
    tokens: bytes  # int32, prompt and answer so far
    handle: int | None  # None: the history does not know its prompt
    draft: list[int] = field(default_factory=list)  # the last one, not observed yet


def _expand(
    x: torch.Tensor, ends: torch.Tensor, total: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Repeat a number per sequence [B] for each of its tokens, [total]; ``ends`` [B] are cumulative token counts."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    expanded = x.repeat_interleave(counts, output_size=total)
    return expanded.masked_fill(expanded == replace_from, replace_to)


def mend_sampler() -> None:
    """Replace two faulty functions of vLLM's sampler, which all drafts need.

    On a CPU vLLM 0.32 writes the temperature and top-p of verified tokens into a temporary copy, and samples with
    uninitialized memory; and it fails with top-k in a step without a draft.
    """
    from vllm.platforms import current_platform

    rejection_sampler: Any = sys.modules.get("vllm.v1.sample.rejection_sampler")  # on a CPU only engines import it
    if not current_platform.is_cpu() or rejection_sampler is None:
        return
    if rejection_sampler.expand_batch_to_tokens is not _expand:
        mask = rejection_sampler.apply_top_k_top_p
        rejection_sampler.expand_batch_to_tokens = _expand
        rejection_sampler.apply_top_k_top_p = lambda logits, k, p: mask(logits, k, p) if len(logits) else logits


def ask_near_the_limit(vllm_config: Any) -> None:
    """Let vLLM ask its proposer in each step.

    While a sequence ends closer to the limit of the draft model than the longest draft, vLLM does not ask, and verifies
    zeros as the drafts of all sequences. It takes the model itself for the draft model of a custom proposer.
    """
    speculative_config = vllm_config.speculative_config
    draft_model_config = copy.copy(vllm_config.model_config)
    draft_model_config.max_model_len += speculative_config.num_speculative_tokens
    speculative_config.draft_model_config = draft_model_config


def _end_tokens(model_config: Any) -> set[int]:
    """Return the end-of-sequence tokens of config.json and generation_config.json, at which vLLM's sampler stops."""
    ends: set[int] = set()
    generation = model_config.try_get_generation_config()
    for value in (getattr(model_config.hf_config, "eos_token_id", None), generation.get("eos_token_id")):
        if value is not None:
            ends |= set(value) if isinstance(value, list | tuple) else {value}
    return ends


def _load(path: str | os.PathLike[str], is_filled: bool) -> RolloutHistory:
    """Read the history in a file, which may have no bound; one that this engine fills gets its bound."""
    history = RolloutHistory.load(path)
    if is_filled:
        history.resize(HISTORY_TOKENS)
    return history


class HistoryProposer:
    """Draft continuations from a :class:`rlkernels.RolloutHistory`; vLLM verifies them.

    The history is one of these:

    - the file that ``additional_config={"rlkernels_history": path}`` names, written by ``RolloutHistory.save``. The
      proposer reads it again whenever it has been replaced;
    - that file and the answers of this engine, with ``"rlkernels_record": True``. A missing file is an empty history.
      The proposer writes the file when an epoch begins, when a tenth of the tokens is new, and when the engine ends.
      Engines that record into one file keep each other's answers, at most 10 million tokens of them;
    - the history given to :func:`share_history`;
    - else a history of this engine's answers.

    An answer joins the history when its sequence has left the engine; without an end-of-sequence token, when the engine
    begins another sequence. An epoch ends when a prompt returns that has answers of this epoch and none in progress.
    The proposer looks a sequence up under the longest known prompt that vLLM's prompt begins with, so the prefix of a
    suffix rollout counts as the start of an answer. It drafts nothing for other prompts: those drafts cost more than
    they save.

    Args:
        vllm_config: vLLM's, with ``num_speculative_tokens`` the longest draft.

    Raises:
        ValueError: the file is damaged, a key of ``additional_config`` is misspelt, there is no path to record to, or
            ``num_speculative_tokens`` is above 128.
        TypeError: ``rlkernels_history`` is not a path.
        OSError: the file cannot be read.
    """

    def __init__(self, vllm_config: Any) -> None:
        additional = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
        for key in additional:
            if str(key).startswith("rlkernel") and key not in (HISTORY, RECORD):
                raise ValueError(f"additional_config has {key!r}, which nothing reads; write {HISTORY!r} or {RECORD!r}")
        self._path: str | os.PathLike[str] | None = additional.get(HISTORY)
        if not isinstance(self._path, str | os.PathLike | None):
            raise TypeError(
                f"additional_config[{HISTORY!r}] must be the path of a file that RolloutHistory.save wrote, got "
                f"{self._path!r}"
            )
        record = additional.get(RECORD, False)
        if not isinstance(record, bool) or (record and self._path is None):
            raise ValueError(f"additional_config[{RECORD!r}] must be True beside {HISTORY!r}, or False, got {record!r}")
        self._limit: int = vllm_config.speculative_config.num_speculative_tokens
        if self._limit > LONGEST_DRAFT:
            raise ValueError(f"num_speculative_tokens must be at most {LONGEST_DRAFT} in vLLM, got {self._limit}")
        mend_sampler()
        ask_near_the_limit(vllm_config)
        self._max_length: int = vllm_config.model_config.max_model_len
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        # Absent sequences, then those of the last step. Absent: preempted, and finished ones that look the same.
        self._sequences: list[_Tracked] = []
        self._stamp = self._file_stamp()
        if self._path is None:
            history = _shared or RolloutHistory(max_tokens=HISTORY_TOKENS)
        elif record and self._stamp is None:
            history = RolloutHistory(max_tokens=HISTORY_TOKENS)
        else:
            history = _load(self._path, record)
        self._history = history
        # the history that this engine fills
        self._filled = history if record or (self._path is None and _shared is None) else None
        self._ends = _end_tokens(vllm_config.model_config)
        newest = history.stats["newest_epoch"]
        self._epoch = 0 if newest is None else newest + 1
        self._answered = set[bytes]()  # prompts with answers of this epoch
        self._unwritten: list[tuple[np.ndarray, np.ndarray, int]] = []  # prompt, answer, epoch
        # Tensor-parallel workers see the same answers: the first of them records.
        parallel = vllm_config.parallel_config
        self._records = record and parallel.rank % parallel.tensor_parallel_size == 0
        if self._records:
            self._lock = f"{self._path}.lock"
            open(self._lock, "w").close()  # fails here if the folder is not writable
            # Write also when the process ends. Workers skip atexit and run only multiprocessing's exit functions.
            Finalize(None, _close, args=(weakref.ref(self),), exitpriority=1)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: vLLM calls it, but there is no model to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafts for the B sequences of a step.

        Args:
            sampled_token_ids: B lists of new tokens: the accepted draft tokens and one more; empty while the prompt is
                not fully computed.
            num_tokens_no_spec: integers [>= B], length of each sequence, these tokens included.
            token_ids_cpu: int32 [>= B, longest], the sequences.
            slot_mappings: not used.

        Returns:
            B drafts of 0 .. num_speculative_tokens tokens.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [i for i, new in enumerate(sampled_token_ids) if new]
        if not self._refresh() or not rows:
            return drafts
        lengths = [int(num_tokens_no_spec[i]) for i in rows]
        sampled = [np.asarray(sampled_token_ids[i], np.int32) for i in rows]
        previous = [token_ids_cpu[i, : n - len(new)].astype(np.int32) for i, n, new in zip(rows, lengths, sampled)]
        tracked = self._match(previous)
        for seq, new in zip(tracked, sampled):
            seq.tokens += new.tobytes()
        drafted = [j for j, seq in enumerate(tracked) if seq.handle is not None]
        handles = [seq.handle for seq in tracked if seq.handle is not None]
        if drafted:
            self._observe(handles, [tracked[j] for j in drafted], [sampled[j] for j in drafted])
        ids, counts = self._history.draft_tracked(handles, max_tokens=self._limit)
        for j, draft, count in zip(drafted, ids.tolist(), counts.tolist(), strict=True):
            room = max(self._max_length - lengths[j] - 1, 0)
            # a history of another tokenizer may hold ids that this model does not have
            tracked[j].draft = list(takewhile(lambda token: token < self._vocab_size, draft[: min(count, room)]))
            drafts[rows[j]] = list(tracked[j].draft)
        return drafts

    def _match(self, previous: list[np.ndarray]) -> list[_Tracked]:
        """Return the tracked sequences with these tokens, and track new ones; all others become absent."""
        by_tokens: dict[bytes, list[_Tracked]] = {}
        for seq in self._sequences:
            by_tokens.setdefault(seq.tokens, []).append(seq)
        present: list[_Tracked] = []
        for ids in previous:
            tokens = ids.tobytes()
            matches = by_tokens.get(tokens)
            present.append(matches.pop(0) if matches else _Tracked(ids, tokens, None))
        unmatched = {id(seq) for seqs in by_tokens.values() for seq in seqs}
        new = [seq for seq in present if len(seq.tokens) == 4 * len(seq.prompt)]
        finished: list[_Tracked] = []
        absent: list[_Tracked] = []
        for seq in self._sequences:
            if id(seq) in unmatched:
                seq.draft = []
                # vLLM begins a new sequence only after all preempted ones have returned
                is_finished = new or int.from_bytes(seq.tokens[-4:], sys.byteorder) in self._ends
                (finished if is_finished else absent).append(seq)
        self._add_answers(finished, present)
        self._release(finished)
        for seq in new:
            seq.handle = self._follow(seq.prompt, seq.prompt)
        self._sequences = [*absent, *present]
        return present

    def _add_answers(self, finished: list[_Tracked], present: list[_Tracked]) -> None:
        """Add the answers of finished sequences to the history; a prompt that returns begins an epoch."""
        if self._history is not self._filled:
            return
        for seq in finished:
            answer = np.frombuffer(seq.tokens, np.int32)[len(seq.prompt) :]
            if len(answer):
                self._history.add(seq.prompt, answer, epoch=self._epoch)
                self._answered.add(seq.prompt.tobytes())
                if self._records:
                    self._unwritten.append((seq.prompt, answer, self._epoch))
        in_progress = {seq.prompt.tobytes() for seq in present if len(seq.tokens) > 4 * len(seq.prompt)}
        new_prompts = {seq.prompt.tobytes() for seq in present} - in_progress
        begins_epoch = bool(new_prompts & self._answered)
        if begins_epoch:
            self._epoch += 1
            self._answered.clear()
        unwritten = sum(len(answer) for _, answer, _ in self._unwritten) if finished else 0
        if unwritten and (begins_epoch or unwritten > NEW_SHARE * self._history.stats["tokens"]):
            self._write()

    def _write(self) -> None:
        """Write the recorded history, with the answers of another engine that has written the file since."""
        if not self._unwritten or self._path is None:
            return
        with open(self._lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            history = self._history if self._file_stamp() in (None, self._stamp) else self._read_again()
            if history is not self._history:
                for prompt, answer, epoch in self._unwritten:
                    history.add(prompt, answer, epoch=epoch)
                self._filled = history
                self._switch_to(history)
            try:
                history.save(self._path)
            except OSError as error:
                logger.warning("the history %s was not written: %s", self._path, error)
                return
            self._stamp = self._file_stamp()
        self._unwritten.clear()

    def __del__(self) -> None:
        if getattr(self, "_records", False):  # also False if __init__ failed
            self._close()

    def _close(self) -> None:
        """Record the answers that the engine holds when it ends."""
        finished = self._sequences
        self._sequences = []
        self._add_answers(finished, [])
        self._write()

    def _follow(self, prompt: np.ndarray, tokens: np.ndarray) -> int | None:
        """Track a sequence that began as ``prompt``; its answer begins where the history's longest prompt ends."""
        length = self._history.longest_prompt(prompt)
        if not length:
            return None
        handle = self._history.track(tokens[:length])
        self._history.extend(handle, tokens[length:])
        return handle

    def _release(self, tracked: list[_Tracked]) -> None:
        for seq in tracked:
            if seq.handle is not None:
                self._history.release(seq.handle)

    def _observe(self, handles: list[int], tracked: list[_Tracked], sampled: list[np.ndarray]) -> None:
        """Give the history feedback on the last drafts, and the new tokens."""
        offered: list[int] = []
        accepted: list[int] = []
        for seq, new in zip(tracked, sampled):
            num_accepted = min(len(new) - 1, len(seq.draft))
            # if the next draft token matches as well, vLLM had no room to verify it
            was_cut = num_accepted < len(seq.draft) and new[num_accepted] == seq.draft[num_accepted]
            offered.append(num_accepted if was_cut else len(seq.draft))
            accepted.append(num_accepted)
        self._history.observe(handles, offered, accepted)
        self._history.extend_tracked(handles, np.concatenate(sampled), [len(new) for new in sampled])

    def _refresh(self) -> bool:
        """Switch to the history of a replaced file, or to one newly shared; return whether there is a history."""
        if self._path is None:
            history = _shared or self._filled
        elif self._filled is None:
            history = self._read_again()
        else:
            history = self._filled
        if history is not None and history is not self._history:
            self._switch_to(history)
        return history is not None

    def _switch_to(self, history: RolloutHistory) -> None:
        """Release all sequences, and track them in another history."""
        self._release(self._sequences)
        self._history = history
        for seq in self._sequences:
            seq.handle = self._follow(seq.prompt, np.frombuffer(seq.tokens, np.int32))
            seq.draft = []

    def _read_again(self) -> RolloutHistory:
        """Return the history in the file if it was replaced and is readable, else the present one."""
        stamp = self._file_stamp()
        if stamp == self._stamp or self._path is None:
            return self._history
        self._stamp = stamp
        try:
            return _load(self._path, self._filled is not None)
        except (OSError, ValueError) as error:
            logger.warning("the history %s was not read again: %s", self._path, error)
            return self._history

    def _file_stamp(self) -> tuple[int, ...] | None:
        """Return values that change when the file is replaced; None without a file."""
        if self._path is None:
            return None
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _close(reference: "weakref.ref[HistoryProposer]") -> None:
    if (proposer := reference()) is not None:
        proposer._close()
