"""Attention under the models of Transformers: one function that their layers call, and one protocol behind it.

The function is registered at ``AttentionInterface`` as ``rlkernels``. An :class:`Attention` object defines the tokens
that each token attends to. It is the argument ``attention`` of the model's forward, which passes it to every layer. For
models that do not pass unknown arguments on, ``ACTIVE`` holds it. Transformers makes no mask for a name without a mask
function: a model may get the tokens of all sequences as one row, with position ids only. A model that would ignore the
layout or the positions of such a row is refused, see ``_call_model``.
"""

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlkernels.integrations.transformers_recurrence import followed_layers
from rlkernels.prefix_cache import TreeLayout

__all__ = [
    "IMPLEMENTATION", "Attention", "attention_layers", "logit_factor", "mixing_layers", "other_layers", "probe_layers",
    "rotary_limit", "set_attention", "sliding_window",
]  # fmt: skip

IMPLEMENTATION = "rlkernels"
NO_INTERFACE = "its layers do not call Transformers' attention interface"
PLAIN = {"full_attention", "sliding_attention"}  # kinds of layers
# arguments of attention functions that change the result and that our kernels do not know
UNSUPPORTED = ("sinks", "position_bias", "block_table", "cu_seq_lens_q")


class Attention(Protocol):
    """The tokens that each of the T tokens of a forward pass attends to."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
               window: int | None, *, softcap: float | None = None, return_lse: bool = False) -> Any:  # fmt: skip
        """Attend: query [T, Hq, d], key and value [T, Hk, d] -> [T, Hq, d], with ``return_lse`` also lse [T, Hq].

        ``window``: tokens of a sliding window. Only models that need ``softcap`` and ``return_lse`` pass them.
        """


ACTIVE: ContextVar[Attention | None] = ContextVar("rlkernels_attention", default=None)


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return attention [T, Hq, d] whose softmax has a further score ``sinks`` [Hq] without a key; differentiable.

    Args:
        out: [T, Hq, d], attention without sinks.
        lse: float32 [T, Hq], natural logarithm of the denominator of ``out``.
        sinks: [Hq].
    """
    return (out * (lse - sinks.to(lse.dtype)).sigmoid()[..., None]).to(out.dtype)


def other_layers(config: PretrainedConfig | None) -> list[str]:
    """List the kinds of layers other than full causal attention and sliding windows.

    Chunked attention is one, although only its mask differs.

    Args:
        config: of the decoder.

    Returns:
        Kinds, sorted, as the config's ``layer_types`` names them.
    """
    return sorted(set(getattr(config, "layer_types", None) or ()) - PLAIN)


def attention_layers(config: PretrainedConfig) -> list[int]:
    """List the layers that are attention.

    Args:
        config: of the decoder.

    Returns:
        Their indices, in order.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind in PLAIN]


def mixing_layers(config: PretrainedConfig | None, modules: Iterable[torch.nn.Module]) -> list[str]:
    """List the kinds of layers that would carry values from one branch of a packed tree into the next.

    Args:
        config: of the decoder.
        modules: all modules of the decoder, or at least one of each modeling file.

    Returns:
        Kinds, sorted, as the config's ``layer_types`` names them.
    """
    if not (kinds := other_layers(config)):
        return []
    files = {cls.__module__ for module in modules for cls in type(module).__mro__}  # FSDP derives classes of its own
    return sorted({*kinds}.difference(*map(followed_layers, files)))


def rotary_limit(config: PretrainedConfig) -> int | None:
    """Return the length up to which rotary factors do not depend on the length.

    Beyond it the factors of all tokens follow the longest sequence of a pass, so that cached keys do not fit any more.

    Args:
        config: of the decoder.

    Returns:
        Tokens; None without a limit.
    """
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    limits = []
    for parameters in (rope_parameters, *rope_parameters.values()):  # of all layers, or of each kind of layer
        rope_type = (parameters.get("rope_type") if isinstance(parameters, dict) else None) or ""
        if rope_type == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
        elif "dynamic" in rope_type:
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def logit_factor(config: PretrainedConfig) -> float:
    """Return the factor by which a decoder's config scales logits.

    Granite divides by ``logits_scaling``, HyperCLOVA X multiplies by it. Cohere multiplies by ``logit_scale``,
    Falcon-H1 by ``lm_head_multiplier``, Muse by ``output_multiplier``.

    Args:
        config: of the decoder.

    Returns:
        The factor; 1 if the config has none.
    """

    def setting(name: str) -> float:
        value = getattr(config, name, None)
        return 1.0 if value is None else value

    factor = setting("logit_scale") * setting("lm_head_multiplier") * setting("output_multiplier")
    scaling = setting("logits_scaling")
    return factor * scaling if config.model_type == "hyperclovax" else factor / scaling


class _Probe:
    """An attention that records the calls, shapes and windows of layers."""

    def __init__(self) -> None:
        self.times: Counter[int] = Counter()  # calls of each layer
        self.shapes: dict[tuple[int, int], int] = {}  # (heads, dimensions) of keys and values -> first such layer
        self.windows: list[int] = []  # tokens

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
               window: int | None, *, softcap: float | None = None, return_lse: bool = False) -> Any:  # fmt: skip
        self.times[layer] += 1
        self.shapes.setdefault((key.shape[1], key.shape[2]), layer)
        if window is not None:
            self.windows.append(window)
        out = torch.zeros_like(query)
        return (out, out[..., 0].float()) if return_lse else out


@torch.no_grad()
def probe_layers(model: PreTrainedModel, layers: Collection[int]) -> tuple[int, int, int | None]:
    """Find the shape of keys and values, and the smallest sliding window, by a forward pass on one token.

    Args:
        model: attends by :data:`IMPLEMENTATION`.
        layers: indices of those that attend.

    Returns:
        Heads of keys and values, their dimensions, and the window in tokens, None without one.

    Raises:
        ValueError: keys or values differ among the layers, or a layer does not attend once.
    """
    probe = _Probe()
    token = ACTIVE.set(probe)
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        ACTIVE.reset(token)
    check_layers(probe.times, layers, type(model).__name__)
    if len(probe.shapes) > 1:
        raise ValueError(
            f"keys and values must have one shape in all layers, {type(model).__name__} has (heads, dimensions): "
            f"{', '.join(f'{shape} from layer {layer} on' for shape, layer in probe.shapes.items())}"
        )
    heads, dim = next(iter(probe.shapes))
    return heads, dim, min(probe.windows, default=None)


def check_layers(times: Mapping[int, int], layers: Collection[int], name: str) -> None:
    """Raise unless each of the layers attended once; ``name`` is the model's."""
    counts = {layer: times.get(layer, 0) for layer in layers}
    if wrong := {layer: count for layer, count in counts.items() if count != 1}:
        raise ValueError(
            f"each of {len(layers)} layers must attend once in a pass of {name}, by the attention implementation "
            f"{IMPLEMENTATION!r}, got {wrong} (layer: times)"
        )


