"""Which sequences run in the next forward pass: continuous batching, chunked prefill, preemption.

A :class:`Prefill` is a run of tokens to compute, once, for one or more samples; when its last token is computed it is
forked into them. A running sample holds one token that was drawn and is not computed yet; a drafter adds its guesses
behind it, and what they leave in the cache is cut off again where they were wrong. When blocks run out, drafts give way
first, then the youngest work: it is closed, queued again as a prefill of all the tokens it has, and computed anew. The
oldest sample is never preempted, so there is always progress.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from python_trainer.rollout.drafting import Decoding, Drafter
from python_trainer.rollout.paged.running import Running, Spans
from rlkernels import OutOfBlocks, PagedKVCache
from rlkernels.prefix_cache import Sequence


@dataclass(eq=False)
class Prefill:
    """Tokens to compute once for all samples that continue from there."""

    tokens: list[int]
    samples: list[Decoding]
    sequence: Sequence = field(init=False)
    computed: int = field(init=False)


@dataclass
class Pass:
    """One forward pass: T tokens of B sequences, flattened, of which R get logits.

    First come the samples that decode, in the order of the running ones; each of their tokens gets logits.
    """

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    slots: torch.Tensor  # int64 [T]
    sequences: list[Sequence]  # [B]
    seq_lens: np.ndarray  # int64 [B]
    query_lens: np.ndarray  # int64 [B]
    rows: np.ndarray  # int64 [R], the tokens that get logits
    decoding: Spans  # the tokens of the samples that decode
    prefilled: list[Prefill] = field(default_factory=list)  # jobs whose last token is in this pass


class Scheduler:
    """Hold the queues and every open sequence."""

    drafter: Drafter | None = None
    keep_answers = False  # the cache keeps what was computed of answers that are done

    def __init__(self, cache: PagedKVCache, max_sequences: int, max_batch_tokens: int, stats: dict[str, float]):
        self.cache = cache
        self.stats = stats
        self.max_sequences = max_sequences
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Prefill] = deque()
        self.filling: list[Prefill] = []
        self.running = Running()

    def add(self, tokens: list[int], samples: list[Decoding]) -> None:
        for start in range(0, len(samples), self.max_sequences):
            self.waiting.append(Prefill(tokens, samples[start : start + self.max_sequences]))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.filling or self.running)

    def next_pass(self) -> Pass:
        forward_pass, preempted = self._decode()
        if not preempted:
            self._admit()
        self._add_prefill(forward_pass)
        return forward_pass

    def fork_prefilled(self, forward_pass: Pass) -> None:
        """Fork the jobs that the pass has prefilled into their samples."""
        for job in forward_pass.prefilled:
            self.cache.commit(job.sequence)
            self.filling.remove(job)
            # the job's own sequence serves its first sample
            first, *forked = job.samples
            first.sequence = job.sequence
            for sample, sequence in zip(forked, self.cache.fork(job.sequence, len(forked))):
                sample.sequence = sequence
            self.stats["cached_tokens"] += len(forked) * len(job.tokens)
            self.running.add(job.samples)
            if self.drafter:
                self.drafter.start(job.samples)

    def finish(self, spans: Spans, num_new: np.ndarray, done: np.ndarray) -> list[Decoding]:
        """Cut off drafts from where they were wrong, and close the samples that are done; return those.

        Args:
            spans: the draws of the running samples.
            num_new: int64 [B], how many of its draws are tokens of a sample.
            done: bool [B].
        """
        for i in (num_new < spans.counts).nonzero()[0]:
            self.cache.truncate(self.running.samples[i].sequence, self.running.state["length"][i] - 1)
        if not done.any():
            return []
        removed = self.running.remove(done)
        for sample in removed:
            if self.keep_answers:
                self.cache.commit(sample.sequence)
            self.cache.close(sample.sequence)
        if self.drafter:
            self.drafter.stop(removed)
        return removed

    def _draft(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the draft tokens of all running samples, one after the other, and their number of each."""
        state = self.running.state
        if self.drafter is None:
            return np.empty(0, np.int64), np.zeros(len(state), np.int64)
        # one token a sample is computed anyway, and a prefill needs room for one
        budget = self.max_batch_tokens - len(state) - 1
        return self.drafter.draft(self.running.samples, state["max_length"] - state["length"] - 1, budget)

    def _decode(self) -> tuple[Pass, bool]:
        """Append the drawn token and the draft of every running sample to the cache; drafts give way first.

        Returns:
            A pass of these tokens, and whether samples were preempted.
        """
        draft_ids, draft_lens = self._draft()
        preempted = False
        while True:
            state = self.running.state
            spans = Spans.of(1 + draft_lens)
            ids = np.empty(len(spans.owner), np.int64)
            ids[spans.starts] = state["last_id"]
            ids[spans.offset > 0] = draft_ids
            sequences = [sample.sequence for sample in self.running.samples]
            try:
                slots = self.cache.append_many(sequences, ids, spans.counts)
            except OutOfBlocks:
                if not len(draft_ids):
                    self._preempt()
                    preempted = True
                draft_ids, draft_lens = draft_ids[:0], np.zeros(len(self.running), np.int64)
                continue
            positions = state["length"][spans.owner] - 1 + spans.offset
            lengths = state["length"] + draft_lens
            rows = np.arange(len(ids))
            return Pass(ids, positions, slots, sequences, lengths, spans.counts, rows, spans), preempted

    def _preempt(self) -> None:
        """Close the youngest work and queue it again in front of the rest."""
        if self.filling:
            job = self.filling.pop()
            self.cache.close(job.sequence)
            self.waiting.appendleft(Prefill(job.tokens, job.samples))
        else:
            sample = self.running.pop()
            self.cache.commit(sample.sequence)
            self.cache.close(sample.sequence)
            self.waiting.appendleft(Prefill(sample.tokens(), [sample]))
        self.stats["preemptions"] += 1

    def _admit(self) -> None:
        """Open as many waiting jobs as there is room for, with one spare block for every sample."""
        if not self.waiting:
            return
        active = len(self.running) + sum(len(job.samples) for job in self.filling)
        stats = self.cache.stats
        blocks = stats["blocks_free"] + stats["blocks_cached"] - active
        jobs: list[Prefill] = []
        for job in self.waiting:
            active += len(job.samples)
            blocks -= -(-len(job.tokens) // self.cache.block_size) + len(job.samples)
            if active > self.max_sequences or (blocks < 0 and (jobs or self.filling or self.running)):
                break
            jobs.append(job)
        # the estimate counts too much rather than too little, and one sequence alone always fits
        for job, sequence in zip(jobs, self.cache.open_many([job.tokens for job in jobs])):
            self.waiting.popleft()
            job.sequence = sequence
            job.computed = sequence.num_cached
            self.stats["cached_tokens"] += sequence.num_cached
            self.filling.append(job)

    def _add_prefill(self, forward_pass: Pass) -> None:
        """Add the next tokens of the jobs, oldest first, so that a shared block is written before it is read."""
        total = len(forward_pass.ids)
        parts = [(forward_pass.ids, forward_pass.positions, forward_pass.slots)]
        ends, counts, rows = [], [], []
        for job in self.filling:
            count = min(len(job.tokens) - job.computed, self.max_batch_tokens - total)
            if count <= 0:
                break
            start = job.computed
            end = start + count
            first = job.sequence.num_cached
            slots = job.sequence.slots[start - first : end - first]
            parts.append((np.array(job.tokens[start:end]), np.arange(start, end), slots))
            forward_pass.sequences.append(job.sequence)
            ends.append(end)
            counts.append(count)
            total += count
            job.computed = end
            if end == len(job.tokens):
                rows.append(total - 1)
                forward_pass.prefilled.append(job)
            self.stats["prefill_tokens"] += count
        if counts:
            ids, positions, all_slots = zip(*parts)
            forward_pass.ids = np.concatenate(ids)
            forward_pass.positions = np.concatenate(positions)
            forward_pass.slots = torch.cat(all_slots)
            forward_pass.seq_lens = np.append(forward_pass.seq_lens, ends)
            forward_pass.query_lens = np.append(forward_pass.query_lens, counts)
            forward_pass.rows = np.append(forward_pass.rows, np.array(rows, np.int64))
