"""What a model makes of the product of hidden states and output matrix, before it calls it logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rlkernels import linear_token_logprobs, token_logprobs

PIECE = 1 << 24  # logits that exist at one time where they are capped


@dataclass(frozen=True)
class LogitRule:
    """``cap * tanh(scale * product / cap)``; without a cap ``scale * product``.

    Granite divides by ``logits_scaling``, Cohere multiplies by ``logit_scale``, Gemma 2 and 3n cap.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        scaled = product if self.scale == 1 else product * self.scale
        return scaled if self.cap is None else (scaled / self.cap).tanh() * self.cap

    def logprobs(
        self, states: torch.Tensor, head: torch.nn.Linear, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [R] of targets [R] after states [R, H]; [R, V] is never held, but made twice.

        A multiple is one more temperature. Capped logits are made for some rows at a time, and again for the gradient.
        """
        if self.cap is None:
            options: dict[str, Any] = {"temperature": temperature / self.scale, "return_entropy": True}
            return linear_token_logprobs(states, head.weight, targets, bias=head.bias, **options)
        rows = max(PIECE // len(head.weight), 1)
        parts = [
            checkpoint(self._capped, *piece, head.weight, head.bias, temperature, use_reentrant=False)
            for piece in zip(states.split(rows), targets.split(rows))
        ]
        logprobs, entropy = zip(*parts)
        return torch.cat(logprobs), torch.cat(entropy)

    def _capped(
        self, states: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor, bias: Any, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self(linear(states, weight, bias))
        return token_logprobs(logits, targets, temperature=temperature, return_entropy=True)


def described(config: Any) -> LogitRule | None:
    """The rule that a model's config names; None: one that does not work without all logits."""
    factor = _number(config, "logit_scale", 1.0) / _number(config, "logits_scaling", 1.0)
    if factor <= 0 or _number(config, "logits_scale", 1.0) != 1:
        return None
    return LogitRule(factor, getattr(config, "final_logit_softcapping", None))


def _number(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return default if value is None else float(value)


def observed(model: Any, logits: torch.Tensor, states: torch.Tensor) -> LogitRule | None:
    """The rule by which logits [R, V] come from states [R, H], where it is the one that the config names."""
    head, rule = model.get_output_embeddings(), described(model.config.get_text_config())
    if rule is None:
        return None
    product = rule(linear(states[None], head.weight, head.bias)[0])
    near = 4 * torch.finfo(logits.dtype).eps * logits.abs().max()
    same = logits.dtype == product.dtype and bool((logits - product).abs().max() <= near)
    return rule if same else None
