"""Updates of TRL's DPO trainer that compute the prompt of a chosen and a rejected answer once, and pad nothing.

Loss, gradients and metrics stay those of TRL, whose own head scores the packed tokens. Each of them has one label,
so the last token that two answers have in common is there twice. With a prompt of p tokens and answers of a and b, the
model passes p + a + b tokens instead of 2 p + a + b and padding: at least half.
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
    """T packed tokens of which each predicts one label, so that TRL's own head scores them as one row.

    Attributes:
        ids: int64 [T].
        layout: what each token sees, and its position.
        labels: int64 [T], the token that it should predict; -100: none.
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
    """Pack rows [B, L], padded on the right, by tokens and those behind them: each packed token has one label."""
    device, (ids, attention, scored) = input_ids.device, (t.cpu() for t in (input_ids, attention_mask, completion_mask))
    rows, span = [row[mask.bool()] for row, mask in zip(ids, attention)], int(ids.max()) + 1
    codes = [row[:-1] * span + row[1:] for row in rows]
    prompts = ((attention - scored).sum(1) - 1).clamp(min=0).tolist()
    tries = packs_tries(device)
    layout = TreeLayout.from_sequences(codes) if tries else GroupedLayout.from_sequences(codes, prompts)
    assert layout.ids is not None
    mask = scored[:, 1:].bool()
    places = torch.cat([place[flags[: len(place)]] for place, flags in zip(layout.places, mask)])
    labels = torch.full_like(layout.ids, -100)
    labels[places] = layout.ids[places] % span
    packed, labels, mask, places = (t.to(device) for t in (layout.ids // span, labels, mask, places))
    return Labelled(packed, layout, labels, mask, places)


def share_pairs(model: PreTrainedModel) -> None:
    """Let ``model(fused_lm_head=True, shared_prefix=labelled)`` score packed tokens and return TRL's rows."""
    inner = model.forward

    @functools.wraps(type(model).forward)  # generate() looks at the signature
    def forward(self: Any, *args: Any, shared_prefix: Labelled | None = None, **kwargs: Any) -> Any:
        if shared_prefix is None or not kwargs.get("fused_lm_head"):
            return inner(*args, **kwargs)
        given = packed_arguments(self, shared_prefix.ids, shared_prefix.layout)
        found = inner(**given, shift_labels=shared_prefix.labels[None], fused_lm_head=True)
        per_token = {name: value for name, value in found.items() if value.ndim == 2}
        return replace(found, **{name: shared_prefix.spread(value[0]) for name, value in per_token.items()})

    model.forward = types.MethodType(forward, model)


class SharedPrefixDPOTrainer(PrefixSharing, DPOTrainer):
    """TRL's ``DPOTrainer`` as :class:`PrefixSharing`: the prompt of a chosen and a rejected answer is computed once."""

    def _share(self, model: Any) -> None:
        share_pairs(model)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._set_up()  # TRL does this before its __init__ ends
        return super()._precompute_ref_logps(*args, **kwargs)

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        return super().compute_ref_log_probs(model, self._pack(model, inputs, False))

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        return super()._compute_loss(model, self._pack(model, inputs, self.aux_loss_enabled), return_outputs)

    def _pack(self, model: Any, inputs: Any, compute_aux_loss: bool) -> Any:
        """Return TRL's batch, with the argument ``shared_prefix`` of the model if it goes our way."""
        ids, attention_mask, scored = (inputs[name] for name in ("input_ids", "attention_mask", "completion_mask"))
        others = {name: value for name, value in inputs.items() if name not in FIELDS}
        fits = self.shares_prefixes and self._fits(attention_mask, compute_aux_loss, others)
        packed = pack_labelled(ids, attention_mask, scored) if fits else None
        labels = ids.masked_fill(scored == 0, -100)

        def score(shared: Labelled | None) -> torch.Tensor:
            given = {} if shared is None else {"shared_prefix": shared}  # adapters hand on what they get
            with self.accelerator.autocast():
                return model(
                    input_ids=ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True, **given
                ).log_probs

        shared = self._agrees(fits, model, lambda: score(packed), lambda: score(None), scored[:, 1:].bool())
        self._log_tokens(len(packed.ids) if packed and shared else ids.numel(), ids.numel())
        return {**inputs, "shared_prefix": packed} if shared else inputs