def sliding_window(config: Any, layer: int | None = None) -> int | None:
    """Return the sliding window that a config states.

    Args:
        config: of the decoder.
        layer: index of a layer; None: that of all sliding layers.

    Returns:
        Tokens; None without a window.
    """
    if not hasattr(type(config), "sliding_window"):  # a Llama's config may hold one, which the model ignores
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        has_window = getattr(config, "use_sliding_window", None) is not False
    else:
        has_window = "sliding_attention" in (kinds if layer is None else kinds[layer : layer + 1])
    return config.sliding_window if has_window else None


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of a model's decoder; that of a vision tower stays.

    Args:
        model: of any kind.
        name: of the implementation, as the config of the decoder keeps it.
    """
    decoder = model.config.get_text_config(decoder=True)
    by_config = {key: name for key in model.config.sub_configs if getattr(model.config, key, None) is decoder}
    model.set_attn_implementation(by_config or name)


def masks_windows(module: torch.nn.Module) -> bool:
    """Return whether the modeling file of a layer puts the sliding window of the config into masks."""
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)  # FSDP derives classes of its own
    return any(hasattr(file, "create_sliding_window_causal_mask") for file in files)


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            attention_mask: torch.Tensor | None, scaling: float | None = None, *, attention: Attention | None = None,
            **kwargs: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend, with the signature of Transformers: [B, H, q, d] each -> [B, q, Hq, d]."""
    if attention is None:
        attention = ACTIVE.get()
    if attention is None:
        raise ValueError(
            f"attn_implementation={IMPLEMENTATION!r}, which `import rlkernels.integrations.transformers` registers, "
            "needs cache=PagedCache(...), before transformers 5.24 past_key_values=PagedCache(...), or layers that "
            "hand on the argument attention of a training pass; "
            f"{type(module).__name__} got neither"
        )
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} uses {name}, which the attention of rlkernels does not know")
    if kwargs.get("dropout"):
        raise ValueError(
            f"{type(module).__name__} drops attention weights (dropout={kwargs['dropout']}), which the attention of "
            "rlkernels does not do: call eval() of the model, or set its dropout of attention to 0"
        )
    if isinstance(attention, TreeLayout) and (mixing := mixing_layers(getattr(module, "config", None), [module])):
        raise ValueError(
            f"the model of {type(module).__name__} has layers of {', '.join(mixing)}, which do not follow a tree: "
            "pass each sequence by itself"
        )
    if attention_mask is not None or getattr(module, "is_causal", None) is False:
        what = "looks ahead (is_causal is False)" if attention_mask is None else "makes an attention_mask of its own"
        raise ValueError(
            f"{type(module).__name__} {what}, which the attention of rlkernels does not know: it is causal"
        )
    window = None  # also if only the config has one, as in Moshi
    if "sliding_window" in kwargs:
        window = kwargs["sliding_window"]
    elif masks_windows(module):
        window = sliding_window(getattr(module, "config", None), module.layer_idx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # rotary factors leave queries and keys in float32
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    batch, _, tokens, key_dim = query.shape
    value_dim = value.shape[-1]
    dim = max(key_dim, value_dim)  # zeros widen the narrower of keys and values: their products add nothing
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B * q, H, d]
    query, key, value = (x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1])) for x in (query, key, value))
    if isinstance(attention, TreeLayout):
        attention.attended = True
    sinks = kwargs.get("s_aux")
    options: dict[str, Any] = {} if kwargs.get("softcap") is None else {"softcap": kwargs["softcap"]}
    attend = functools.partial(attention.attend, module.layer_idx, query, key, value, scale, window, **options)
    if sinks is None:
        out = attend()
    else:
        out, lse = attend(return_lse=True)
        out = add_sinks(out, lse, sinks)
    return out[..., :value_dim].unflatten(0, (batch, tokens)), None


