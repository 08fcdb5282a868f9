"""Retrodiction: a small network, trained during the run, that predicts how useful a stored answer would be now.

Its target is hindsight: how much more likely an update made an answer that was not trained on. To first order that is
the inner product of the answer's gradient with the update. Rewards and lengths are never the target.
"""

from typing import Any

import torch
from torch.nn import functional

WIDTH = 32
CAPACITY = 2048  # newest examples that it learns from
READY = 128  # examples from which on its predictions count
PASSES = 200  # optimizer steps of a fit
MIN_EXAMPLES = 4  # of a step; the order of fewer means little


class Retrodictor:
    """A network of one hidden layer on standardised features, fitted anew after each step to all examples."""

    def __init__(self) -> None:
        self.features = torch.zeros(0, 0)  # of all examples, [N, F]
        self.targets = torch.zeros(0)  # [N], standardised within each step: only their order counts
        self.network = torch.nn.Sequential()

    @property
    def ready(self) -> bool:
        return len(self.targets) >= READY

    def learn(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        """Add features [N, F] and targets [N] of one step, and fit the network."""
        targets = (targets - targets.mean()) / (targets.std() + 1e-6)
        earlier = self.features if len(self.features) else features[:0]
        self.features = torch.cat([earlier, features])[-CAPACITY:]
        self.targets = torch.cat([self.targets, targets])[-CAPACITY:]
        self.fit()

    @torch.enable_grad()
    def fit(self) -> None:
        """Train new weights on all examples; they depend on nothing else, so that a resumed run has the same."""
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
        """Return the expected usefulness [N] of answers with these features [N, F]; only its order means something."""
        mean, deviation = self.features.mean(0), self.features.std(0, correction=0)
        return self.network(((features - mean) / (deviation + 1e-3)).clamp(-4, 4))[:, 0]

    def state_dict(self) -> dict[str, Any]:
        return {"features": self.features, "targets": self.targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.features, self.targets = state["features"], state["targets"]
        if len(self.targets):
            self.fit()
