"""Drafts from earlier rollouts inside vLLM, as a custom proposer of its speculative decoding.

    llm = LLM(
        model,
        speculative_config={
            "method": "custom_class",
            "model": "rlkernels.integrations.vllm.HistoryProposer",
            "num_speculative_tokens": 16,
        },
    )

The proposer learns from what the engine generates. ``additional_config={"rlkernels_history": path}`` drafts from a file
of ``RolloutHistory.save`` instead. Needs vllm 0.32 or newer.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
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
MOST_TOKENS = 10_000_000  # of answers in a history that fills itself

if tuple(vllm.__version_tuple__[:2]) < OLDEST:
    raise ImportError(f"rlkernels.integrations.vllm needs vllm >= 0.32, found {vllm.__version__}")

logger = logging.getLogger(__name__)
_shared: RolloutHistory | None = None
_token_cost: Callable[[int], float | None] | None = None


def share_history(history: RolloutHistory | None, token_cost: Callable[[int], float | None] | None = None) -> None:
    """Gives proposers of this process a history that goes on being filled, or another one; None: no drafts.

    Only an engine in this process sees it (``VLLM_ENABLE_V1_MULTIPROCESSING=0``). One that is shared when the engine is
    made is not filled by the engine: whoever shares it adds the answers.

    Args:
        history: what they draft from, from the next step on.
        token_cost: number of sequences in a step -> what a draft token costs then, as of ``RolloutHistory``. None, and
            where it returns None: the history's own.

    Raises:
        TypeError: not a RolloutHistory.
    """
    global _shared, _token_cost
    if not isinstance(history, RolloutHistory | None):
        raise TypeError(f"history must be a RolloutHistory or None, got {history!r}")
    _shared, _token_cost = history, token_cost


@dataclass(eq=False)
class _Tracked:
    """A sequence that vLLM is generating; it tells no names, so sequences are known by their tokens."""

    prompt: np.ndarray  # int32 [P]
    tokens: bytearray  # int32, prompt and answer so far
    handle: int | None  # None: the history does not know its prompt
    draft: list[int] = field(default_factory=list)  # the last one, not judged yet


def _expand(
    x: torch.Tensor, ends: torch.Tensor, total: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Repeat a number per sequence [B] for each of its tokens -> [total]; ``ends`` [B] are cumulative token counts."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    expanded = x.repeat_interleave(counts, output_size=total)
    return expanded.masked_fill(expanded == replace_from, replace_to)


def _mend_sampler() -> None:
    """Replaces functions of vLLM where they are wrong, whatever made the drafts.

    On a CPU vLLM 0.32 writes the temperature and top-p of verified tokens into a copy that it throws away, and samples
    with what the memory held before; and it fails with top-k in a step without a draft.
    """
    from vllm.platforms import current_platform

    # an engine has imported it; by itself it can not be imported on a CPU
    rejection_sampler: Any = sys.modules.get("vllm.v1.sample.rejection_sampler")
    if not current_platform.is_cpu() or rejection_sampler is None:
        return
    if rejection_sampler.expand_batch_to_tokens is not _expand:
        mask = rejection_sampler.apply_top_k_top_p
        rejection_sampler.expand_batch_to_tokens = _expand
        rejection_sampler.apply_top_k_top_p = lambda logits, k, p: mask(logits, k, p) if len(logits) else logits


class HistoryProposer:
    """Continues sequences as :class:`rlkernels.RolloutHistory` remembers them; vLLM verifies what it proposes.

    The history is the file that ``additional_config={"rlkernels_history": path}`` names, written by
    ``RolloutHistory.save`` and read again whenever it has been replaced; else the one given to :func:`share_history`;
    else one that fills itself: an answer joins when its sequence has left the engine. There an epoch ends when a prompt
    comes again that has answers of this epoch and none under way. A sequence is looked up under the longest prompt in
    it that what vLLM got as its prompt begins with, so the prefix of a suffix rollout counts as the start of an answer.
    Where there is none, it is left alone: what other prompts suggest costs more than it saves.

    Args:
        vllm_config: vLLM's, with ``num_speculative_tokens`` the longest draft.

    Raises:
        ValueError: the file is damaged, or the key of ``additional_config`` is misspelt.
        TypeError: what was given is not a path.
        OSError: the file cannot be read.
    """

    def __init__(self, vllm_config: Any) -> None:
        additional = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
        if wrong := [key for key in additional if str(key).startswith("rlkernel") and key != HISTORY]:
            raise ValueError(f"additional_config has {wrong[0]!r}, which nothing reads; write {HISTORY!r}")
        self._path: str | os.PathLike[str] | None = additional.get(HISTORY)
        if not isinstance(self._path, str | os.PathLike | None):
            raise TypeError(
                f"additional_config[{HISTORY!r}] must be the path of a file that RolloutHistory.save wrote, got "
                f"{self._path!r}"
            )
        _mend_sampler()
        self._limit: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_length: int = vllm_config.model_config.max_model_len
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        # Preempted sequences come back, and cannot be told from finished ones: so many that have left are kept.
        self._max_absent: int = vllm_config.scheduler_config.max_num_seqs
        self._present: list[_Tracked] = []
        self._absent: list[_Tracked] = []  # longest absent first
        self._stamp = self._file_stamp()
        self._own = RolloutHistory(max_tokens=MOST_TOKENS) if self._path is None and _shared is None else None
        first = self._own or _shared if self._path is None else RolloutHistory.load(self._path)
        assert first is not None
        self._history = first
        self._ends = _end_tokens(vllm_config.model_config)
        self._epoch, self._answered = 0, set[bytes]()  # prompts that have answers of this epoch

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
        if known:
            self._judge([tracked[j] for j in known], [news[j] for j in known])
            self._draft([tracked[j] for j in known], len(rows))
        for j in known:
            room = max(self._max_length - lengths[j] - 1, 0)
            del tracked[j].draft[room:]
            drafts[rows[j]] = list(tracked[j].draft)
        return drafts

    def _draft(self, tracked: list[_Tracked], running: int) -> None:
        """Gives sequences their next drafts; ``running`` is how many there are in all."""
        cost = None if self._path is not None or _token_cost is None else _token_cost(running)
        handles = [seq.handle for seq in tracked if seq.handle is not None]  # all
        ids, counts = self._history.draft_tracked(handles, max_tokens=self._limit, token_cost=cost)
        for seq, guess, count in zip(tracked, ids.tolist(), counts.tolist(), strict=True):
            # a history of another tokenizer may hold ids that this model does not have
            seq.draft = list(takewhile(lambda t: t < self._vocab_size, guess[:count]))

    def _recognise(self, before: list[np.ndarray]) -> list[_Tracked]:
        """Find the tracked sequences with these tokens, or track new ones; all others become absent."""
        known: dict[tuple[int, bytes], list[_Tracked]] = {}
        for seq in (*self._absent, *self._present):
            known.setdefault(_key(seq.tokens), []).append(seq)
        found = []
        for ids in before:
            tokens = bytearray(ids.tobytes())
            same = known.get(_key(tokens), [])
            at = next((j for j, seq in enumerate(same) if seq.tokens == tokens), None)
            found.append(_Tracked(ids, tokens, None) if at is None else same.pop(at))
        left = {id(seq) for group in known.values() for seq in group}
        for seq in self._present:
            if id(seq) in left:
                seq.draft = []
        absent = [seq for seq in (*self._absent, *self._present) if id(seq) in left]
        gone = [seq for seq in absent if int.from_bytes(seq.tokens[-4:], sys.byteorder) in self._ends]
        absent = [seq for seq in absent if seq not in gone]
        surplus = max(len(absent) - self._max_absent, 0)
        gone += absent[:surplus]
        self._remember(gone, found)
        self._release(gone)
        new = [seq for seq in found if len(seq.tokens) == 4 * len(seq.prompt) and seq.handle is None]
        for seq in new:
            seq.handle = self._follow(seq.prompt, seq.prompt)
        self._present, self._absent = found, absent[surplus:]
        return found

    def _remember(self, gone: list[_Tracked], present: list[_Tracked]) -> None:
        """Adds the answers of sequences that have left; a prompt that comes again begins an epoch."""
        if self._history is not self._own:
            return
        for seq in gone:
            if len(answer := np.frombuffer(seq.tokens, np.int32)[len(seq.prompt) :]):
                self._history.add(seq.prompt, answer, epoch=self._epoch)
                self._answered.add(seq.prompt.tobytes())
        under_way = {seq.prompt.tobytes() for seq in present if len(seq.tokens) > 4 * len(seq.prompt)}
        begun = {seq.prompt.tobytes() for seq in present} - under_way
        if begun & self._answered:
            self._epoch += 1
            self._answered.clear()

    def _follow(self, prompt: np.ndarray, tokens: np.ndarray) -> int | None:
        """Tracks a sequence that began as ``prompt``; what follows the prompt that the history knows is its answer."""
        length = self._history.longest_prompt(prompt)
        if not length:
            return None
        handle = self._history.track(tokens[:length])
        self._history.extend(handle, tokens[length:])
        return handle

    def _release(self, tracked: Sequence[_Tracked]) -> None:
        for seq in tracked:
            if seq.handle is not None:
                self._history.release(seq.handle)

    def _judge(self, tracked: list[_Tracked], news: list[np.ndarray]) -> None:
        """Tells the history what became of the last drafts, and which tokens have come."""
        offered, accepted = [], []
        for seq, new in zip(tracked, news):
            right = min(len(new) - 1, len(seq.draft))
            # where the next token is right too, vLLM had no room to verify it
            cut = right < len(seq.draft) and new[right] == seq.draft[right]
            offered.append(right if cut else len(seq.draft))
            accepted.append(right)
        handles = [seq.handle for seq in tracked if seq.handle is not None]  # all
        self._history.observe(handles, offered, accepted)
        self._history.extend_tracked(handles, np.concatenate(news), [len(new) for new in news])

    def _refresh(self) -> bool:
        """Takes over another history, where the file was replaced or another one is shared -> whether there is one."""
        found = self._read_again() if self._path is not None else _shared or self._own
        if found is not None and found is not self._history:
            self._release((*self._absent, *self._present))
            self._history = found
            for seq in (*self._absent, *self._present):
                seq.handle, seq.draft = self._follow(seq.prompt, np.frombuffer(seq.tokens, np.int32)), []
        return found is not None

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


def _end_tokens(model_config: Any) -> set[int]:
    """Return the tokens after which a sequence is finished."""
    found = getattr(getattr(model_config, "hf_config", None), "eos_token_id", None)
    return set(found) if isinstance(found, list | tuple) else set() if found is None else {found}


def _key(tokens: bytearray) -> tuple[int, bytes]:
    """Return what tells most sequences apart: the length and the last 16 tokens."""
    return len(tokens), bytes(tokens[-64:])
