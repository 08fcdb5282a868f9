"""The forward pass of Llama-like models in few calls, for a CPU, where calls and passes over memory cost much.

Transformers runs about sixty operations per layer; here a layer is four matrix products, four fused operations
(``rlkernels.decoder``) and attention. All of it is differentiable.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

import rlkernels.backend
from rlkernels.decoder import add_rms_norm, rope, silu_mul
from rlkernels.integrations.transformers_attention import Attention, sliding_window

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Limit of float32 weights: in larger models calls cost little, and joined copies of weights cost memory. In bfloat16
# products are several times faster, so calls count at every size, and a copy costs little beside a micro-batch.
MAX_BYTES = 1 << 28


class Product:
    """Linear layers of the same input as one.

    Args:
        join_weights: once, not at every call, and reorder those in bfloat16 for the processor's products. It takes a
            copy of the weights, gives the same numbers, and has no gradient.
    """

    def __init__(self, *layers: nn.Linear, join_weights: bool):
        self.layers = layers
        self.reordered = join_weights and layers[0].weight.dtype == torch.bfloat16 and reorders_bfloat16()
        self.joined: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if join_weights:
            weight, bias = self._join()
            self.joined = (torch.ops.mkldnn._reorder_linear_weight(weight) if self.reordered else weight, bias)

    def _join(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Join weights and biases as they are now; without gradients the copy lasts for one product."""
        bias = None if self.layers[0].bias is None else _concatenate([layer.bias for layer in self.layers])
        return _concatenate([layer.weight for layer in self.layers]), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.joined or self._join()
        if self.reordered:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            return out
        return linear(x, weight, bias)


def _concatenate(tensors: list[Any]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


@functools.cache
def reorders_bfloat16() -> bool:
    """Return whether torch has the ops that its own compiler uses for constant weights."""
    ops = torch.ops.mkldnn
    needed = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return torch.backends.mkldnn.is_available() and all(hasattr(ops, op) for op in needed) and bool(
        ops._is_mkldnn_bf16_supported()
    )  # fmt: skip


class FusedLayer:
    """The weights of a layer."""

    def __init__(self, layer: Any, join_weights: bool):
        attention = layer.self_attn
        mlp = layer.mlp
        self.norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight  # before attention, MLP
        self.q_heads: int = attention.o_proj.in_features // attention.head_dim
        self.qkv = Product(attention.q_proj, attention.k_proj, attention.v_proj, join_weights=join_weights)
        self.head_norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if hasattr(attention, "q_norm"):
            self.head_norms = attention.q_norm.weight, attention.k_norm.weight
        self.out = Product(attention.o_proj, join_weights=join_weights)
        self.gate_up = Product(mlp.gate_proj, mlp.up_proj, join_weights=join_weights)
        self.down = Product(mlp.down_proj, join_weights=join_weights)
        self.scale: float = attention.scaling
        self.window = sliding_window(attention.config, attention.layer_idx)


def supports(model: Any) -> bool:
    """Return whether a model is unmodified, of a known type, on a CPU, and in bfloat16 or small.

    Its numbers are compared by ``find_traits``.
    """
    if not isinstance(model, PreTrainedModel) or model.config.model_type not in MODEL_TYPES:  # as a PeftModel is none
        return False
    if not hasattr(model, "lm_head") or not hasattr(model, "model"):
        return False
    parameters = list(model.parameters())
    plain = all(p.dtype == model.dtype and p.device.type == "cpu" for p in parameters)
    small = model.dtype == torch.float32 and sum(p.nbytes for p in parameters) <= MAX_BYTES
    suits = plain and (small or model.dtype == torch.bfloat16)
    linears = [
        getattr(block, name + "_proj", None)
        for layer in model.model.layers
        for block, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down")))
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
    return suits and untouched and silu and rlkernels.backend.extension_error() is None


class FusedDecoder:
    """A snapshot of the model's weights, for one call of ``generate`` or one pass of training; see :func:`supports`.

    Args:
        longest: positions 0 .. longest - 1 may be asked for.
        join_weights: for many passes without gradients; see :class:`Product`.
    """

    def __init__(self, model: Any, longest: int, *, join_weights: bool = False):
        base = model.model
        self.embed = base.embed_tokens
        self.norm = base.norm.weight
        self.rotary = base.rotary_emb
        self.eps = base.norm.variance_epsilon
        self.head = Product(model.lm_head, join_weights=join_weights)
        self.layers = [FusedLayer(layer, join_weights) for layer in base.layers]
        self.longest = 0
        self.reach(longest)

    def reach(self, longest: int) -> None:
        """Let positions up to ``longest`` - 1 be asked for."""
        if longest > self.longest:
            places = torch.arange(longest, device=self.norm.device)[None]
            weight = self.norm.detach().float()  # angles in float32, whatever the weights are
            self.rotary(weight, places[:, :1])  # a short pass brings dynamic angles back that a longer one has changed
            cos, sin = self.rotary(weight, places)
            self.cos = cos[0].contiguous()  # [longest, d]
            self.sin = sin[0].contiguous()
            self.longest = longest

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attention: Attention,
        max_logit_rows: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what :func:`python_trainer.model.forward.forward` does."""
        dim = self.cos.shape[1]
        hidden: torch.Tensor = self.embed(ids)  # [T, D]
        update = None
        for i, layer in enumerate(self.layers):
            hidden, x = add_rms_norm(hidden, update, layer.norms[0], self.eps)
            qkv = layer.qkv(x)  # [T, (Hq + 2 Hk) d]
            q_heads = layer.q_heads
            k_heads = (qkv.shape[1] // dim - q_heads) // 2
            qkv = rope(qkv, positions, self.cos, self.sin, q_heads, q_heads + k_heads, *layer.head_norms, self.eps)
            query, key, value = qkv.view(len(ids), -1, dim).split([q_heads, k_heads, k_heads], 1)
            attended = attention.attend(i, query, key, value, layer.scale, layer.window)
            update = layer.out(attended.reshape(len(ids), -1))
            hidden, x = add_rms_norm(hidden, update, layer.norms[1], self.eps)
            update = layer.down(silu_mul(layer.gate_up(x)))
        assert update is not None
        # embedding picks the rows: its gradient adds up repeated rows several times faster than that of an index
        hidden = embedding(rows, hidden)
        update = embedding(rows, update)
        states = add_rms_norm(hidden, update, self.norm, self.eps)[1]
        return self.head(states[:max_logit_rows]), states
