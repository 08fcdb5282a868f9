"""Which sequences run in the next forward pass: continuous batching, chunked prefill, preemption.

A *job* is a run of tokens to prefill, once, for one or more samples; when its last token is computed it is forked
into them. A running sample holds one token that was drawn and is not computed yet (a drafter would add its guesses
behind it). When blocks run out, the youngest work goes first: it is closed, queued again as a job over all the
tokens it has, and computed anew. The oldest sample is never preempted, so there is always progress.
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from python_trainer.rollout.types import Completion
from rlkernels import OutOfBlocks, PagedKVCache
from rlkernels.prefix_cache import Sequence


@dataclass(eq=False)
class Sample:
    """One completion in the making."""

    out: Completion
    sample_id: int
    context: list[int]  # prompt and prefix
    prefix_length: int
    max_new_tokens: int
    sequence: Sequence = field(init=False)  # everything but the last drawn token is computed


@dataclass(eq=False)
class Job:
    tokens: list[int]
    samples: list[Sample]
    sequence: Sequence = field(init=False)
    computed: int = field(init=False)


@dataclass
class Step:
    """One forward pass: T tokens of B sequences, flattened."""

    ids: list[int]
    positions: list[int]
    slots: torch.Tensor  # int64 [T]
    sequences: list[Sequence]
    seq_lens: list[int]
    query_lens: list[int]
    rows: list[int] = field(default_factory=list)  # the last token of every sequence that is drawn from next
    samples: list[list[Sample]] = field(default_factory=list)  # per row: who draws from it
    prefilled: list[Job] = field(default_factory=list)  # jobs whose last token is in this pass


class Scheduler:
    """Holds the queues and every open sequence."""

    def __init__(self, cache: PagedKVCache, max_sequences: int, max_batch_tokens: int, stats: dict[str, float]):
        self.cache, self.stats = cache, stats
        self.max_sequences, self.max_batch_tokens = max_sequences, max_batch_tokens
        self.waiting: deque[Job] = deque()
        self.filling: list[Job] = []
        self.running: list[Sample] = []

    def add(self, tokens: list[int], samples: list[Sample]) -> None:
        for start in range(0, len(samples), self.max_sequences):
            self.waiting.append(Job(tokens, samples[start : start + self.max_sequences]))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.filling or self.running)

    def next_step(self) -> Step:
        if not self._append_drawn():
            self._admit()
        step = self._decode_step()
        self._add_prefill(step)
        return step

    def start_drawing(self, step: Step) -> None:
        """After the pass: forks the jobs that are prefilled into their samples."""
        for job in step.prefilled:
            self.cache.commit(job.sequence)
            self.filling.remove(job)
            # the job's own sequence serves its first sample
            first, *others = job.samples
            first.sequence = job.sequence
            for sample, sequence in zip(others, self.cache.fork(job.sequence, len(others))):
                sample.sequence = sequence
            self.stats["cached_tokens"] += len(others) * len(job.tokens)
            self.running += job.samples

    def finish(self, done: list[Sample]) -> None:
        for sample in done:
            self.cache.close(sample.sequence)
        gone = set(done)
        self.running = [sample for sample in self.running if sample not in gone]

    def close(self) -> None:
        """Lets go of every sequence, whatever state it is in."""
        for sequence in [*(job.sequence for job in self.filling), *(sample.sequence for sample in self.running)]:
            self.cache.close(sequence)
        self.waiting.clear()
        self.filling, self.running = [], []

    def _append_drawn(self) -> bool:
        """Makes room for the drawn token of every running sample. True when others had to give up theirs for it."""
        preempted = False
        while self.running:
            try:
                self.slots = self.cache.append_many(
                    [sample.sequence for sample in self.running], [sample.out.ids[-1:] for sample in self.running]
                )
                return preempted
            except OutOfBlocks:
                self._preempt()
                preempted = True
        self.slots = torch.empty(0, dtype=torch.int64, device=self.cache.device)
        return preempted

    def _preempt(self) -> None:
        """Closes the youngest work and queues it again in front of the rest."""
        if self.filling:
            job = self.filling.pop()
            self.cache.close(job.sequence)
            self.waiting.appendleft(Job(job.tokens, job.samples))
        else:
            sample = self.running.pop()
            self.cache.commit(sample.sequence)
            self.cache.close(sample.sequence)
            self.waiting.appendleft(Job(sample.context + sample.out.ids, [sample]))
        self.stats["preemptions"] += 1

    def _admit(self) -> None:
        """Opens as many waiting jobs as there is room for, with one spare block for every sample."""
        places = self.max_sequences - len(self.running) - sum(len(job.samples) for job in self.filling)
        blocks = self.cache.stats
        room = blocks["blocks_free"] + blocks["blocks_cached"] - (self.max_sequences - places)
        jobs: list[Job] = []
        for job in self.waiting:
            need = -(-len(job.tokens) // self.cache.block_size) + len(job.samples)
            places -= len(job.samples)
            room -= need
            if places < 0 or (room < 0 and (jobs or self.filling or self.running)):
                break
            jobs.append(job)
        # the estimate counts too much rather than too little, and one sequence alone always fits
        for job, sequence in zip(jobs, self.cache.open_many([job.tokens for job in jobs])):
            self.waiting.popleft()
            job.sequence, job.computed = sequence, sequence.num_cached
            self.stats["cached_tokens"] += sequence.num_cached
            self.filling.append(job)

    def _decode_step(self) -> Step:
        """The drawn tokens of all running samples."""
        count = len(self.running)
        sequences = [sample.sequence for sample in self.running]
        lengths = [len(sample.context) + len(sample.out.ids) for sample in self.running]
        return Step(
            ids=[sample.out.ids[-1] for sample in self.running],
            positions=[length - 1 for length in lengths],
            slots=self.slots,
            sequences=sequences,
            seq_lens=lengths,
            query_lens=[1] * count,
            rows=list(range(count)),
            samples=[[sample] for sample in self.running],
        )

    def _add_prefill(self, step: Step) -> None:
        """Adds the next tokens of the jobs, oldest first, so that a shared block is written before it is read."""
        slots = [step.slots]
        for job in self.filling:
            count = min(len(job.tokens) - job.computed, self.max_batch_tokens - len(step.ids))
            if count <= 0:
                break
            start, end = job.computed, job.computed + count
            first = job.sequence.num_cached
            slots.append(job.sequence.slots[start - first : end - first])
            step.ids += job.tokens[start:end]
            step.positions += range(start, end)
            step.sequences.append(job.sequence)
            step.seq_lens.append(end)
            step.query_lens.append(count)
            job.computed = end
            if end == len(job.tokens):
                step.rows.append(len(step.ids) - 1)
                step.samples.append(job.samples)
                step.prefilled.append(job)
            self.stats["prefill_tokens"] += count
        step.slots = torch.cat(slots) if len(slots) > 1 else step.slots
