"""A model on ``meta``, without numbers, and what the passes of generation and training over it take.

The passes are the trainer's own code. What differs by device is which kernels attend: those of the CPU, or on a GPU the
default as long as nothing else is proven, ``varlen_attn``, and padded rows where that does not run.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import embedding
from transformers.modeling_layers import GradientCheckpointingLayer

import rlkernels.backend
from python_trainer.data import Rollout
from python_trainer.errors import UserError
from python_trainer.hub import is_hub_id
from python_trainer.model.dtype import choose_dtype, count_described
from python_trainer.model.flat_forward import evaluation_mode, flat_attention, forward
from python_trainer.model.fused import FusedDecoder, supports
from python_trainer.model.hollow import META, model_on_meta
from python_trainer.model.logit_rule import described
from python_trainer.model.lora import add_adapters
from python_trainer.model.packed_attention import PackedLayout
from python_trainer.model.packing import micro_batches, pack
from python_trainer.model.padded_rows import PaddedRows
from python_trainer.model.paged_attention import beats_padding
from python_trainer.model.policy import Policy, recompute_activations
from python_trainer.model.reading import base_folder, read_settings
from python_trainer.model.settings import ModelConfig
from python_trainer.model.shipped import policy_folder
from python_trainer.model.traits import longest_sequence, run_flat
from python_trainer.model.varlen import VarlenRows, flash_rows, suits_flash, varlen_rows
from python_trainer.plan.peak import Peak
from rlkernels import sample_tokens

LAYERS = 3  # that are run, of a deep model


@dataclass(frozen=True)
class Device:
    """Where a run is to be.

    Attributes:
        kind: "cpu" or "cuda".
        memory: bytes of it that can be counted on.
        count: how many there are.
    """

    kind: str
    memory: int
    count: int = 1


class PlannedPolicy(Policy):
    """A policy without numbers and tokenizer, for passes whose memory is counted."""

    def __init__(self, config: ModelConfig, device: Device):
        settings, name = read_config(config)
        dtype = choose_dtype(config.dtype, torch.device(device.kind), lambda: count_described(settings, config))
        self.model = model_on_meta(settings, config, dtype).eval()
        self.whole, self.name, self.device = self.model, name, META
        text = self.model.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        with like(device):
            self.fused = supports(self.model)
        self.traits = run_flat(self.model, name)[0].traits(described(text), self.fused)
        self.max_length, self.limited_by = longest_sequence(self.model, self.traits.window)
        self.adapted = config.lora is not None
        if config.lora is not None:
            self.whole = add_adapters(self.model, config.lora)


def read_config(config: ModelConfig) -> tuple[Any, str]:
    """What the folder of a model says of its shapes, and its name; the weights are neither read nor fetched.

    Raises:
        UserError: there is no such folder, or no model in it.
    """
    hub = is_hub_id(config.path)
    folder = base_folder(policy_folder(config.path, config.revision, *([("*.json", "*.py")] if hub else [])))
    try:
        found = read_settings(folder, config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"model.path: {folder} does not say what model it is: {first}") from error
    return found, str(folder)


@contextmanager
def like(device: Device) -> Iterator[None]:
    """Within it ops on ``meta`` are those of the device; on a GPU those that run where nothing is proven."""
    with rlkernels.backend.meta_as_cpu() if device.kind == "cpu" else nullcontext():
        yield


def flash(rows: VarlenRows, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """As :meth:`VarlenRows.attend` on a GPU."""
    key, value = (embedding(rows.key_index, x.flatten(1)).unflatten(1, x.shape[1:]) for x in (key, value))
    starts = rows.cu_seq_q.to(META), rows.cu_seq_k.to(META)
    return flash_rows(query, key, value, *starts, rows.max_q, rows.max_k, scale=scale)


class FlashLayout(PackedLayout):
    """Packed groups as a GPU attends to them."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        rows = self._rows[META] = self._rows.get(META) or varlen_rows(self, META)
        return flash(rows, query, key, value, scale)


def training_bytes(policy: PlannedPolicy, device: Device, step: "Step", *, recompute: bool) -> int:
    """Most memory of a forward and backward pass over the largest micro-batch of a step, beside what is kept between.

    The gradients of all weights are taken to be there, as they are from the second micro-batch on. Of a deep model the
    first few layers are run: what each keeps for the backward pass is taken for that of every other.
    """
    packed = step.micro_batch().to(META)
    if device.kind != "cpu":
        layout = packed.layout
        packed.layout = FlashLayout(layout.prefix_lens, layout.suffix_lens, layout.group_starts)
    model, gpu_memory = policy.model, None if device.kind == "cpu" else device.memory
    with ExitStack() as undo:
        for param in model.parameters():
            if param.requires_grad:
                undo.callback(param.register_post_accumulate_grad_hook(_drop).remove)
        if recompute:
            recompute_activations(model)
            undo.callback(model.eval)
            undo.callback(model.gradient_checkpointing_disable)
        layers, left = ([], 0) if policy.fused and not recompute else undo.enter_context(first_layers(model))
        undo.enter_context(like(device))
        undo.enter_context(policy.packed_attention())
        peak = undo.enter_context(Peak(_held(model), gpu_memory))
        watch = Watch(peak, layers)
        undo.callback(watch.end)
        logprobs, entropy, _ = policy.score_with_states(packed, 1.0)
        (logprobs + entropy if step.entropy else logprobs).sum().backward()
    return max(watch.full + left * watch.kept, peak.most)


