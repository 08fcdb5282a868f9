"""The forward pass of Llama-like models in few calls, for small models on a CPU, where calls cost as much as numbers.

Transformers runs about sixty operations per layer; here a layer is four matrix products, four fused operations
(``rlkernels.decoder``) and attention. All of it is differentiable.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear

import rlkernels.backend
from rlkernels.decoder import add_rms_norm, rope, silu_mul
from rlkernels.integrations.transformers_attention import Attention

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
MAX_BYTES = 1 << 28  # of weights; in larger models the calls do not count, and joined copies of weights do


@dataclass
class FusedLayer:
    """The weights of a layer, those of products of the same input joined."""

    norms: tuple[torch.Tensor, torch.Tensor]  # before attention and before the MLP
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None]
    out: nn.Linear
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: nn.Linear
    scale: float
    window: int | None


def supports(model: Any) -> bool:
    """True for an unmodified float32 model of a known type on a CPU. Its numbers are compared by ``find_traits``."""
    if model.config.model_type not in MODEL_TYPES or not hasattr(model, "lm_head") or not hasattr(model, "model"):
        return False
    parameters = list(model.parameters())
    small = sum(p.numel() * p.element_size() for p in parameters) <= MAX_BYTES
    plain = all(p.dtype == torch.float32 and rlkernels.backend.runs_on(p.device) == "cpu" for p in parameters)
    linears = [
        getattr(part, name + "_proj", None)
        for layer in model.model.layers
        for part, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down")))
        for name in names
    ]
    # adapters live in other classes or in hooks, which only a call of the module itself runs
    untouched = all(type(module) is nn.Linear for module in [*linears, model.lm_head]) and not any(
        hook.__module__ != "transformers.utils.output_capturing"
        for module in model.modules()
        if module is not model.model.embed_tokens
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    silu = model.config.hidden_act in ("silu", "swish")
    return small and plain and untouched and silu and rlkernels.backend.extension_error() is None


class FusedDecoder:
    """A snapshot of the model's weights, for one call of ``generate`` or one pass of training; see :func:`supports`.

    Args:
        longest: positions 0 .. longest - 1 may be asked for.
    """

    def __init__(self, model: Any, longest: int):
        base = model.model
        self.embed, self.head, self.norm = base.embed_tokens, model.lm_head, base.norm.weight
        self.eps = base.norm.variance_epsilon
        self.layers = [_layer(layer) for layer in base.layers]
        cos, sin = base.rotary_emb(self.norm, torch.arange(longest, device=self.norm.device)[None])
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()  # [longest, d]

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """As :func:`python_trainer.model.flat_forward.forward`."""
        return self.head(self.states(ids, positions, rows, attention))

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """What goes into the output layer at ``rows`` of the flattened tokens ``ids`` [T] -> [R, D]."""
        dim = self.cos.shape[1]
        hidden: torch.Tensor = self.embed(ids)  # [T, D]
        update = None
        for i, layer in enumerate(self.layers):
            hidden, x = add_rms_norm(hidden, update, layer.norms[0], self.eps)
            qkv = linear(x, layer.qkv, layer.qkv_bias)  # [T, (Hq + 2 Hk) d]
            q_heads = layer.out.in_features // dim
            k_heads = (qkv.shape[1] // dim - q_heads) // 2
            qkv = rope(qkv, positions, self.cos, self.sin, q_heads, q_heads + k_heads, *layer.head_norms, self.eps)
            query, key, value = qkv.view(len(ids), -1, dim).split([q_heads, k_heads, k_heads], 1)
            attended = attention.attend(i, query, key, value, layer.scale, layer.window)
            update = linear(attended.reshape(len(ids), -1), layer.out.weight, layer.out.bias)
            hidden, x = add_rms_norm(hidden, update, layer.norms[1], self.eps)
            update = linear(silu_mul(linear(x, layer.gate_up, layer.gate_up_bias)), layer.down.weight, layer.down.bias)
        assert update is not None
        # picked by embedding, whose gradient adds up repeated rows several times faster than that of an index
        hidden, update = embedding(rows, hidden), embedding(rows, update)
        return add_rms_norm(hidden, update, self.norm, self.eps)[1]


def _layer(layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _joined(mlp.gate_proj, mlp.up_proj)
    normed = hasattr(attention, "q_norm")
    return FusedLayer(
        norms=(layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
        qkv=qkv,
        qkv_bias=qkv_bias,
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if normed else (None, None),
        out=attention.o_proj,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj,
        scale=attention.scaling,
        # of Mistral it is in the config only
        window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
    )


def _joined(*parts: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return torch.cat([part.weight for part in parts]), bias
