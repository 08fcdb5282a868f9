"""Retrodiction: a small network, trained as the run goes on, that tells how useful a stored answer would be now.

Its target is hindsight: how much more likely the update of a step made an answer that it was not trained on. To first
order that is the inner product of the answer's gradient with the update. Rewards and lengths are never the target.
"""

from typing import Any

import torch
from torch.nn import functional

WIDTH = 32
CAPACITY = 2048  # examples it learns from: the newest
READY = 128  # examples from which on it is listened to
PASSES = 200  # optimizer steps of a fit
LEAST = 4  # examples of a step; of fewer the order means little


class Retrodictor:
    """A network of one hidden layer on standardised features, fitted anew to all examples with those of each step."""

    def __init__(self) -> None:
        self.features = torch.zeros(0, 0)  # of all examples, [N, F]
        self.targets = torch.zeros(0)  # [N], standardised within each step: only their order counts
        self.network = torch.nn.Sequential()

    @property
    def ready(self) -> bool:
        return len(self.targets) >= READY

    def learn(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        """Takes in features [N, F] and targets [N] of one step."""
        targets = (targets - targets.mean()) / (targets.std() + 1e-6)
        known = self.features if len(self.features) else features[:0]
        self.features = torch.cat([known, features])[-CAPACITY:]
        self.targets = torch.cat([self.targets, targets])[-CAPACITY:]
        self.fit()

    @torch.enable_grad()
    def fit(self) -> None:
        """Trains new weights on all examples. They depend on nothing else, so that a resumed run has the same."""
        generator = torch.Generator().manual_seed(0)
        layers = torch.nn.Linear(self.features.shape[1], WIDTH), torch.nn.Linear(WIDTH, 1)
        for layer in layers:
            torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
            torch.nn.init.zeros_(layer.bias)
        self.network = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
        adamw = torch.optim.AdamW(self.network.parameters(), lr=1e-2, weight_decay=1e-2)
        for _ in range(PASSES):
            adamw.zero_grad()
            functional.smooth_l1_loss(self.predict(self.features), self.targets).backward()
            adamw.step()
        self.network.requires_grad_(False)

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """Returns expected usefulness [N] of answers with these features [N, F]; only its order means something."""
        mean, deviation = self.features.mean(0), self.features.std(0, correction=0)
        return self.network(((features - mean) / (deviation + 1e-3)).clamp(-4, 4))[:, 0]

    def state_dict(self) -> dict[str, Any]:
        return {"features": self.features, "targets": self.targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.features, self.targets = state["features"], state["targets"]
        if len(self.targets):
            self.fit()
