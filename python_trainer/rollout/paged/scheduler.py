"""Which sequences run in the next forward pass: continuous batching, chunked prefill, preemption.

A :class:`Prefill` is a run of tokens to compute, once, for one or more samples; when its last token is computed it is
forked into them. A running sample holds one token that was drawn and is not computed yet; a drafter adds its guesses
behind it, and what they leave in the cache is cut off again where they were wrong. When blocks run out, drafts give way
first, then the youngest work: it is closed, queued again as a prefill of all the tokens it has, and computed anew. The
oldest sample is never preempted, so there is always progress.
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from python_trainer.rollout.drafting import Decoding, Drafter
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
    """One forward pass: T tokens of B sequences, flattened, of which R get logits."""

    ids: list[int]  # [T]
    positions: list[int]  # [T]
    slots: torch.Tensor  # int64 [T]
    sequences: list[Sequence]  # [B]
    seq_lens: list[int]  # [B]
    query_lens: list[int]  # [B]
    rows: list[int] = field(default_factory=list)  # [R] the tokens that get logits
    row_samples: list[list[Decoding]] = field(default_factory=list)  # [R] the samples that draw from these logits
    prefilled: list[Prefill] = field(default_factory=list)  # jobs whose last token is in this pass


class Scheduler:
    """Holds the queues and every open sequence."""

    drafter: Drafter | None = None
    keep_answers = False  # the cache keeps what was computed of answers that are done

    def __init__(self, cache: PagedKVCache, max_sequences: int, max_batch_tokens: int, stats: dict[str, float]):
        self.cache = cache
        self.stats = stats
        self.max_sequences = max_sequences
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Prefill] = deque()
        self.filling: list[Prefill] = []
        self.running: list[Decoding] = []

    def add(self, tokens: list[int], samples: list[Decoding]) -> None:
        for start in range(0, len(samples), self.max_sequences):
            self.waiting.append(Prefill(tokens, samples[start : start + self.max_sequences]))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.filling or self.running)

    def next_pass(self) -> Pass:
        if self.drafter:
            # one token a sample is computed anyway, and a prefill needs room for one
            self.drafter.draft(self.running, self.max_batch_tokens - len(self.running) - 1)
        slots, preempted = self._append_drawn()
        if not preempted:
            self._admit()
        forward_pass = self._decode(slots)
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
            self.running += job.samples
            if self.drafter:
                self.drafter.start(job.samples)

    def finish(self, done: list[Decoding]) -> None:
        """Cut off drafts from where they were wrong, and close the samples that are done."""
        for sample in self.running:
            if sample.draft and sample.sequence.length >= sample.length:
                self.cache.truncate(sample.sequence, sample.length - 1)
            sample.draft = []
        for sample in done:
            if self.keep_answers:
                self.cache.commit(sample.sequence)
            self.cache.close(sample.sequence)
        finished = set(done)
        self.running = [sample for sample in self.running if sample not in finished]
        if self.drafter:
            self.drafter.stop(done)

    def _append_drawn(self) -> tuple[torch.Tensor, bool]:
        """Append the drawn token and the draft of every running sample to the cache; drafts give way first.

        Returns:
            The slots of these tokens, int64, and whether samples were preempted.
        """
        preempted = False
        while True:
            try:
                slots = self.cache.append_many(
                    [sample.sequence for sample in self.running],
                    [[sample.rollout.response_ids[-1], *sample.draft] for sample in self.running],
                )
                return slots, preempted
            except OutOfBlocks:
                if any(sample.draft for sample in self.running):
                    for sample in self.running:
                        sample.draft = []
                else:
                    self._preempt()
                    preempted = True

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

    def _decode(self, slots: torch.Tensor) -> Pass:
        """Make a pass of the drawn tokens of all running samples and their drafts, which go to these slots."""
        forward_pass = Pass([], [], slots, [sample.sequence for sample in self.running], [], [])
        for sample in self.running:
            count = 1 + len(sample.draft)
            end = sample.length + len(sample.draft)
            forward_pass.ids += [sample.rollout.response_ids[-1], *sample.draft]
            forward_pass.positions += range(end - count, end)
            forward_pass.seq_lens.append(end)
            forward_pass.query_lens.append(count)
            forward_pass.row_samples += [[sample]] * count
        forward_pass.rows += range(len(forward_pass.ids))
        return forward_pass

    def _add_prefill(self, forward_pass: Pass) -> None:
        """Add the next tokens of the jobs, oldest first, so that a shared block is written before it is read."""
        slots = [forward_pass.slots]
        for job in self.filling:
            count = min(len(job.tokens) - job.computed, self.max_batch_tokens - len(forward_pass.ids))
            if count <= 0:
                break
            start = job.computed
            end = start + count
            first = job.sequence.num_cached
            slots.append(job.sequence.slots[start - first : end - first])
            forward_pass.ids += job.tokens[start:end]
            forward_pass.positions += range(start, end)
            forward_pass.sequences.append(job.sequence)
            forward_pass.seq_lens.append(end)
            forward_pass.query_lens.append(count)
            job.computed = end
            if end == len(job.tokens):
                forward_pass.rows.append(len(forward_pass.ids) - 1)
                forward_pass.row_samples.append(job.samples)
                forward_pass.prefilled.append(job)
            self.stats["prefill_tokens"] += count
        forward_pass.slots = torch.cat(slots) if len(slots) > 1 else forward_pass.slots
