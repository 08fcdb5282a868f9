"""The forward pass of a Transformers model on flattened tokens, and the logits that come of its last hidden states.

All sequences are one row of tokens, told apart by attention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from rlkernels.integrations.transformers_attention import IMPLEMENTATION, Attention

# ids [T], positions [T], rows [R] and what the tokens look at -> logits [R, V], last hidden states [R, H]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attention], tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def attend_by(model: PreTrainedModel, implementation: str = IMPLEMENTATION) -> Iterator[None]:
    """Lets the model attend by an implementation of Transformers, and afterwards as before.

    By default by ours, under which forward and backward passes on flattened tokens work.
    """
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(implementation)
        yield
    finally:
        model.set_attn_implementation(before)


def flat_inputs(ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> dict[str, Any]:
    """Returns the arguments of a model's forward for flattened tokens ``ids`` [T] at ``positions`` [T]."""
    return {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False, "attention": attention}


def forward(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    attention: Attention,
    predict: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes logits [R, V] and last hidden states [R, H] at ``rows`` of the flattened tokens.

    The other rows never reach the output layer; with ``predict`` only so many of the first rows do.
    """
    states: list[torch.Tensor] = []

    def look(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        hidden = inputs[0][:, rows]  # [1, R, H]
        states.append(hidden[0])
        return (hidden[:, :predict],)

    hook = model.get_output_embeddings().register_forward_pre_hook(look)
    try:
        logits = model(**flat_inputs(ids, positions, attention)).logits[0]
    finally:
        hook.remove()
    if not states:
        raise ValueError("its forward does not call what get_output_embeddings() names")
    return logits, states[0]


def logit_scale(model: Any, logits: torch.Tensor, states: torch.Tensor) -> float | None:
    """Returns x if logits [R, V] are x times the product of states [R, H] and output matrix, by the model's config.

    Granite divides by ``logits_scaling``, Cohere multiplies by ``logit_scale``; Gemma caps, which small logits hide.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scale, divisor = (getattr(config, name, None) for name in ("logit_scale", "logits_scaling"))
    factor = (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)
    if factor <= 0 or getattr(config, "final_logit_softcapping", None) is not None:
        return None
    product = linear(states[None], head.weight, head.bias)[0] * factor
    near = 4 * torch.finfo(logits.dtype).eps * logits.abs().max()
    same = logits.dtype == product.dtype and bool((logits - product).abs().max() <= near)
    return factor if same else None
