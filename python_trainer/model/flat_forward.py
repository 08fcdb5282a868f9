"""The forward pass of a Transformers model on flattened tokens: all sequences as one row, told apart by attention."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from rlkernels.integrations.transformers_attention import IMPLEMENTATION, Attention

# ids [T], positions [T], rows [R] and what the tokens look at -> logits [R, V]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attention], torch.Tensor]


@contextmanager
def flat_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it forward and backward passes on flattened tokens work; afterwards the model attends as it did before."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """No dropout, no gradient checkpointing, no graph; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    # no_grad and not inference_mode: rotary embeddings that adapt keep tensors that training must be able to use
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def flat_inputs(ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> dict[str, Any]:
    """What a model's forward takes for flattened tokens ``ids`` [T] at ``positions`` [T]."""
    return {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False, "attention": attention}


def forward(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: Attention
) -> torch.Tensor:
    """Logits [R, V] at ``rows`` of the flattened tokens; the other rows never reach the output layer."""
    keep = _keep(model, rows)
    logits = model(**flat_inputs(ids, positions, attention), **keep).logits[0]
    return logits if keep else logits[rows]


def forward_with_states(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    attention: Attention,
    predict: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`forward`, of the first ``predict`` rows only where that is a number, and the last hidden states [R, H].

    Raises:
        ValueError: the model's forward does not call the output layer that it names.
    """
    keep = _keep(model, rows)
    states: list[torch.Tensor] = []

    def look(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        hidden = inputs[0] if keep else inputs[0][:, rows]  # [1, R, H]
        states.append(hidden[0])
        return (hidden[:, :predict],)

    hook = model.get_output_embeddings().register_forward_pre_hook(look)
    try:
        logits = model(**flat_inputs(ids, positions, attention), **keep).logits[0]
    finally:
        hook.remove()
    if not states:
        raise ValueError("its forward does not call what get_output_embeddings() names")
    return logits, states[0]


def _keep(model: PreTrainedModel, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The argument that keeps other rows out of the output layer, of models that have it."""
    return {"logits_to_keep": rows} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
