"""PagedEngine: rollouts of a Transformers model without padding, with every shared beginning computed once."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import rlkernels.backend
from python_trainer.data import Completion
from python_trainer.errors import UserError
from python_trainer.model.flat_forward import Forward, evaluation_mode, flat_attention, forward
from python_trainer.model.fused import FusedDecoder, supports
from python_trainer.model.paged_attention import Paging
from python_trainer.model.traits import ModelTraits, find_traits
from python_trainer.rollout.checks import check_requests, check_sampling
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import Request, SamplingParams
from python_trainer.rollout.ordering import LengthHistory, expectations, longest_first, longest_sequence, remember
from python_trainer.rollout.paged.scheduler import Sample, Scheduler, Step
from python_trainer.rollout.stopping import StopStrings
from rlkernels import PagedKVCache, keyed_uniform, sample_tokens, verify_drafts

ROPE_BY_LENGTH = ("dynamic", "longrope")  # whose angles depend on the longest sequence of the batch
CPU_MEMORY_BYTES = 1 << 30
CUDA_MEMORY_SHARE = 0.4
# Shorter prefixes are read by every sample. Measured on a CPU, groups of 8: attention alone gains 1.3 to 1.6 times at
# 128 tokens, but finding the groups costs as much there; the whole of generation gains 4 % at 192, 15 % at 768.
MIN_SHARED_TOKENS = 192

STATS = (
    "generated_tokens", "prefill_tokens", "cached_tokens", "forward_passes", "preemptions", "sample_steps",
    "draft_steps", "draft_tokens", "accepted_tokens",
)  # fmt: skip


class PagedEngine:
    """Continuous batching over flattened tokens with a paged KV cache, under any decoder model of Transformers.

    The prompt and prefix of a request are computed once and forked into its samples; what several requests begin
    with is computed once per policy version, in one call of ``generate`` and across calls. Noise is keyed by
    (seed, sample id, position in the sequence), so a sample does not depend on what else is in the batch.

    The model stays the caller's: outside ``generate`` it keeps its own attention implementation and its mode, and
    may be trained. Weights must not change inside ``generate``; after they changed call ``policy_updated``.

    While ``drafter`` is set, several tokens of a sample may come out of one forward pass: drafts are verified for all
    sequences at once, and the tokens are those that come without drafts, up to rounding of the model's own numbers.

    Args:
        model: a causal language model whose layers use Transformers' attention interface.
        eos_token_ids: tokens that end an answer; may be several or none.
        memory_bytes: size of the KV cache; by default what ``max_sequences`` full-length sequences need, but at most
            1 GiB on a CPU and 40 % of the free memory on a GPU.
        block_size: tokens per block of the cache.
        tokenizer: needed for stop strings only.
        max_sequences: most samples in one forward pass.
        max_batch_tokens: most tokens in one forward pass; longer prompts are computed in chunks.
        share_reads: read the keys of a long common prefix once per group of samples, where there is a kernel for it.
        fused: run small Llama-like float32 models on a CPU through :class:`FusedDecoder`, which gives the same
            numbers in fewer calls. False: always the model's own forward.
        lengths: of earlier answers; with it, prompts of long answers go first where not all fit into a pass. None: in
            the order of the requests.
        traits: of the model, where they are known; None: found here.

    Raises:
        UserError: the model is not one that this engine can run, or a setting is out of range.
    """

    def __init__(self, model: PreTrainedModel, *, eos_token_ids: int | Sequence[int], memory_bytes: int | None = None,
                 block_size: int = 16, tokenizer: PreTrainedTokenizerBase | None = None, max_sequences: int = 256,
                 max_batch_tokens: int = 8192, share_reads: bool = True, fused: bool = True,
                 lengths: LengthHistory | None = None, traits: ModelTraits | None = None):  # fmt: skip
        sizes = {"block_size": block_size, "max_sequences": max_sequences, "max_batch_tokens": max_batch_tokens}
        for name, value in sizes.items():
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        self.model, self.tokenizer = model, tokenizer
        self.device = next(model.parameters()).device
        self.max_sequences = max_sequences
        # a decode step must fit
        self.max_batch_tokens = max(max_batch_tokens, max_sequences + 1)
        self.eos_token_ids = frozenset([eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids)
        has_kernel = rlkernels.backend.choose("shared_prefix_attention", self.device) != "torch"
        self.share_reads = share_reads and has_kernel
        traits = traits or find_traits(model)
        self.fused = fused and traits.fusible
        self.max_positions, reason = _max_positions(model, traits.window)
        self.limited_by = f"the limit of rollout.engine paged ({reason})"
        self.vocab_size: int = model.config.get_text_config().vocab_size
        token_bytes = 2 * traits.layers * traits.kv_heads * traits.head_dim * model.dtype.itemsize
        if memory_bytes is None:
            wanted = max_sequences * (self.max_positions + block_size) * token_bytes
            memory_bytes = min(wanted, memory_limit(self.device))
        if memory_bytes < block_size * token_bytes:
            raise UserError(f"memory_bytes must be at least {block_size * token_bytes} (one block), got {memory_bytes}")
        self.cache = PagedKVCache(
            traits.layers, traits.kv_heads, traits.head_dim,
            memory_bytes=memory_bytes, block_size=block_size, dtype=model.dtype, device=self.device,
        )  # fmt: skip
        self.room = self.cache.num_blocks * self.cache.block_size
        self.drafter: Drafter | None = None
        self.lengths = lengths
        self._stats: dict[str, float] = dict.fromkeys(STATS, 0)

    @property
    def stats(self) -> dict[str, float]:
        """Counters since the engine was made.

        ``generated_tokens``; ``prefill_tokens`` computed of prompts, prefixes and preempted samples;
        ``cached_tokens`` of those not computed because they were shared; ``forward_passes``; ``preemptions``;
        ``sample_steps``: each pass counted once per sample that drew from it; ``draft_steps`` of those with a draft;
        ``draft_tokens`` offered; ``accepted_tokens`` of those.
        """
        return dict(self._stats)

    def policy_updated(self) -> None:
        """The weights have changed: no key or value computed before is used again."""
        self.cache.advance_version()

    def close(self) -> None:
        """Nothing to let go of: the engine runs in this process."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Completions in the order of the requests, the samples of one request side by side.

        Raises:
            UserError: a request or setting is out of range, e.g. a prompt longer than the model's limit.
        """
        check_sampling(sampling, has_tokenizer=self.tokenizer is not None)
        check_requests(requests, max_positions=self.max_positions, vocab_size=self.vocab_size, room=self.room)
        order = longest_first(expectations(self.lengths, requests)) if self.lengths else range(len(requests))
        samples: list[list[Sample]] = [[] for _ in requests]
        with self.session(sampling, longest_sequence(requests)) as session:
            for i in order:
                samples[i] = session.add(requests[i])
            while session.busy:
                session.step()
        completions = [sample.out for group in samples for sample in group]
        if self.lengths:
            remember(self.lengths, requests, completions)
        return completions

    @contextmanager
    def session(self, sampling: SamplingParams, longest: int) -> Iterator["Session"]:
        """Generation pass by pass, with requests that come and go meanwhile; they and ``sampling`` must be checked.

        Args:
            longest: most tokens of a sequence, prompt included.
        """
        scheduler = Scheduler(self.cache, self.max_sequences, self.max_batch_tokens, self._stats, self.drafter)
        try:
            with evaluation_mode(self.model), flat_attention(self.model):
                yield Session(self, scheduler, sampling, self._runner(longest))
        finally:
            scheduler.close()

    def _runner(self, longest: int) -> Forward:
        if self.fused and supports(self.model):  # a hook may have come since
            return FusedDecoder(self.model, min(self.max_positions, longest))
        return partial(forward, self.model)

    def _forward(self, run: Forward, step: Step, share: bool) -> torch.Tensor:
        """Logits [R, V], one row per entry of ``step.rows``."""
        self._stats["forward_passes"] += 1
        starts = torch.zeros(len(step.query_lens) + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(torch.tensor(step.query_lens, dtype=torch.int32, device="cpu"), 0, out=starts[1:])
        paging = self._paging(step, starts.to(self.device), share)
        ids, positions, rows = (
            torch.tensor(values, dtype=torch.int64, device=self.device)
            for values in (step.ids, step.positions, step.rows)
        )
        return run(ids, positions, rows, paging)

    def _paging(self, step: Step, query_starts: torch.Tensor, share: bool) -> Paging:
        seq_lens = torch.tensor(step.seq_lens, dtype=torch.int32, device=self.device)
        longest = max(step.query_lens), max(step.seq_lens)
        if share:
            prefix_tables, group_lens, group_starts, tables, _ = self.cache.group(
                step.sequences, min_tokens=MIN_SHARED_TOKENS
            )
            if group_lens.any():
                # of a prompt that is computed in chunks, this pass sees less than the cache knows
                own_lens = seq_lens - group_lens.repeat_interleave(group_starts.diff())
                groups = prefix_tables, group_lens, group_starts
                return Paging(self.cache, step.slots, tables, own_lens, query_starts, *longest, groups)
        return Paging(self.cache, step.slots, self.cache.tables(step.sequences)[0], seq_lens, query_starts, *longest)

    def _draw(self, step: Step, logits: torch.Tensor, sampling: SamplingParams, stop: StopStrings | None
              ) -> list[Sample]:  # fmt: skip
        """Draws the next tokens of every sample of the step -> the samples that are done."""
        rows = [sample for group in step.samples for sample in group]  # a sample with a draft has several rows
        if not rows:
            return []
        if len(rows) > len(step.rows):
            counts = torch.tensor([len(group) for group in step.samples], device=self.device)
            logits = logits.repeat_interleave(counts, 0, output_size=len(rows))
        samples = list(dict.fromkeys(rows))
        lengths = [1 + len(sample.draft) for sample in samples]
        starts = [0, *itertools.accumulate(lengths)]
        uniforms = keyed_uniform(
            sampling.seed,
            torch.tensor([sample.sample_id for sample in rows], device=self.device),
            torch.tensor([s.length + i for s, n in zip(samples, lengths) for i in range(n)], device=self.device),
        )
        settings: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        if len(samples) == len(rows):
            ids, logprobs = sample_tokens(logits, uniforms, **settings)
            accepted = [0] * len(samples)
        else:
            drafts = [sample.draft for sample in samples]
            counted, ids, logprobs = verify_drafts(logits, drafts, starts, uniforms, **settings)
            accepted = counted.tolist()
        drawn, weights = ids.tolist(), logprobs.tolist()
        done, kept = [], []
        for sample, start, right in zip(samples, starts, accepted):
            before = len(sample.out.ids)
            for row in range(start, start + right + 1):
                if self._extend(sample, drawn[row], weights[row], stop):
                    done.append(sample)
                    break
            kept.append(sample.out.ids[before:])
        if self.drafter:
            self.drafter.learn(samples, accepted, kept)
        self._count(samples, accepted, kept)
        return done

    def _extend(self, sample: Sample, token: int, logprob: float, stop: StopStrings | None) -> bool:
        """Adds a token to a sample; True when that was its last."""
        out = sample.out
        out.ids.append(token)
        out.logprobs.append(logprob)
        if token in self.eos_token_ids or (stop is not None and stop.ends(sample)):
            out.finish_reason = "stop"
            return True
        return len(out.ids) == sample.max_new_tokens

    def _count(self, samples: list[Sample], accepted: list[int], kept: list[list[int]]) -> None:
        counts = {
            "generated_tokens": sum(map(len, kept)),
            "sample_steps": len(samples),
            "draft_steps": sum(bool(sample.draft) for sample in samples),
            "draft_tokens": sum(len(sample.draft) for sample in samples),
            "accepted_tokens": sum(accepted),
        }
        for name, count in counts.items():
            self._stats[name] += count

    def pass_seconds(self, sequences: int, tokens: int, *, context: int = 32, repeats: int = 5) -> float:
        """Time of a forward pass over ``tokens`` tokens of each of ``sequences`` sequences: the quickest of some."""
        length, taken = context + tokens, []
        first = self.cache.open([0] * context)
        opened = [first, *self.cache.fork(first, sequences - 1)]
        try:
            slots = self.cache.append_many(opened, [[0] * tokens] * sequences)
            step = Step([0] * (sequences * tokens), [*range(context, length)] * sequences, slots, opened,
                        [length] * sequences, [tokens] * sequences, list(range(sequences * tokens)))  # fmt: skip
            with evaluation_mode(self.model), flat_attention(self.model):
                run = self._runner(length)
                for _ in range(repeats):
                    before = time.perf_counter()
                    logits = self._forward(run, step, share=False)
                    sample_tokens(logits.nan_to_num(), torch.full((len(logits),), 0.5, device=self.device))
                    taken.append(time.perf_counter() - before)
        finally:
            for sequence in opened:
                self.cache.close(sequence)
        return min(taken)


class Session:
    """Answers in the making on one engine; from :meth:`PagedEngine.session`."""

    def __init__(self, engine: PagedEngine, scheduler: Scheduler, sampling: SamplingParams, run: Forward):
        self.engine, self.scheduler, self.sampling, self.run = engine, scheduler, sampling, run
        tokenizer = engine.tokenizer
        self.stop = StopStrings(tokenizer, sampling.stop) if tokenizer and sampling.stop else None
        self.share = False  # whether it can pay to read common prefixes once

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, request: Request, out: Completion | None = None) -> list[Sample]:
        """Queues a request -> its samples, whose tokens come into their ``out``.

        Args:
            out: what its only sample has already, from another engine with the same weights.
        """
        context = [*request.prompt_ids, *request.prefix_ids]
        limit = min(request.max_new_tokens, self.engine.max_positions - len(context))
        outs = [Completion([], [], "length") for _ in range(request.num_samples)] if out is None else [out]
        samples = [
            Sample(one, request.sample_id + j, context, len(request.prefix_ids), limit) for j, one in enumerate(outs)
        ]
        if limit > 0 and samples:
            self.scheduler.add(context if out is None else context + out.ids, samples)
        self.share |= self.engine.share_reads and _shares(request)
        return samples

    def step(self) -> list[Sample]:
        """One forward pass -> the samples that are done."""
        engine, step = self.engine, self.scheduler.next_step()
        logits = engine._forward(self.run, step, self.share)
        self.scheduler.start_drawing(step)
        done = engine._draw(step, logits, self.sampling, self.stop)
        self.scheduler.finish(done)
        return done


def _shares(request: Request) -> bool:
    return request.num_samples > 1 and len(request.prompt_ids) + len(request.prefix_ids) >= MIN_SHARED_TOKENS


def _max_positions(model: PreTrainedModel, window: int | None) -> tuple[int, str]:
    """Longest sequence that the engine computes as the model would, and what of the model says so."""
    config = model.config.get_text_config()
    limits = [
        (getattr(config, "max_position_embeddings", None), "max_position_embeddings of the model"),
        (window, "the model's sliding window"),
    ]
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") in ROPE_BY_LENGTH:
            original = parameters.get("original_max_position_embeddings")
            limits.append((original, "original_max_position_embeddings of the model"))
    return min(((n, reason) for n, reason in limits if n), default=(1 << 20, "of its own"), key=lambda limit: limit[0])


def memory_limit(device: torch.device) -> int:
    """Most bytes that a KV cache takes unasked."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_MEMORY_SHARE)
    return CPU_MEMORY_BYTES
