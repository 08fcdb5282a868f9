"""``model.generate`` of Transformers on a paged KV cache: prompts with a common prefix share keys and values.

    kv = paged_kv_cache(model, memory_bytes=1 << 30)
    with PagedCache(kv, **inputs) as cache:
        output = model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24

Works for decoder models whose layers use Transformers' attention interface. Needs transformers 5.19 or newer, below 6.
"""

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import transformers
from transformers import Cache, PreTrainedModel

from rlkernels import _check
from rlkernels.integrations.transformers_attention import (
    ACTIVE,
    IMPLEMENTATION,
    check_layers,
    other_layers,
    probe_layers,
    rotary_limit,
    set_attention,
)
from rlkernels.prefix_cache import Packed, PagedKVCache, Sequence, pack, paged_attention, write_kv

__all__ = ["IMPLEMENTATION", "Packed", "PagedCache", "pack", "paged_kv_cache"]

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
if not (5, 19) <= VERSION < (6, 0):
    raise ImportError(
        f"rlkernels.integrations.transformers needs transformers >= 5.19, < 6, found {transformers.__version__}"
    )


@dataclass
class _Attached:
    """The model of a PagedKVCache."""

    model: Callable[[], PreTrainedModel | None]  # a weak reference
    adapters: tuple = ()  # adapter state when the last PagedCache was opened


# Tensors that a forward pass may get: keys and values depend on the first three only.
KNOWN = ("input_ids", "attention_mask", "position_ids", "labels", "logits_to_keep", "num_items_in_batch")

_attached: "weakref.WeakKeyDictionary[PagedKVCache, _Attached]" = weakref.WeakKeyDictionary()
_signature = functools.cache(inspect.signature)


def paged_kv_cache(
    model: PreTrainedModel, *, num_blocks: int | None = None, memory_bytes: int | None = None, block_size: int = 16
) -> PagedKVCache:
    """Make the model attend through a paged cache, and return a cache that fits the model.

    From then on the model runs with ``cache=PagedCache(...)`` only, until ``model.set_attn_implementation`` chooses
    another implementation. Call ``advance_version()`` of the cache after the weights have changed.

    Args:
        model: a decoder model, which may have adapters of PEFT; its dtype and device are those of the cache. It runs
            once on one token, which shows the shape of keys and values.
        num_blocks, memory_bytes, block_size: as for :class:`rlkernels.PagedKVCache`.

    Returns:
        The cache, for ``PagedCache``.

    Raises:
        ValueError: paged attention cannot run the model.
    """
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()  # a PeftModel's generate calls its base model
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"model must be a decoder, got {name}, an encoder-decoder")
    if kinds := other_layers(config):
        raise ValueError(f"model must have attention in every layer, got {name} with {', '.join(kinds)}")
    previous = config._attn_implementation
    set_attention(model, IMPLEMENTATION)
    try:
        layers = getattr(config, "decoder_layers", None) or config.num_hidden_layers
        heads, dim, _ = probe_layers(model, range(layers))
        kv = PagedKVCache(
            layers, heads, dim, num_blocks=num_blocks, memory_bytes=memory_bytes,
            block_size=block_size, dtype=model.dtype, device=model.device,
        )  # fmt: skip
    except BaseException:
        set_attention(model, previous)
        raise
    if _before_forward not in model._forward_pre_hooks.values():  # a copy of a prepared model has them already
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True)
    _attached[kv] = _Attached(weakref.ref(model))
    return kv


@dataclass
class _Step:
    """The places of the B * q tokens of one forward pass; ``queries`` and ``writes`` pick rows, None takes all."""

    queries: torch.Tensor | None  # bool [B * q]: not padding
    writes: torch.Tensor | None  # bool [B * q]: keys and values that are not cached yet
    slots: torch.Tensor  # int64, one for each row picked by ``writes``
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    longest: int
    attended: Counter[int] = field(default_factory=Counter)  # calls of each layer