def uses_interface(model_class: type[PreTrainedModel]) -> bool:
    """Return whether attention layers in a model's file call the function that the config names."""
    layers = [
        cls
        for name, cls in getattr(sys.modules.get(model_class.__module__), "__dict__", {}).items()
        if "Attention" in name and isinstance(cls, type) and issubclass(cls, torch.nn.Module)
    ]
    files = {base.__module__ for layer in layers for base in layer.__mro__}
    return not layers or any(hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS") for file in files)


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether a model, or a model inside it, takes position ids; others number the tokens of a row."""
    classes = (type(module) for module in model.modules() if isinstance(module, PreTrainedModel))
    return any("position_ids" in inspect.signature(cls.forward).parameters for cls in classes)


def why_ignored(model: PreTrainedModel) -> str:
    """Return the reason why no layer of a model attended by ``IMPLEMENTATION``."""
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation == IMPLEMENTATION or not uses_interface(type(model)):
        return NO_INTERFACE
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if function is not None and "attention" in inspect.signature(function).parameters:  # one that TRL's trainers wrap
        return "its layers do not hand on the argument attention"
    return f"it attends by {implementation!r}, call set_attn_implementation({IMPLEMENTATION!r})"


_check_name = PreTrainedModel.get_correct_attn_implementation


@functools.wraps(_check_name)
def _check_implementation(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
    """Refuse ours for models whose layers do not call it: Transformers makes no mask for them either."""
    is_decoder = self.can_generate() and self.config.get_text_config(decoder=True) is self.config
    if requested_attention == IMPLEMENTATION and is_decoder and not uses_interface(type(self)):
        raise ValueError(f"attn_implementation={IMPLEMENTATION!r} cannot run {type(self).__name__}: {NO_INTERFACE}")
    return _check_name(self, requested_attention, *args, **kwargs)


def _are_wrong(positions: torch.Tensor, layout: TreeLayout) -> bool:
    """Return whether positions [1, T] are not those of the layout; False on a GPU, which would have to wait for it."""
    if positions.device.type != "cpu" or positions.ndim != 2 or torch.compiler.is_compiling():
        return False
    return not torch.equal(positions.long(), layout.position_ids[None])


def _call_model(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Call the model; raise if it cannot run the packed pass whose layout is the argument ``attention``."""
    layout = kwargs.get("attention")
    if not isinstance(layout, TreeLayout) or layout.attended is not None:  # or it is inside a model that was checked
        return torch.nn.Module.__call__(self, *args, **kwargs)
    positions = kwargs.get("position_ids")
    if positions is None and len(args) < 3:  # the third argument of most models
        raise ValueError(
            f"position_ids must be given to {type(self).__name__} in a packed pass, got None: give the layout's "
            "position_ids[None]; a model numbers the tokens of a row from 0 by itself"
        )
    if positions is not None and _are_wrong(positions, layout):
        raise ValueError(
            f"position_ids must be the layout's position_ids[None] for {type(self).__name__} in a packed pass, got "
            f"others of shape {list(positions.shape)}"
        )
    if kwargs.get("labels") is not None:
        raise ValueError(
            f"labels must not be given to {type(self).__name__} in a packed pass, whose row has other next tokens than "
            "its sequences: score the rows and targets of pack() by token_logprobs"
        )
    layout.attended = False
    try:
        output = torch.nn.Module.__call__(self, *args, **kwargs)
        attended = layout.attended
    finally:
        layout.attended = None
    if not attended:
        raise ValueError(f"{type(self).__name__} cannot run a packed pass: {why_ignored(self)}")
    if not (torch.compiler.is_compiling() or takes_positions(self)):
        raise ValueError(f"{type(self).__name__} cannot run a packed pass: it takes no position_ids")
    return output


AttentionInterface.register(IMPLEMENTATION, _attend)
PreTrainedModel.get_correct_attn_implementation = _check_implementation  # type: ignore[method-assign]
PreTrainedModel.__call__ = _call_model  # type: ignore[assignment,method-assign]
