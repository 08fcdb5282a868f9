"""PagedEngine: rollouts of a Transformers model without padding, which computes every common prefix once."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import rlkernels.backend
from python_trainer.data import Request, Rollout
from python_trainer.errors import NotFinite, UserError
from python_trainer.model.forward import Forward, attend_by, forward, page
from python_trainer.model.fused import FusedDecoder, supports
from python_trainer.model.traits import ModelTraits, find_traits, longest_sequence
from python_trainer.rollout.drafting import Decoding
from python_trainer.rollout.engine import Engine, SamplingParams, StopStrings, check_requests, new_rollouts
from python_trainer.rollout.ordering import longest_first
from python_trainer.rollout.paged.graphs import DecodeGraphs, padded_size
from python_trainer.rollout.paged.running import Spans
from python_trainer.rollout.paged.scheduler import Pass, Scheduler
from python_trainer.rollout.settings import truncates
from rlkernels import PagedKVCache, keyed_uniform, sample_tokens, token_logprobs, verify_drafts

T = TypeVar("T")
CPU_MEMORY_BYTES = 1 << 30
CUDA_MEMORY_SHARE = 0.4
# Shorter prefixes are read by every sample. Measured on a CPU, groups of 8: attention alone gains 1.3 to 1.6 times at
# 128 tokens, but finding the groups costs as much there; the whole of generation gains 4 % at 192, 15 % at 768.
MIN_SHARED_TOKENS = 192
MIN_SHARED_ON_GPU = 8192  # an estimate: launching a pass that is not recorded takes longer than reading shorter ones
TIMED_CONTEXT = 32  # tokens before those of a timed pass
TIMED_REPEATS = 5

STATS = (
    "generated_tokens", "prefill_tokens", "cached_tokens", "forward_passes", "preemptions", "sample_steps",
    "draft_steps", "draft_tokens", "accepted_tokens",
)  # fmt: skip


class PagedEngine(Engine):
    """Continuous batching over flattened tokens with a paged KV cache, under any decoder model of Transformers.

    The prompt and prefix of a request are computed once and forked into its samples; what several requests begin
    with is computed once per policy version, in one call of ``generate`` and across calls. Noise is keyed by
    (seed, sample id, position in the sequence), so a sample does not depend on what else is in the batch.

    The model stays the caller's: outside ``poll`` it keeps its own attention implementation and its mode, and may be
    trained. After its weights changed call ``policy_updated``.

    While ``drafter`` is set, several tokens of a sample may come out of one forward pass: drafts are verified for all
    sequences at once, and the tokens are those that come without drafts, up to rounding of the model's own numbers.

    Attributes:
        fused: Llama-like models on a CPU, in bfloat16 or small ones in float32, run through :class:`FusedDecoder`,
            which gives the same numbers up to rounding in fewer calls.
        share_from: a common prefix of so many tokens is read once per group of samples; None: never.
        graphs: on a GPU, passes of one token a sample are recorded and replayed; None: they are not, or cannot be.

    Args:
        model: a causal language model whose layers use Transformers' attention interface, which may have adapters of
            PEFT; set to evaluation mode.
        eos_token_ids: tokens that end an answer; may be several or none.
        memory_bytes: size of the KV cache; by default what ``max_sequences`` full-length sequences need, but at most
            1 GiB on a CPU and on a GPU 40 % of the memory that is free and not reserved.
        block_size: tokens per block of the cache.
        tokenizer: needed for stop strings only.
        max_sequences: most samples in one forward pass.
        max_batch_tokens: most tokens in one forward pass; longer prompts are computed in chunks.
        traits: of the model, where they are known; None: found here.
        reserved_bytes: of the device's memory, for what comes later, such as an optimizer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: int | Sequence[int],
        memory_bytes: int | None = None,
        block_size: int = 16,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_sequences: int = 256,
        max_batch_tokens: int = 8192,
        traits: ModelTraits | None = None,
        reserved_bytes: int = 0,
    ):
        super().__init__(STATS)
        assert min(block_size, max_sequences, max_batch_tokens) >= 1
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.device = next(model.parameters()).device
        self.eos_token_ids = frozenset([eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids)
        self.share_from: int | None = None
        if rlkernels.backend.choose("shared_prefix_attention", self.device) != "torch":
            self.share_from = MIN_SHARED_ON_GPU if self.device.type == "cuda" else MIN_SHARED_TOKENS
        traits = traits or find_traits(model)
        if traits.recurrent:
            raise UserError(
                f"rollout.engine paged caches keys and values alone, and {type(model).__name__} has layers of "
                f"{', '.join(traits.recurrent)}: set rollout.engine=vllm"
            )
        self.fused = traits.fusible
        # on a GPU the kernels of windows wait for the host, which recorded passes cannot
        window = traits.window if self.device.type == "cuda" else None
        self.max_positions, reason = longest_sequence(model, window)
        self.limited_by = f"the limit of rollout.engine paged ({reason})"
        self.vocab_size: int = model.config.get_text_config().vocab_size
        token_bytes = 2 * traits.layers * traits.kv_heads * traits.head_dim * model.dtype.itemsize
        if memory_bytes is None:
            full_length_bytes = max_sequences * (self.max_positions + block_size) * token_bytes
            memory_bytes = min(full_length_bytes, memory_limit(self.device, reserved_bytes))
        if memory_bytes < block_size * token_bytes:
            raise UserError(
                f"rollout.memory_bytes must be at least {block_size * token_bytes} (one block), got {memory_bytes}"
            )
        self.cache = PagedKVCache(
            traits.layers,
            traits.kv_heads,
            traits.head_dim,
            memory_bytes=memory_bytes,
            block_size=block_size,
            dtype=model.dtype,
            device=self.device,
        )
        self.room = self.cache.num_blocks * self.cache.block_size
        recordable = self.device.type == "cuda" and all(type(p) is torch.nn.Parameter for p in model.parameters())
        recordable &= rlkernels.backend.choose("paged_attention", self.device) == "triton"  # which waits for nothing
        self.graphs = DecodeGraphs(model, self.cache) if recordable else None
        max_batch_tokens = max(max_batch_tokens, max_sequences + 1)  # a decode step must fit
        self._scheduler = Scheduler(self.cache, max_sequences, max_batch_tokens, self._stats)
        self._decoder: FusedDecoder | None = None  # of the weights as they are, while there is something to generate
        self._begin(SamplingParams())

    def policy_updated(self) -> None:
        assert not self._scheduler.busy, "answers are being generated with the old weights"
        super().policy_updated()
        self.cache.advance_version()

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        check_requests(requests, sampling, max_positions=self.max_positions, vocab_size=self.vocab_size, room=self.room)
        if not self._scheduler.busy:
            self._begin(sampling)
        assert sampling == self._sampling, f"all that is generated together has {self._sampling}, got {sampling}"
        groups = [new_rollouts(request) for request in requests]
        for i in longest_first(self.lengths.predict(requests)) if self.lengths else range(len(requests)):
            self._add(requests[i], groups[i])
        rollouts = [rollout for group in groups for rollout in group]
        self._ready += [rollout for rollout in rollouts if rollout.finish_reason]  # without room for a token
        return rollouts

    def _begin(self, sampling: SamplingParams) -> None:
        """Prepare for requests with this sampling, until all of them are answered."""
        self._sampling = sampling
        self._longest = 1  # most tokens of a sequence
        self._share = False  # a common prefix is long enough to be read once per group
        self._stop = StopStrings(self.tokenizer, sampling.stop) if sampling.stop else None
        self._scheduler.drafter = self.drafter
        self._scheduler.keep_answers = self.keep_answers

    def _add(self, request: Request, rollouts: Sequence[Rollout]) -> None:
        """Queue the samples of a request, one a rollout."""
        context = len(request.prompt_ids) + len(request.prefix_ids)
        limit = min(request.max_new_tokens, self.max_positions - context)
        longest = context + limit
        samples = [Decoding(rollout, request.sample_id + j, longest) for j, rollout in enumerate(rollouts)]
        self._longest = max(self._longest, longest)
        if limit > 0 and samples:
            self._scheduler.add(samples[0].tokens(), samples)
        else:
            for rollout in rollouts:
                rollout.finish_reason = "length"
        self._share |= self.share_from is not None and request.num_generations > 1 and context >= self.share_from

    def _work(self, count: int) -> list[Rollout]:
        done: list[Rollout] = []
        if not self._scheduler.busy:
            return done
        with generating(self.model):
            run = self._runner(self._longest)
            while self._scheduler.busy and len(done) < count:
                done += self._step(run)
        if not self._scheduler.busy:
            self._decoder = None
        return done

    def _step(self, run: Forward) -> list[Rollout]:
        """Run one forward pass; return the finished answers."""
        forward_pass = self._scheduler.next_pass()
        logits = self._forward(run, forward_pass, self._share)
        self._scheduler.fork_prefilled(forward_pass)
        return [sample.rollout for sample in self._draw(forward_pass, logits)]

    def _runner(self, longest: int) -> Forward:
        if self.graphs is not None:
            self.graphs.look_at_weights()
        if self.fused and supports(self.model):  # a hook may have come since
            self._decoder = self._decoder or FusedDecoder(self.model, longest, join_weights=True)
            self._decoder.reach(longest)
            return self._decoder
        return partial(forward, self.model)

    def _forward(self, run: Forward, forward_pass: Pass, share: bool) -> torch.Tensor:
        """Compute logits [R, V], one row per entry of ``forward_pass.rows``."""
        self._stats["forward_passes"] += 1
        count = len(forward_pass.ids)
        decoding = count == len(forward_pass.sequences) == len(forward_pass.rows)
        graphs = self.graphs if decoding and not share else None
        padding = padded_size(count) - count if graphs else 0
        slots = forward_pass.slots
        if padding:
            slots = torch.cat([slots, slots[:1].expand(padding)])
        paged = page(
            self.cache,
            forward_pass.sequences + forward_pass.sequences[:1] * padding,
            slots,
            query_lens=pad(forward_pass.query_lens, padding),
            seq_lens=pad(forward_pass.seq_lens, padding),
            share_from=self.share_from if share else None,
        )
        ids = self._on_device(pad(forward_pass.ids, padding))
        positions = self._on_device(pad(forward_pass.positions, padding))
        rows = self._on_device(forward_pass.rows)
        if graphs:
            blocks = max(paged.block_tables.shape[1], -(-self._longest // self.cache.block_size))
            logits = graphs.logits((ids, positions, slots, paged.block_tables, paged.seq_lens), blocks)
            if logits is not None:
                return logits[:count]
            self.graphs = None
        return run(ids, positions, rows, paged)[0]

    def _on_device(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device)

    def _draw(self, forward_pass: Pass, logits: torch.Tensor) -> list[Decoding]:
        """Draw the next tokens of every running sample; return the finished samples."""
        running = self._scheduler.running
        if not len(running):
            return []
        draws = forward_pass.decoding
        if forward_pass.prefilled:  # one draw for each sample whose prompt the pass has computed
            draws = Spans.of(np.append(draws.counts, np.ones(len(running) - len(draws.counts), np.int64)))
        if len(draws.owner) > len(logits):  # prefilled prompts with several samples
            sizes = [len(job.samples) for job in forward_pass.prefilled]
            repeats = torch.tensor([1] * (len(logits) - len(sizes)) + sizes, device=self.device)
            logits = logits.repeat_interleave(repeats, 0, output_size=len(draws.owner))
        drafts = forward_pass.ids[(draws.offset > 0).nonzero()[0]]
        ids, logprobs, accepted = draw_tokens(running.state, draws, drafts, logits, self._sampling)
        stops = np.isin(ids, [*self.eos_token_ids])
        if self._stop is not None:
            stops |= self._find_stop_strings(self._stop, draws, ids)
        lengths = running.state["length"][draws.owner] + draws.offset + 1
        is_end = stops | (lengths == running.state["max_length"][draws.owner])
        ends = is_end.nonzero()[0]
        num_new = accepted + 1
        np.minimum.at(num_new, draws.owner[ends], draws.offset[ends] + 1)  # nothing is used behind the end of an answer
        last = draws.starts + num_new - 1  # the last new token of each sample
        done = is_end[last]
        running.extend(draws, ids, logprobs, num_new)
        for i in done.nonzero()[0]:
            running.samples[i].rollout.finish_reason = "stop" if stops[last[i]] else "length"
        accepted = np.minimum(accepted, num_new)
        if self.drafter:
            new_ids = ids[draws.offset < num_new[draws.owner]]
            self.drafter.learn(running.samples, draws.counts - 1, accepted, new_ids, num_new)
        self._stats["generated_tokens"] += int(num_new.sum())
        self._stats["sample_steps"] += len(running)
        if len(drafts):
            self._stats["draft_steps"] += int((draws.counts > 1).sum())
            self._stats["draft_tokens"] += len(drafts)
            self._stats["accepted_tokens"] += int(accepted.sum())
        return self._scheduler.finish(draws, num_new, done)

    def _find_stop_strings(self, stop: StopStrings, draws: Spans, ids: np.ndarray) -> np.ndarray:
        """Return which accepted draws complete a stop string, bool [D]; the id of others is -1."""
        completes = np.zeros(len(ids), bool)
        for sample, start, count in zip(self._scheduler.running.samples, draws.starts, draws.counts):
            rollout = sample.rollout
            response_ids = rollout.response_ids[max(len(rollout.response_ids) - stop.window, rollout.stops_from) :]
            for draw in range(start, start + count):
                if ids[draw] >= 0:
                    response_ids.append(int(ids[draw]))
                    completes[draw] = stop.ends(response_ids)
        return completes

    def pass_seconds(self, sequences: int, tokens: int) -> float | None:
        """Return the quickest time of a pass over ``tokens`` tokens of each of ``sequences``; None: no room."""
        length = TIMED_CONTEXT + tokens
        seconds: list[float] = []
        if length > self.max_positions or sequences * -(-length // self.cache.block_size) > self.cache.num_blocks:
            return None
        first = self.cache.open([0] * TIMED_CONTEXT)
        opened = [first, *self.cache.fork(first, sequences - 1)]
        rows = np.arange(sequences * tokens)
        forward_pass = Pass(
            ids=np.zeros_like(rows),
            positions=np.tile(np.arange(TIMED_CONTEXT, length), sequences),
            slots=self.cache.append_many(opened, [[0] * tokens] * sequences),
            sequences=opened,
            seq_lens=np.full(sequences, length),
            query_lens=np.full(sequences, tokens),
            rows=rows,
            decoding=Spans.of(np.full(sequences, tokens)),
        )
        with generating(self.model):
            run = self._runner(length)
            for _ in range(TIMED_REPEATS):
                start = time.perf_counter()
                logits = self._forward(run, forward_pass, share=False)
                sample_tokens(logits.nan_to_num(), torch.full((len(logits),), 0.5, device=self.device))
                seconds.append(time.perf_counter() - start)
        self._decoder = None
        for sequence in opened:
            self.cache.close(sequence)
        return min(seconds)


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """Let the model generate: without dropout and gradients, with our attention; afterwards it is as before."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        # not inference_mode: rotary embeddings that adapt keep tensors that training must be able to use
        with torch.no_grad(), attend_by(model):
            yield
    finally:
        for module in training:
            module.training = True


def pad(values: np.ndarray, padding: int) -> np.ndarray:
    """Return the values with so many more copies of the first."""
    return np.append(values, values[:1].repeat(padding)) if padding else values


def memory_limit(device: torch.device, reserved: int = 0) -> int:
    """Compute the most bytes that a KV cache takes by default, with ``reserved`` of the free ones for others."""
    if device.type != "cuda":
        return CPU_MEMORY_BYTES
    free = torch.cuda.mem_get_info(device)[0]
    if free <= reserved:
        raise UserError(
            f"no memory is left for the KV cache: {free / 1e9:.1f} GB are free on {device}, and training will take "
            f"{reserved / 1e9:.1f} GB; model.lora, parallel: fsdp2 on more GPUs or a smaller model take less"
        )
    return int((free - reserved) * CUDA_MEMORY_SHARE)


def draw_tokens(
    state: np.ndarray, draws: Spans, drafts: np.ndarray, logits: torch.Tensor, sampling: SamplingParams
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample D tokens from logits [D, V]: one at each position of a sample's draft, and one after the draft.

    Args:
        state: [B] of :data:`python_trainer.rollout.paged.running.STATE`.
        draws: of the B samples.
        drafts: int64 [D - B], the tokens of all drafts one after the other.

    Returns:
        D tokens, D log-probabilities before top-k and top-p, and how many tokens of each draft were accepted: those
        before its first difference from the sampled tokens. Draws behind it have the id -1.

    Raises:
        NotFinite: logits are NaN or infinite.
    """
    # on the host, where the numbers are: a GPU would need a hundred launches
    uniforms = keyed_uniform(
        sampling.seed,
        torch.from_numpy(state["sample_id"][draws.owner]),
        torch.from_numpy(state["length"][draws.owner] + draws.offset),
    ).to(logits.device)
    settings: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    accepted: list[torch.Tensor] = []  # [B] with drafts
    if not len(drafts):
        ids, logprobs = sample_tokens(logits, uniforms, validate=False, **settings)
    else:
        starts = [*draws.starts.tolist(), len(logits)]
        draft_ids = torch.from_numpy(drafts).to(logits.device)
        *accepted, ids, logprobs = verify_drafts(logits, draft_ids, starts, uniforms, validate=False, **settings)
    if truncates(sampling) and sampling.temperature:  # the loss uses the whole distribution
        untruncated = token_logprobs(logits, ids.clamp(min=0), temperature=sampling.temperature)
        logprobs = torch.where(ids < 0, logprobs, untruncated.float())
    # one wait for the device; float64 holds all three exactly
    numbers = torch.cat([result.double() for result in (ids, logprobs, *accepted)]).cpu().numpy()
    drawn, drawn_logprobs, num_accepted = np.split(numbers, [len(logits), 2 * len(logits)])
    if np.isnan(drawn_logprobs).any():
        raise NotFinite("the policy cannot be sampled from: its logits are NaN or infinite")
    if not accepted:
        num_accepted = np.zeros(len(logits))
    return drawn.astype(np.int64), drawn_logprobs, num_accepted.astype(np.int64)