class PagedCache(Cache):
    """The ``cache`` of one batch: a sequence of a :class:`rlkernels.PagedKVCache` for each row.

    Cached tokens are not computed again: ``generate`` feeds the model the tokens after the row's cached prefix, in a
    batch after the shortest one. Rows may be padded on the left. Several samples per prompt share the blocks of their
    common prefix. Beams and assisted generation raise an error.

    The key of a block is the tokens from the start of its row up to its end, and the policy version. The version
    advances if other adapters of PEFT are active or merged than when the last PagedCache was opened. A forward pass
    raises on anything else that changes keys and values: position ids that do not count a row's tokens from 0, padding
    without position ids (also in models that take none, like Bart), adapters changed since the PagedCache was opened,
    ``adapter_names``, dropout, another model, and tensors such as ``inputs_embeds``, ``token_type_ids`` and
    ``pixel_values``. Changed weights need ``advance_version()``.

    Close it, or use it as a context manager: then its tokens stay cached for later prompts until their space is needed.

    Args:
        kv: made by :func:`paged_kv_cache` for the model.
        input_ids: int64 [B, L], those of ``generate``.
        attention_mask: [B, L], 0 for padding, which must be on the left. None: no padding.

    Raises:
        TypeError, ValueError: no tensors [B, L]; padding that is not on the left, or a row without tokens.
        OutOfBlocks: the prompts do not fit; nothing has been changed.

    Attributes:
        num_cached: cached tokens of each row.
    """

    def __init__(self, kv: PagedKVCache, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None):
        super().__init__(layers=[])
        self.kv = kv
        self._prompts, self._pads = _unpadded(input_ids, attention_mask)
        self._sequences: list[Sequence] = []
        self._width = input_ids.shape[1]  # columns of the batch whose tokens are known
        self._columns = self._width  # columns that were computed
        self._committed = False
        self._step: _Step | None = None
        self._failed = False  # also True while a pass runs
        self._attached = _attached.get(kv, _Attached(lambda: None))
        self._adapters = adapter_state(self._attached.model())
        self._open(1)

    @property
    def is_linear(self) -> list[bool]:
        """Return False for each layer, so that ``generate`` feeds the model only tokens that are not cached."""
        return [False] * len(self.kv.key_cache)

    def _open(self, copies: int, columns: int | None = None) -> None:
        """Open sequences for ``copies`` of each row; ``columns``: of the batch that are not computed again."""
        self._prompts = [prompt for prompt in self._prompts for _ in range(copies)]
        self._pads = [pad for pad in self._pads for _ in range(copies)]
        if self._adapters != self._attached.adapters:  # other adapters computed the cached keys and values
            self.kv.advance_version()
            self._attached.adapters = self._adapters
        self._sequences = self.kv.open_many(self._prompts)
        self.num_cached = [seq.num_cached for seq in self._sequences]
        cached_columns = min((pad + n for pad, n in zip(self._pads, self.num_cached)), default=0)
        if columns is not None and cached_columns < columns:
            self.close()
            raise ValueError("the policy version has advanced since the PagedCache was opened: open another")
        self._columns = cached_columns if columns is None else columns

    def begin(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
        """Prepare a forward pass on the next columns [B, q] of the batch; ``inputs``: the model's arguments."""
        input_ids = inputs.get("input_ids")
        attention_mask = inputs.get("attention_mask")
        if input_ids is None:
            raise ValueError("input_ids must be given, got None: a PagedCache finds shared beginnings by their tokens")
        if not self._sequences or self._failed:
            raise ValueError("cache must be an open PagedCache, got one that is closed, failed or empty; open another")
        if self._attached.model() is not model:  # keys and values of two models would mix
            raise ValueError(
                f"cache must be made with paged_kv_cache(model) of this {type(model).__name__}, got another's"
            )
        batch, new = input_ids.shape
        check_pass(model, inputs, self._adapters)
        if attention_mask is None and any(self._pads):
            raise ValueError(f"attention_mask must be given, got None: the rows have {self._pads} columns of padding")
        rows = len(self._sequences)
        if batch % rows or (self._committed and batch != rows):
            raise ValueError(f"input_ids must have {rows} rows, or at first a multiple (samples), got {batch}")
        if batch > rows:
            self.close()
            self._open(batch // rows, self._columns)
        end = self._columns + new
        if end < self._width:  # a row may rely on tokens that another row computes in the same pass
            raise ValueError(
                f"input_ids must hold all {self._width - self._columns} columns that are not cached, got {new}; "
                "prefill_chunk_size is not supported"
            )
        limit = rotary_limit(model.config.get_text_config(decoder=True))
        if limit is not None and (longest := end - min(self._pads)) > limit:
            raise ValueError(
                f"sequences must be at most {limit} tokens, the original length of the model's rotary factors, got "
                f"{longest}: beyond it they change, and cached keys were computed with others"
            )
        if not self._committed:
            self._check_tokens(input_ids)
        if attention_mask is not None:
            self._check_mask(attention_mask, end)
        device = self.kv.device
        pads = torch.tensor(self._pads, device=device)
        cached = torch.tensor(self.num_cached, device=device)
        index = torch.arange(self._columns, end, device=device) - pads[:, None]  # [B, q], of the token in its sequence
        self._check_positions(inputs.get("position_ids"), index)
        if end > self._width:
            self.kv.append_many(self._sequences, input_ids[:, self._width - end :].tolist())
        self._end = end
        self._failed = True  # an error from here on leaves tokens without keys and values
        tables, _ = self.kv.tables(self._sequences)
        token = index.clamp(min=0)
        block = tables.gather(1, token // self.kv.block_size).long()
        slots = block * self.kv.block_size + token % self.kv.block_size
        writes = index >= cached[:, None]
        seq_lens = (end - pads).clamp(min=0)
        query_starts = torch.cat([pads.new_zeros(1), seq_lens.clamp(max=new).cumsum(0)])
        has_padding = self._columns < max(self._pads)
        has_cached = any(self._columns < pad + n for pad, n in zip(self._pads, self.num_cached))
        self._step = _Step(
            queries=(index >= 0).flatten() if has_padding else None,
            writes=writes.flatten() if has_padding or has_cached else None,
            slots=slots[writes],
            block_tables=tables,
            seq_lens=seq_lens.int(),
            query_starts=query_starts.int(),
            longest=end - min(self._pads),
        )

    def _check_tokens(self, input_ids: torch.Tensor) -> None:
        """Check that the first pass has the prompts' tokens, which are the key of its cached keys and values."""
        for row, (prompt, pad, ids) in enumerate(zip(self._prompts, self._pads, input_ids.tolist())):
            start = self._columns - pad
            expected = prompt[max(start, 0) :]
            if ids[max(-start, 0) :][: len(expected)] != expected:
                raise ValueError(
                    f"input_ids must be those that the PagedCache was opened with, got others in row {row}: "
                    "open one for each batch"
                )

    def _check_positions(self, position_ids: torch.Tensor | None, index: torch.Tensor) -> None:
        """Raise unless positions count tokens from 0; ``index`` [B, q]: of a token in its row, negative for padding."""
        if position_ids is None:
            if any(self._pads):
                raise ValueError(
                    "position_ids must be given for rows with padding, which counts as positions without them. Give "
                    f"(attention_mask.cumsum(1) - 1).clamp(min=0)[:, {self._columns}:] in every pass"
                )
            return
        wrong = (position_ids.to(index.device) != index) & (index >= 0)
        if wrong.any():
            row, column = wrong.nonzero()[0, -2:].tolist()
            got = int(position_ids.expand(wrong.shape)[wrong][0])
            raise ValueError(
                "position_ids must count the tokens of each row from 0, padding left out, in every pass, got "
                f"{got} for token {int(index[row, column])} of row {row}"
            )

    def _check_mask(self, mask: torch.Tensor, end: int) -> None:
        """Raise unless columns up to ``end`` are 0 for the prompts' padding, and 1 after it."""
        rows = len(self._sequences)
        if mask.ndim != 2 or mask.shape[0] != rows or mask.shape[1] < end:
            raise ValueError(
                f"attention_mask must have shape [{rows}, {end}], got {list(mask.shape)}: the PagedCache holds "
                f"{self._columns} columns already; open one for each batch"
            )
        pads = torch.tensor(self._pads, device=mask.device)
        wrong = (mask[:, :end] != 0) != (torch.arange(end, device=mask.device) >= pads[:, None])
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"attention_mask must be the one that the PagedCache was opened with ({self._pads} columns of padding "
                f"on the left), then 1 for every new column, got {int(mask[row, column])} at [{row}, {column}]"
            )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
        window: int | None, *, softcap: float | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Attend: query [B * q, Hq, d], key and value [B * q, Hk, d] -> [B * q, Hq, d], zeros for padding."""
        if torch.is_grad_enabled() and query.requires_grad:
            raise ValueError("paged attention has no gradient: run the model under torch.no_grad()")
        kv = self.kv
        step = self._step
        assert step is not None
        if layer >= len(kv.key_cache) or value.shape[1:] != kv.key_cache.shape[3:]:
            raise ValueError(
                f"keys and values of layer {layer} must be {list(kv.key_cache.shape[3:])} (heads, dimensions), got "
                f"{list(value.shape[1:])}; layers of differing shape are not supported"
            )
        if step.writes is not None:
            key = key[step.writes]
            value = value[step.writes]
        write_kv(key, value, kv.key_cache[layer], kv.value_cache[layer], step.slots)
        results: Any = paged_attention(
            query if step.queries is None else query[step.queries], kv.key_cache[layer], kv.value_cache[layer],
            step.block_tables, step.seq_lens, step.query_starts, scale=scale, softcap=softcap, return_lse=True,
            window=None if window is None or window >= step.longest else window,
        )  # fmt: skip
        step.attended[layer] += 1
        if step.queries is not None:
            results = tuple(x.new_zeros(len(query), *x.shape[1:]).index_put((step.queries,), x) for x in results)
        return results if return_lse else results[0]

    def finish(self, name: str, *, failed: bool) -> None:
        """End a forward pass; unless it failed, all its keys and values are written."""
        step = self._step
        self._step = None
        if failed:
            return
        assert step is not None
        check_layers(step.attended, range(len(self.kv.key_cache)), name)
        self._columns = self._width = self._end
        self._failed = False
        if not self._committed:
            self._commit()

    def _commit(self) -> None:
        for seq in self._sequences:
            self.kv.commit(seq)
        self._committed = True

    def close(self) -> None:
        """Give the blocks back; computed tokens stay cached for later prompts until their space is needed."""
        if self._columns == self._width and not self._failed:
            self._commit()
        for seq in self._sequences:
            self.kv.close(seq)
        self._sequences = []

    def __enter__(self) -> "PagedCache":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values for the attention function, which writes them."""
        if self._step is None:
            raise ValueError(
                "cache must be a PagedCache of a model prepared by paged_kv_cache(model, ...), got one in a "
                "forward pass of another model"
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of computed columns of the batch, padding included."""
        return self._columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise; the base class would change nothing."""
        raise NotImplementedError("a PagedCache is for one batch, without beams and assisted generation")

    reset = crop = activate_past_recording = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse


def _unpadded(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each row, and how many columns of padding precede them."""
    _check.tensor("input_ids", input_ids, ndim=2)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    _check.tensor("attention_mask", attention_mask, ndim=2)
    _check.shape("attention_mask", attention_mask, input_ids.shape)
    is_token = attention_mask.bool().cpu()
    width = is_token.shape[1]
    pads = (~is_token).sum(1).tolist()
    columns = torch.arange(width, device="cpu")
    before_padding = is_token & (columns < torch.tensor(pads, device="cpu")[:, None])
    if before_padding.any():
        row, column = before_padding.nonzero()[0].tolist()
        raise ValueError(
            "attention_mask must be 0 on the left only (tokenizer.padding_side = 'left'), got "
            f"{int(attention_mask[row, column])} at [{row}, {column}] and 0 to the right of it"
        )
    if width in pads:
        raise ValueError(f"input_ids must have a token in every row, got only padding in row {pads.index(width)}")
    return [ids[pad:] for ids, pad in zip(input_ids.tolist(), pads)], pads


def _before_forward(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Begin a pass of the PagedCache among the model's arguments, if there is one."""
    if isinstance(ACTIVE.get(), PagedCache):  # of a pass that KeyboardInterrupt ended: torch runs no hooks then
        ACTIVE.set(None)
    signature = _signature(type(model).forward)
    inputs = signature.bind_partial(model, *args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            inputs |= inputs.pop(name, {})
    for name in ("cache", "past_key_values"):  # the first from transformers 5.24 on
        cache = inputs.get(name)
        if isinstance(cache, PagedCache):
            cache.begin(model, inputs)
            ACTIVE.set(cache)


def _after_forward(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Finish the active cache's pass; after a failed pass ``output`` is None."""
    cache = ACTIVE.get()
    ACTIVE.set(None)
    if isinstance(cache, PagedCache):
        cache.finish(type(model).__name__, failed=output is None)


def check_pass(model: PreTrainedModel, inputs: Mapping[str, Any], adapters: tuple) -> None:
    """Check that keys and values of a forward pass depend on tokens, positions and adapters only.

    Raises:
        ValueError: another attention implementation, other tensors, adapters that changed since the PagedCache was
            opened, or dropout.
    """
    name = type(model).__name__
    if (attention := model.config.get_text_config(decoder=True)._attn_implementation) != IMPLEMENTATION:
        raise ValueError(
            f"{name} must attend by {IMPLEMENTATION!r} with a PagedCache, got {attention!r}: "
            f"call set_attn_implementation({IMPLEMENTATION!r}), which `import {__name__}` registers"
        )
    for argument, value in inputs.items():
        if argument not in KNOWN and _holds_tensor(value):
            raise ValueError(
                f"{argument} must not be given to {name} with a PagedCache, which finds keys and values by tokens, "
                "positions and adapters alone: run it without a PagedCache"
            )
    if adapter_state(model) != adapters:
        raise ValueError(f"the adapters of {name} must stay as they were when the PagedCache was opened")
    if model.training and (active := _dropout(model)):
        raise ValueError(f"{name} must be in eval mode, got {active}: cached keys and values would hold its noise")


def adapter_state(model: PreTrainedModel | None) -> tuple:
    """Return the active and merged adapters of each layer with adapters of PEFT; () without any.

    Raises:
        ValueError: rows of a batch have different adapters.
    """
    state: list[Any] = []
    module: Any
    for module in model.modules() if model is not None else ():
        if type(module).__module__ == "peft.tuners.adaption_prompt.layer":  # PEFT inserts and removes the whole module
            state.append(id(module))
        if not isinstance(getattr(type(module), "disable_adapters", None), property):  # all other layers of PEFT do
            continue
        for hook in module._forward_pre_hooks.values():
            for name in ("adapter_names", "alora_offsets"):
                if name in getattr(hook, "keywords", ()):
                    raise ValueError(
                        f"{name} must not be given with a PagedCache: it has one adapter for all rows. Choose it with "
                        "set_adapter, and open a PagedCache for each"
                    )
        state.append(None if module.disable_adapters else (*module.active_adapters, "merged", *module.merged_adapters))
    return tuple(state) if any(state) else ()


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensor, value)))


def _dropout(model: PreTrainedModel) -> str | None:
    """Return the first setting or module with dropout in training mode, with its probability; None without one."""
    for name, value in model.config.get_text_config(decoder=True).to_dict().items():
        if "drop" in name and isinstance(value, float) and value > 0:
            return f"{name} {value}"
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            return f"{name} {module.p}"
    return None