@contextmanager
def first_layers(model: torch.nn.Module) -> Iterator[tuple[list[torch.nn.Module], int]]:
    """Within it the model has only its first few layers -> those, and how many it lacks."""
    for stack in model.modules():
        if isinstance(stack, torch.nn.ModuleList) and all(isinstance(x, GradientCheckpointingLayer) for x in stack):
            whole = stack._modules
            stack._modules = dict(list(whole.items())[:LAYERS])
            try:
                yield list(stack), len(whole) - len(stack)
            finally:
                stack._modules = whole
            return
    yield [], 0


class Watch:
    """What a layer keeps for the backward pass, and the most while all layers keep it; ``peak`` then counts anew.

    Attributes:
        kept: bytes of a layer.
        full: most until the backward pass of the last layer is over; 0 without layers.
    """

    def __init__(self, peak: Peak, layers: Sequence[torch.nn.Module]):
        self.peak, self.kept, self.full = peak, 0, 0
        self._entered: dict[torch.nn.Module, int] = {}
        self._layers = layers
        self._handles = [layer.register_forward_pre_hook(self._enter) for layer in layers]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if layer not in self._entered:  # else it is computed again
            self._entered[layer] = self.peak.now
            if layer is self._layers[-1]:
                before = self._entered[self._layers[-2]] if len(self._layers) > 1 else self.peak.now
                self.kept = self.peak.now - before
                inputs[0].register_hook(self._leave)

    def _leave(self, _: torch.Tensor) -> None:
        self.full, self.peak.most = self.peak.most, self.peak.now


def _drop(param: torch.Tensor) -> None:
    param.grad = None


def _held(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@dataclass(frozen=True)
class Step:
    """The answers of a step, all of them as long as they may be.

    Attributes:
        prompt, answer: tokens.
        tokens: most of a micro-batch.
        share: a group's prompt is there once.
        entropy: it has a gradient too.
    """

    prompts: int
    samples: int
    prompt: int
    answer: int
    tokens: int
    share: bool
    entropy: bool

    def micro_batch(self) -> Any:
        """The first micro-batch, which is the largest: all are cut alike."""
        groups = min(self.prompts, self.tokens // self.answer + 1)
        prompts = [([0, group] * self.prompt)[-self.prompt :] for group in range(groups)]  # no two are alike
        rollouts = [Rollout(prompt, [0] * self.answer) for prompt in prompts for _ in range(self.samples)]
        first = next(iter(micro_batches(rollouts, range(len(rollouts)), self.tokens, share=self.share)))
        return pack(rollouts, first, share=self.share)


@dataclass
class GatheredKeys:
    """The ``attention`` of a pass of generation on a GPU where nothing is proven, as of ``Paging.rows_for``."""

    sequences: int
    query: int  # tokens of each
    key: int

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        keys = torch.empty(self.sequences, self.key, dtype=torch.int64, device=META)
        scores = self.sequences * self.query * self.key * query.shape[1]
        if suits_flash(query) and beats_padding(scores):
            starts = torch.empty(self.sequences + 1, dtype=torch.int32, device=META)
            return flash(VarlenRows(keys.flatten(), starts, starts, self.query, self.key), query, key, value, scale)
        index = torch.empty(self.sequences, self.query, dtype=torch.int64, device=META)
        place = index.flatten()[: len(query)]
        return PaddedRows(index, keys, index, place, kernel=output_alone).attend(query, key, value, scale)


def output_alone(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """A kernel that holds nothing but what it returns, as those for ``scaled_dot_product_attention`` with a mask."""
    return torch.empty_like(query)


class Nothing:
    """The ``attention`` of a pass whose kernel holds nothing but its output."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        return torch.empty_like(query)


def generating_bytes(
    policy: PlannedPolicy, device: Device, sizes: Sequence[tuple[int, int, int]], *, gathered: bool, filtered: bool
) -> int:
    """Most memory of the passes of generation, and of drawing a token for each sequence, beside the cache.

    Args:
        sizes: (sequences, new tokens of each, tokens it sees) of each kind of pass.
        gathered: attention is what stands in for a kernel of our own on a GPU.
        filtered: with top_p or top_k.
    """
    most, model = 0, policy.whole
    for sequences, new, seen in sizes:
        ids = torch.empty(sequences * new, dtype=torch.int64, device=META)
        attention = GatheredKeys(sequences, new, seen) if gathered else Nothing()
        layers = nullcontext() if policy.fused else first_layers(model)  # nothing of them is kept
        with layers, like(device), evaluation_mode(model), flat_attention(model), Peak(_held(model)) as peak:
            run: Any = FusedDecoder(model, seen, pack=True) if policy.fused else partial(forward, model)
            logits = run(ids, ids, ids[:sequences], attention)
            uniforms = torch.empty(sequences, device=META)
            sample_tokens(logits, uniforms, top_p=0.9 if filtered else 1.0, validate=False)
        most = max(most, peak.most)
    return most
