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

from rlkernels.history import RolloutHistory

__all__ = ["HistoryProposer", "share_history"]

HISTORY, RECORD = "rlkernels_history", "rlkernels_record"  # keys of vLLM's additional_config
MOST_TOKENS = 10_000_000  # of answers in a history that fills itself
NEW_SHARE = 0.1  # of a recorded history's tokens: so much that is new is written at once

if tuple(vllm.__version_tuple__[:2]) < (0, 32):
    raise ImportError(f"rlkernels.integrations.vllm needs vllm >= 0.32, found {vllm.__version__}")

logger = logging.getLogger(__name__)
_shared: RolloutHistory | None = None


def share_history(history: RolloutHistory | None) -> None:
    """Gives proposers of this process a history that goes on being filled, or another one; None: no drafts.

    Only an engine in this process sees it (``VLLM_ENABLE_V1_MULTIPROCESSING=0``). One that is shared when the engine is
    made is not filled by the engine: its owner adds the answers.

    Args:
        history: what they draft from, from the next step on.

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
    tokens: bytes  # int32, prompt and answer so far
    handle: int | None  # None: the history does not know its prompt
    draft: list[int] = field(default_factory=list)  # the last one, not judged yet


def _expand(
    x: torch.Tensor, ends: torch.Tensor, total: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Repeat a number per sequence [B] for each of its tokens -> [total]; ``ends`` [B] are cumulative token counts."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    expanded = x.repeat_interleave(counts, output_size=total)
    return expanded.masked_fill(expanded == replace_from, replace_to)


def mend_sampler() -> None:
    """Replace functions of vLLM where they are wrong, whatever made the drafts.

    On a CPU vLLM 0.32 writes the temperature and top-p of verified tokens into a copy that it throws away, and samples
    with what the memory held before; and it fails with top-k in a step without a draft.
    """
    from vllm.platforms import current_platform

    rejection_sampler: Any = sys.modules.get("vllm.v1.sample.rejection_sampler")  # on a CPU only engines import it
    if not current_platform.is_cpu() or rejection_sampler is None:
        return
    if rejection_sampler.expand_batch_to_tokens is not _expand:
        mask = rejection_sampler.apply_top_k_top_p
        rejection_sampler.expand_batch_to_tokens = _expand
        rejection_sampler.apply_top_k_top_p = lambda logits, k, p: mask(logits, k, p) if len(logits) else logits


def _end_tokens(model_config: Any) -> set[int]:
    """Return the tokens that end an answer, of config.json and of generation_config.json, as vLLM's sampler stops."""
    ends: set[int] = set()
    generation = model_config.try_get_generation_config()
    for value in (getattr(model_config.hf_config, "eos_token_id", None), generation.get("eos_token_id")):
        if value is not None:
            ends |= set(value) if isinstance(value, list | tuple) else {value}
    return ends


