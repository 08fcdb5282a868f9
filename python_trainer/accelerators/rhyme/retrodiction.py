"""Retrodiction: a small network, trained as the run goes on, that tells how useful a stored answer would be now.

Its target is the cosine between the answer's gradient and that of a held-out batch: fresh answers of the same step to
*other* prompts, weighted by their advantages. Rewards and lengths are never the target.
"""

from typing import Any

import torch
from torch.nn import functional

FEATURES = (
    "logprob", "lowest_logprob", "entropy", "behaviour_logprob", "log_ratio", "weight", "behaviour_known", "log_length",
    "reward", "own", "log_age", "match", "prompt_success", "last_alignment", "log_gradient", "accuracy",
)  # fmt: skip
WIDTH = 32
CAPACITY = 2048  # examples it learns from: the newest
READY = 128  # examples from which on it is listened to
PASSES = 24  # optimizer steps per batch of targets


class Retrodictor:
    """A network of one hidden layer on standardised features.

    Args:
        seed: of its first weights.
    """

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed % 2**63)
        width = len(FEATURES)
        self.weights = {
            "w1": torch.randn(width, WIDTH, generator=generator) / width**0.5, "b1": torch.zeros(WIDTH),
            "w2": torch.zeros(WIDTH, 1), "b2": torch.zeros(1),
        }  # fmt: skip
        for weight in self.weights.values():
            weight.requires_grad_()
        self.adamw = torch.optim.AdamW(self.weights.values(), lr=3e-3, betas=(0.9, 0.99), weight_decay=1e-2)
        self.features = torch.zeros(0, width)
        self.targets = torch.zeros(0)

    @property
    def ready(self) -> bool:
        return len(self.targets) >= READY

    def _forward(self, features: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        mean, deviation = self.features.mean(0), self.features.std(0, correction=0)
        x = ((features - mean) / (deviation + 1e-3)).clamp(-4, 4)
        return (functional.gelu(x @ weights["w1"] + weights["b1"]) @ weights["w2"] + weights["b2"])[:, 0]

    @torch.no_grad()
    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """Expected usefulness [N] of answers with these features [N, len(FEATURES)]; only its order means something."""
        return self._forward(features) if len(self.targets) else torch.zeros(len(features))

    def learn(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        """Takes in the alignments [N] of one step, of which only the order within the step counts."""
        if len(targets) < 2:
            return
        scaled = (targets - targets.mean()) / (targets.std() + 1e-6)
        self.features = torch.cat([self.features, features])[-CAPACITY:]
        self.targets = torch.cat([self.targets, scaled])[-CAPACITY:]
        with torch.enable_grad():
            for _ in range(PASSES):
                self.adamw.zero_grad()
                functional.smooth_l1_loss(self._forward(self.features), self.targets).backward()
                self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "moments": {name: dict(self.adamw.state.get(weight, {})) for name, weight in self.weights.items()},
            "features": self.features, "targets": self.targets,
        }  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
            self.adamw.state[weight] = dict(state["moments"][name])
        self.features, self.targets = state["features"], state["targets"]


def ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks from 0 on, ties share their mean, float64 [N]."""
    values = values.double()
    below = (values[None] < values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    return below + (equal - 1) / 2


def rank_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Spearman's correlation in [-1, 1]; 0 where one of them is constant: it orders nothing."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0 else 0.0


def alignments(gradients: torch.Tensor, owners: torch.Tensor, held_out: dict[int, torch.Tensor]) -> torch.Tensor:
    """Cosine of each answer's gradient with that of the held-out batch without its own prompt.

    Args:
        gradients: [N, d].
        owners: int64 [N], group of each answer.
        held_out: by group, the sum [d] of advantage times gradient of its fresh answers.

    Returns:
        [N]; NaN where nothing is left to compare with.
    """
    if not held_out:
        return torch.full((len(gradients),), torch.nan)
    total = torch.stack(list(held_out.values())).sum(0)
    rest = torch.stack([total - held_out.get(int(g), torch.zeros_like(total)) for g in owners])  # [N, d]
    scale = gradients.norm(dim=1) * rest.norm(dim=1)
    return torch.where(scale > 0, (gradients * rest).sum(1) / scale, torch.nan)
