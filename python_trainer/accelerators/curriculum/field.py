"""A quantity of every prompt, known before its first visit, sharper after each, and out of date as the policy moves.

``f_i(t) = x_i . w(t) + u_i(t)``: what prompts with such features share, and what is a prompt's own. ``w`` is a random
walk (its first entry, that of the feature 1, is the ability of the policy), ``u_i`` an Ornstein-Uhlenbeck process that
forgets, so that a prompt that was not seen for long is again like its neighbours. All is Gaussian: outcomes update it
by assumed density filtering (Opper 1998), where an answer's being right has chance sigma(f_i).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Gauss-Hermite quadrature: E[g(x)], x ~ N(0, 1), is the sum of WEIGHTS times g at POINTS
NODES, SHARES = np.polynomial.hermite_e.hermegauss(15)
SHARES /= SHARES.sum()
LOG_WEIGHTS = np.log(SHARES)
POINTS, WEIGHTS = torch.from_numpy(NODES), torch.from_numpy(SHARES)
STATE = ("w", "covariance", "u", "variance", "seen")


class Field:
    """Gaussian beliefs about one number a prompt.

    Args:
        features: float64 [P, F], the first column 1.
        mean: of ``w`` before anything was seen, for the first column; 0 for the others.
        spread: standard deviation of ``w`` before anything was seen.
        own: standard deviation of ``u``.
        walk: standard deviation of what ``w`` moves in a step.
        memory: steps after which a prompt's own part has faded to 1/e.
    """

    def __init__(self, features: Tensor, *, mean: float = 0.0, spread: float, own: float, walk: float, memory: float):
        prompts, width = features.shape
        self.features, self.own, self.walk, self.memory = features.numpy(), own, walk, memory
        self.w = np.zeros(width)
        self.w[0] = mean
        self.covariance = spread**2 * np.eye(width)
        self.u = np.zeros(prompts)
        self.variance = np.full(prompts, own**2)
        self.seen = np.zeros(prompts, dtype=np.int64)  # step of the last update
        self.step = 0

    def add_feature(self, column: Tensor, *, mean: float, spread: float) -> None:
        """A further feature, float64 [P], of whose weight this is believed."""
        self.features = np.column_stack([self.features, column.numpy()])
        self.w = np.append(self.w, mean)
        self.covariance = np.pad(self.covariance, (0, 1))
        self.covariance[-1, -1] = spread**2

    def advance(self, step: int) -> None:
        """Time goes on to this step."""
        passed, self.step = step - self.step, step
        self.covariance += passed * self.walk**2 * np.eye(len(self.w))

    def moments(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of ``f`` of these prompts, now, each [K]."""
        x, (u, variance) = self.features[keys.numpy()], self._own(keys.numpy())
        both = x @ self.w + u, ((x @ self.covariance) * x).sum(-1) + variance
        return torch.from_numpy(both[0]), torch.from_numpy(both[1])

    def own_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of ``u`` of all prompts, now, each [P]."""
        u, variance = self._own(np.arange(len(self.u)))
        return torch.from_numpy(u), torch.from_numpy(variance)

    def draws(self, keys: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """``count`` draws of ``f`` of these prompts, together, [count, K]."""
        x, (u, variance) = self.features[keys.numpy()], self._own(keys.numpy())
        shared = np.linalg.cholesky(self.covariance + 1e-12 * np.eye(len(self.w)))
        noise = torch.randn(count, len(self.w), generator=generator, dtype=torch.float64).numpy()
        own = torch.randn(count, len(keys), generator=generator, dtype=torch.float64).numpy()
        return torch.from_numpy((self.w + noise @ shared.T) @ x.T + u + own * np.sqrt(variance))

    def observe_right(self, key: int, right: float, tries: int) -> float:
        """So many of the tries at a prompt were right. -> log of the chance that this field gave them."""
        mean, variance = self._moments(key)
        low, high = mean - tries * variance, mean + tries * variance  # where the slope below changes its sign
        mode = mean
        for _ in range(60):
            p = sigmoid(mode)
            slope = (mean - mode) / variance + right - tries * p
            low, high = (mode, high) if slope > 0 else (low, mode)
            step = slope / (1 / variance + tries * p * (1 - p))
            after = mode + step if low <= mode + step <= high else (low + high) / 2
            done, mode = abs(after - mode) < 1e-9, after
            if done:
                break
        p = sigmoid(mode)
        self._move(key, (mean, variance), (mode, 1 / (1 / variance + tries * p * (1 - p))))
        return log_evidence(mean, variance, right, tries)

    def observe(self, key: int, value: float, noise: float) -> None:
        """A measurement of ``f``, with its standard deviation."""
        mean, variance = self._moments(key)
        gain = variance / (variance + noise**2)
        self._move(key, (mean, variance), (mean + gain * (value - mean), (1 - gain) * variance))

    def _moments(self, key: int) -> tuple[float, float]:
        """:meth:`moments` of one prompt."""
        x, (u, variance) = self.features[key], self._own(key)
        return float(x @ self.w + u), float(x @ self.covariance @ x + variance)

    def _own(self, keys: Any) -> tuple[Any, Any]:
        """Mean and variance of ``u`` of these prompts, or of this one, now."""
        left = np.exp((self.seen[keys] - self.step) / self.memory)
        return left * self.u[keys], left**2 * self.variance[keys] + (1 - left**2) * self.own**2

    def _move(self, key: int, before: tuple[float, float], after: tuple[float, float]) -> None:
        """Mean and variance of ``f`` of a prompt go from these to those; of ``w`` and ``u`` what follows from it."""
        (mean, variance), (u, own) = before, self._own(key)
        moved, sharper = (after[0] - mean) / variance, (variance - after[1]) / variance**2
        shared = self.covariance @ self.features[key]  # its covariance with f, [F]
        self.w += shared * moved
        self.covariance -= np.outer(shared, shared) * sharper
        self.u[key] = u + own * moved
        self.variance[key] = own - own**2 * sharper
        self.seen[key] = self.step

    def state_dict(self) -> dict[str, Tensor | int]:
        return {name: torch.tensor(getattr(self, name)) for name in STATE} | {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        for name in STATE:
            setattr(self, name, state[name].numpy().copy())
        self.step = int(state["step"])


def sigmoid(x: float) -> float:
    return 0.5 * (1 + math.tanh(x / 2))  # which no x overflows


def at_nodes(mean: Tensor, variance: Tensor) -> Tensor:
    """sigma(f) at the nodes of the quadrature, f ~ N(mean, variance), [..., nodes]."""
    return torch.sigmoid(mean[..., None] + variance.sqrt()[..., None] * POINTS)


def expected_p(mean: Tensor, variance: Tensor) -> Tensor:
    """E[p], p = sigma(f), f ~ N(mean, variance)."""
    return at_nodes(mean, variance) @ WEIGHTS


def chance_to_differ(mean: Tensor, variance: Tensor) -> Tensor:
    """E[2 p (1 - p)], p = sigma(f), f ~ N(mean, variance): of two answers one is right and one is wrong."""
    p = at_nodes(mean, variance)
    return (2 * p * (1 - p)) @ WEIGHTS


def log_evidence(mean: float, variance: float, right: float, tries: int) -> float:
    """log E[p^right (1 - p)^(tries - right)], p = sigma(f), f ~ N(mean, variance)."""
    f = mean + math.sqrt(variance) * NODES
    logs = right * f - tries * np.logaddexp(0.0, f) + LOG_WEIGHTS  # log p = f - log(1 + e^f)
    return float(np.logaddexp.reduce(logs))