class HistoryProposer:
    """Continues sequences as :class:`rlkernels.RolloutHistory` remembers them; vLLM verifies what it proposes.

    The history is one of these:

    - the file that ``additional_config={"rlkernels_history": path}`` names, written by ``RolloutHistory.save``. The
      proposer reads it again whenever it has been replaced;
    - that file and the answers of this engine, with ``"rlkernels_record": True``. A missing file is an empty history.
      The proposer writes the file when an epoch begins, when a tenth of the tokens is new, and when the engine ends.
      Engines that record into one file keep each other's answers;
    - the history given to :func:`share_history`;
    - else a history of this engine's answers.

    An answer joins when its sequence has left the engine; without an end-of-sequence token, when the engine begins
    another sequence. An epoch ends when a prompt comes again that has answers of this epoch and none under way. The
    proposer looks a sequence up under the longest known prompt that vLLM's prompt begins with, so the prefix of a
    suffix rollout counts as the start of an answer. It drafts nothing for other prompts: those drafts cost more than
    they save.

    Args:
        vllm_config: vLLM's, with ``num_speculative_tokens`` the longest draft.

    Raises:
        ValueError: the file is damaged, a key of ``additional_config`` is misspelt, or there is no path to record to.
        TypeError: what was given is not a path.
        OSError: the file cannot be read.
    """

    def __init__(self, vllm_config: Any) -> None:
        additional = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
        if wrong := [k for k in additional if str(k).startswith("rlkernel") and k not in (HISTORY, RECORD)]:
            raise ValueError(
                f"additional_config has {wrong[0]!r}, which nothing reads; write {HISTORY!r} or {RECORD!r}"
            )
        self._path: str | os.PathLike[str] | None = additional.get(HISTORY)
        if not isinstance(self._path, str | os.PathLike | None):
            raise TypeError(
                f"additional_config[{HISTORY!r}] must be the path of a file that RolloutHistory.save wrote, got "
                f"{self._path!r}"
            )
        record = additional.get(RECORD, False)
        if not isinstance(record, bool) or (record and self._path is None):
            raise ValueError(f"additional_config[{RECORD!r}] must be True beside {HISTORY!r}, or False, got {record!r}")
        mend_sampler()
        self._limit: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_length: int = vllm_config.model_config.max_model_len
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        # those of the last step, after preempted ones, which come back; finished ones cannot be told from them
        self._sequences: list[_Tracked] = []
        self._stamp = self._file_stamp()
        if self._path is None:
            first = _shared or RolloutHistory(max_tokens=MOST_TOKENS)
        elif record and self._stamp is None:
            first = RolloutHistory(max_tokens=MOST_TOKENS)
        else:
            first = RolloutHistory.load(self._path)
        self._history = first
        self._own = first if record or (self._path is None and _shared is None) else None
        self._ends = _end_tokens(vllm_config.model_config)
        newest = first.stats["newest_epoch"]
        self._epoch = 0 if newest is None else newest + 1
        self._answered = set[bytes]()  # prompts that have answers of this epoch
        self._unwritten: list[tuple[np.ndarray, np.ndarray, int]] = []  # prompt, answer, epoch
        # One of the workers that share the layers of a model records for all of them.
        parallel = vllm_config.parallel_config
        self._records = record and parallel.rank % parallel.tensor_parallel_size == 0
        if self._records:
            self._lock = f"{self._path}.lock"
            open(self._lock, "w").close()  # a folder that refuses it fails here
            # An engine drops its proposer, or its process ends; of exit functions workers run multiprocessing's alone.
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
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [i for i, new in enumerate(sampled_token_ids) if new]
        if not self._refresh() or not rows:
            return drafts
        lengths = [int(num_tokens_no_spec[i]) for i in rows]
        news = [np.asarray(sampled_token_ids[i], np.int32) for i in rows]
        before = [token_ids_cpu[i, : n - len(new)].astype(np.int32) for i, n, new in zip(rows, lengths, news)]
        tracked = self._recognise(before)
        for seq, new in zip(tracked, news):
            seq.tokens += new.tobytes()
        known = [j for j, seq in enumerate(tracked) if seq.handle is not None]
        handles = [seq.handle for seq in tracked if seq.handle is not None]
        if known:
            self._judge(handles, [tracked[j] for j in known], [news[j] for j in known])
        ids, counts = self._history.draft_tracked(handles, max_tokens=self._limit)
        for j, guess, count in zip(known, ids.tolist(), counts.tolist(), strict=True):
            room = max(self._max_length - lengths[j] - 1, 0)
            # a history of another tokenizer may hold ids that this model does not have
            tracked[j].draft = list(takewhile(lambda t: t < self._vocab_size, guess[: min(count, room)]))
            drafts[rows[j]] = list(tracked[j].draft)
        return drafts

    def _recognise(self, before: list[np.ndarray]) -> list[_Tracked]:
        """Find the tracked sequences with these tokens, or track new ones; all others become absent."""
        known: dict[bytes, list[_Tracked]] = {}
        for seq in self._sequences:
            known.setdefault(seq.tokens, []).append(seq)
        found = []
        for ids in before:
            same = known.get(tokens := ids.tobytes())
            found.append(same.pop(0) if same else _Tracked(ids, tokens, None))
        left = {id(seq) for group in known.values() for seq in group}
        new = [seq for seq in found if len(seq.tokens) == 4 * len(seq.prompt)]
        gone, absent = list[_Tracked](), list[_Tracked]()
        for seq in self._sequences:
            if id(seq) in left:
                seq.draft = []
                # vLLM begins a sequence when all that it preempted are back
                ended = new or int.from_bytes(seq.tokens[-4:], sys.byteorder) in self._ends
                (gone if ended else absent).append(seq)
        self._remember(gone, found)
        self._release(gone)
        for seq in new:
            seq.handle = self._follow(seq.prompt, seq.prompt)
        self._sequences = [*absent, *found]
        return found

    def _remember(self, gone: list[_Tracked], present: list[_Tracked]) -> None:
        """Adds the answers of sequences that have left; a prompt that comes again begins an epoch."""
        if self._history is not self._own:
            return
        for seq in gone:
            if len(answer := np.frombuffer(seq.tokens, np.int32)[len(seq.prompt) :]):
                self._history.add(seq.prompt, answer, epoch=self._epoch)
                self._answered.add(seq.prompt.tobytes())
                if self._records:
                    self._unwritten.append((seq.prompt, answer, self._epoch))
        under_way = {seq.prompt.tobytes() for seq in present if len(seq.tokens) > 4 * len(seq.prompt)}
        begun = {seq.prompt.tobytes() for seq in present} - under_way
        if again := begun & self._answered:
            self._epoch += 1
            self._answered.clear()
        new = sum(len(answer) for _, answer, _ in self._unwritten) if gone else 0
        if new and (again or new > NEW_SHARE * self._history.stats["tokens"]):
            self._write()

    def _write(self) -> None:
        """Write the recorded history; where another engine has written it, with that engine's answers."""
        if not self._unwritten or self._path is None:
            return
        with open(self._lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self._history if self._file_stamp() in (None, self._stamp) else self._read_again()
            if found is not self._history:
                for prompt, answer, epoch in self._unwritten:
                    found.add(prompt, answer, epoch=epoch)
                self._own = found
                self._take_over(found)
            try:
                found.save(self._path)
            except OSError as error:
                logger.warning("the history %s was not written: %s", self._path, error)
                return
            self._stamp = self._file_stamp()
        self._unwritten.clear()

    def __del__(self) -> None:
        if getattr(self, "_records", False):  # False, too, where __init__ failed
            self._close()

    def _close(self) -> None:
        """Record what the engine holds when it ends."""
        left, self._sequences = self._sequences, []
        self._remember(left, [])
        self._write()

    def _follow(self, prompt: np.ndarray, tokens: np.ndarray) -> int | None:
        """Tracks a sequence that began as ``prompt``; what follows the prompt that the history knows is its answer."""
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

    def _judge(self, handles: list[int], tracked: list[_Tracked], news: list[np.ndarray]) -> None:
        """Tells the history what became of the last drafts, and which tokens have come."""
        offered, accepted = [], []
        for seq, new in zip(tracked, news):
            right = min(len(new) - 1, len(seq.draft))
            # where the next token is right too, vLLM had no room to verify it
            cut = right < len(seq.draft) and new[right] == seq.draft[right]
            offered.append(right if cut else len(seq.draft))
            accepted.append(right)
        self._history.observe(handles, offered, accepted)
        self._history.extend_tracked(handles, np.concatenate(news), [len(new) for new in news])

    def _refresh(self) -> bool:
        """Takes over another history, where the file was replaced or another one is shared -> whether there is one."""
        found = self._read_again() if self._path is not None and self._own is None else _shared or self._own
        if found is not None and found is not self._history:
            self._take_over(found)
        return found is not None

    def _take_over(self, history: RolloutHistory) -> None:
        """Go on with another history."""
        self._release(self._sequences)
        self._history = history
        for seq in self._sequences:
            seq.handle, seq.draft = self._follow(seq.prompt, np.frombuffer(seq.tokens, np.int32)), []

    def _read_again(self) -> RolloutHistory:
        stamp = self._file_stamp()
        if stamp == self._stamp or self._path is None:
            return self._history
        self._stamp = stamp
        try:
            return RolloutHistory.load(self._path)
        except (OSError, ValueError) as error:
            logger.warning("the history %s was not read again: %s", self._path, error)
            return self._history

    def _file_stamp(self) -> tuple[int, ...] | None:
        try:
            facts = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return facts and (facts.st_ino, facts.st_mtime_ns, facts.st_size)


def _close(reference: "weakref.ref[HistoryProposer]") -> None:
    if (proposer := reference()) is not None:
        proposer._close()
