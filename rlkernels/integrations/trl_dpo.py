"""TRL's DPO trainer with the prompt of a chosen and a rejected answer computed once, and without padding.

Loss, gradients and metrics stay those of TRL, whose own head scores the packed tokens. Each packed token has one label,
so the last common token of two answers is packed twice. With a prompt of p tokens and answers of a and b, the model
computes p + a + b tokens instead of 2 p + a + b and padding: at least half.
"""

import functools
import types
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from trl import DPOTrainer

from rlkernels.integrations.trl_shared import PrefixSharing, packed_arguments
from rlkernels.prefix_cache import GroupedLayout, TreeLayout, packs_tries

__all__ = ["SharedPrefixDPOTrainer"]

FIELDS = ("input_ids", "attention_mask", "completion_mask", "ref_chosen_logps", "ref_rejected_logps")  # of a batch


@dataclass
class Labelled:
    """T packed tokens, each with one label, so that TRL's own head scores them as one row.

    Attributes:
        ids: int64 [T].
        layout: the tokens that each token attends to, and its position.
        labels: int64 [T], the token to predict; -100: none.
        mask: bool [B, L - 1], the scored tokens of TRL's rows.
        places: int64, the packed token that predicts each scored token, row after row.
    """

    ids: torch.Tensor
    layout: TreeLayout
    labels: torch.Tensor
    mask: torch.Tensor
    places: torch.Tensor

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of packed tokens [T] as those of TRL's rows [B, L - 1], zero where nothing is scored."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values[self.places])


def pack_labelled(input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_mask: torch.Tensor) -> Labelled:
    """Pack rows [B, L], padded on the right, by pairs of a token and the next one: each packed token has one label."""
    device = input_ids.device
    ids, attention, scored = (tensor.cpu() for tensor in (input_ids, attention_mask, completion_mask))
    vocab_size = int(ids.max()) + 1
    rows = [row[mask.bool()] for row, mask in zip(ids, attention)]
    pairs = [row[:-1] * vocab_size + row[1:] for row in rows]
    if packs_tries(device):
        layout = TreeLayout.from_sequences(pairs)
    else:
        prompt_lens = ((attention - scored).sum(1) - 1).clamp(min=0).tolist()
        layout = GroupedLayout.from_sequences(pairs, prompt_lens)
    assert layout.ids is not None
    mask = scored[:, 1:].bool()
    places = torch.cat([place[flags[: len(place)]] for place, flags in zip(layout.places, mask)])
    labels = torch.full_like(layout.ids, -100)
    labels[places] = layout.ids[places] % vocab_size
    tokens = layout.ids // vocab_size
    return Labelled(tokens.to(device), layout, labels.to(device), mask.to(device), places.to(device))


def share_pairs(model: PreTrainedModel) -> None:
    """Let ``model(fused_lm_head=True, shared_prefix=labelled)`` score packed tokens and return TRL's rows."""
    inner = model.forward

    @functools.wraps(type(model).forward)  # generate() inspects the signature
    def forward(self: Any, *args: Any, shared_prefix: Labelled | None = None, **kwargs: Any) -> Any:
        if shared_prefix is None or not kwargs.get("fused_lm_head"):
            return inner(*args, **kwargs)
        arguments = packed_arguments(self, shared_prefix.ids, shared_prefix.layout)
        output = inner(**arguments, shift_labels=shared_prefix.labels[None], fused_lm_head=True)
        per_token = {name: value for name, value in output.items() if value.ndim == 2}
        return replace(output, **{name: shared_prefix.spread(value[0]) for name, value in per_token.items()})

    model.forward = types.MethodType(forward, model)


class SharedPrefixDPOTrainer(PrefixSharing, DPOTrainer):
    """TRL's ``DPOTrainer`` that computes the prompt of a chosen and a rejected answer once (:class:`PrefixSharing`)."""

    def _share(self, model: Any) -> None:
        share_pairs(model)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._set_up()  # TRL calls this method within its __init__
        return super()._precompute_ref_logps(*args, **kwargs)

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        return super().compute_ref_log_probs(model, self._pack(model, inputs, False))

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        return super()._compute_loss(model, self._pack(model, inputs, self.aux_loss_enabled), return_outputs)

    def _pack(self, model: Any, inputs: Any, compute_aux_loss: bool) -> Any:
        """Return TRL's batch, with the model's argument ``shared_prefix`` if the batch shares prefixes."""
        ids = inputs["input_ids"]
        attention_mask = inputs["attention_mask"]
        scored = inputs["completion_mask"]
        extra = {name: value for name, value in inputs.items() if name not in FIELDS}
        can_share = self.shares_prefixes and self._fits(attention_mask, compute_aux_loss, extra)
        packed = pack_labelled(ids, attention_mask, scored) if can_share else None

        def score(shared_prefix: Labelled | None) -> torch.Tensor:
            labels = ids.masked_fill(scored == 0, -100)
            # adapters pass all arguments on, so that a model without this one must not get it
            option = {} if shared_prefix is None else {"shared_prefix": shared_prefix}
            with self.accelerator.autocast():
                return model(
                    input_ids=ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True, **option
                ).log_probs

        shares = self._shares_batch(can_share, model, lambda: score(packed), lambda: score(None), scored[:, 1:].bool())
        self._log_tokens(len(packed.ids) if packed and shares else ids.numel(), ids.numel())
        return {**inputs, "shared_prefix": packed} if shares else inputs
