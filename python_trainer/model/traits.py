"""Checks a model with three tokens: how its layers attend, and that nothing but attention looks across tokens."""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from python_trainer.errors import UserError
from python_trainer.model.forward import (
    LogitRule,
    evaluation_mode,
    flat_attention,
    forward_with_states,
    observe_logit_rule,
)
from python_trainer.model.fused import FusedDecoder, supports
from rlkernels.integrations.transformers_attention import other_layers, rotary_limit

FLAT = [1, 2, 1], [0, 1, 0], [0, 1, 2]  # ids of two sequences side by side, their positions, and all rows
LENGTHS = [2, 1]


@dataclass(frozen=True)
class ModelTraits:
    """Keys and values are of one shape in all layers."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None  # tokens of the smallest sliding window
    logits: LogitRule | None  # how they come from states and output matrix; None: in another way
    fusible: bool  # FusedDecoder computes what the model computes


@dataclass
class AttentionRecorder:
    """Plain causal attention of the sequences, which records the arguments of the layers."""

    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # layer -> KV heads, key and value dim
    windows: dict[int, int | None] = field(default_factory=dict)  # layer -> tokens

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [T, Hq, d], key and value [T, Hk, d] -> [T, Hq, d]."""
        self.shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        self.windows[layer] = window
        parts = []
        for q, k, v in zip(*(x.transpose(0, 1).split(LENGTHS, 1) for x in (query, key, value))):
            parts.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True))
        return torch.cat(parts, 1).transpose(0, 1)


def find_traits(model: PreTrainedModel, name: str | None = None) -> ModelTraits:
    """Runs the model on [1, 2] and on [1], by itself and flattened, and compares.

    Args:
        name: of the model, for messages; by default its class.

    Raises:
        UserError: the model's forward does not go through, its layers are not all plain attention, or it does not
            compute on flattened tokens what it computes on its own.
    """
    name, seen, again = name or type(model).__name__, AttentionRecorder(), AttentionRecorder()
    if model.get_output_embeddings() is None:
        raise UserError(f"cannot run {name}: it names no output layer (get_output_embeddings)")
    ids, positions, rows = (torch.tensor(x, device=next(model.parameters()).device) for x in FLAT)
    ids %= next(model.get_input_embeddings().parameters()).shape[0]  # some have no token 2
    with evaluation_mode(model):
        with flat_attention(model):
            try:
                logits, states = forward_with_states(model, ids, positions, rows, seen)
            # a forward without further arguments, attention with some that are unknown
            except (TypeError, ValueError) as error:
                raise UserError(f"cannot run {name} on flattened tokens: {error}") from error
        _check_layers(model, name, seen)
        own = model(input_ids=ids[None, :2], use_cache=False).logits[0]
        if not _agree(model, logits, own):
            raise UserError(
                f"cannot run {name} on flattened tokens: it computes something else than on its own; nothing but "
                "attention may mix tokens"
            )
        rule = observe_logit_rule(model, logits, states)
        fusible = supports(model) and _agree(model, FusedDecoder(model, 2)(ids, positions, rows, again), own)
    (kv_heads, head_dim, _), windows = seen.shapes[0], [w for w in seen.windows.values() if w is not None]
    window = min(windows, default=None)
    return ModelTraits(len(seen.shapes), kv_heads, head_dim, window, rule, fusible and again == seen)


def longest_sequence(model: PreTrainedModel, window: int | None) -> tuple[int, str]:
    """Most tokens of a sequence that the model computes as it would by itself, whatever it is packed or cached with.

    Args:
        window: as of :class:`ModelTraits`.

    Returns:
        Their number, and the reason, for messages.
    """
    config = model.config.get_text_config()
    limits = [
        (getattr(config, "max_position_embeddings", None) or 1 << 30, "the model's limit"),
        (window, "the model's sliding window"),
        (rotary_limit(config), "the original length of the model's rotary factors"),
    ]
    return min(((n, reason) for n, reason in limits if n is not None), key=lambda limit: limit[0])


def _check_layers(model: PreTrainedModel, name: str, seen: AttentionRecorder) -> None:
    """Raises UserError unless all layers attend through the interface, to keys and values of one shape."""
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    if sorted(seen.shapes) != list(range(layers)):
        raise UserError(
            f"cannot run {name} on flattened tokens: {len(seen.shapes)} of its {layers} layers use Transformers' "
            "attention interface, and all must"
        )
    if others := other_layers(config):
        raise UserError(f"cannot run {name} on flattened tokens: it has layers of {', '.join(others)}")
    if len(set(seen.shapes.values())) > 1 or seen.shapes[0][1] != seen.shapes[0][2]:
        raise UserError(f"keys and values must be of one shape in all layers, {name} has {seen.shapes}")


def _agree(model: PreTrainedModel, flat: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether logits [3, V] of [1, 2] and [1] side by side are those [2, V] of [1, 2], up to rounding."""
    own = own.float()
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.1) * own.abs().max()
    return bool((flat.float() - own[[0, 1, 0]]).abs().max() <= tolerance)
