"""What is expected of every training prompt: how often it is answered right, and in how many tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from python_trainer.accelerators.curriculum.field import Field, chance_to_differ, expected_p
from python_trainer.data import Rollout, merits

OWN = (0.3, 1.0, 2.5, 6.0)  # how far prompts with the same features may lie apart, in logits; evidence decides
EARLIER = 0.5  # weight of what earlier runs have shown of a prompt, give or take as much
CLEAR = 2.0  # nats of evidence
KEEP = 0.98  # of the evidence from step to step
BINS = 10  # of the chance that two answers differ, from 0 to 1/2
PRIOR_GROUPS = 4.0  # as many groups in each of these bins stand for the beliefs being right
FIELDS = ("tokens", "variance", *(f"success_{i}" for i in range(len(OWN))))


def features_of(lengths: Sequence[int]) -> Tensor:
    """1, logarithm of the length and its square, standardised, [P, 3]; where all lengths are one, 1 and zeros."""
    logs = torch.tensor(lengths, dtype=torch.float64).log()
    z = (logs - logs.mean()) / logs.std(correction=0).clamp_min(1e-3)  # all one length: 0
    return torch.stack([torch.ones_like(z), z, (z**2 - 1) * (z**2).mean()], dim=1)


class Outcomes:
    """Beliefs about the answers to every prompt under the present policy.

    Attributes:
        judged: whether answers are right or wrong; else what counts is the variance of their rewards.

        earlier: of :meth:`know`.

    Args:
        lengths: tokens of each training prompt.
        memory: steps after which what a prompt alone has shown is forgotten to 1/e.
    """

    def __init__(self, lengths: Sequence[int], memory: float):
        features = features_of(lengths)
        self.judged = True
        self.earlier: Tensor | None = None
        self.success = [Field(features, spread=2.0, own=own, walk=0.1, memory=memory) for own in OWN]
        self.evidence = torch.zeros(len(OWN), dtype=torch.float64)
        self.differences = torch.zeros(2, BINS, dtype=torch.float64)  # share of pairs, expected and seen
        self.tokens = Field(features, mean=5.0, spread=2.0, own=0.3, walk=0.02, memory=memory)  # logarithms
        self.variance = Field(features, spread=3.0, own=1.5, walk=0.1, memory=memory)

    def know(self, earlier: Tensor) -> None:
        """Before anything is learned: how easy prompts were to earlier runs, logits [P], see :mod:`.difficulty`.

        How much that says here is learned with everything else: it is one more feature that prompts share.
        """
        self.earlier = earlier
        for field in self.success:
            field.add_feature(earlier, mean=EARLIER, spread=EARLIER)

    @property
    def weight(self) -> float | None:
        """Of what earlier runs have shown, in logits per logit; None: nothing is known of them."""
        return None if self.earlier is None else float(self.best.w[-1])

    @property
    def best(self) -> Field:
        """Success, by the least spread between prompts that does not predict outcomes clearly worse than the best."""
        return self.success[int((self.evidence >= self.evidence.max() - CLEAR).nonzero()[0])]

    def advance(self, step: int) -> None:
        """Time goes on to this step."""
        passed = step - self.tokens.step
        self.evidence *= KEEP**passed
        self.differences *= KEEP**passed
        for field in (self.tokens, self.variance, *self.success):
            field.advance(step)

    def p(self, keys: Tensor) -> Tensor:
        """Expected share of right answers, [K]."""
        return expected_p(*self.best.moments(keys))

    def signal(self, keys: Tensor) -> Tensor:
        """Expected signal of an answer to each prompt, up to a constant, [K]: the variance of its reward, p (1 - p).

        With advantages scaled by the deviation of their group, the expected gradient of a group is sqrt(p (1 - p))
        times how right answers differ from wrong ones; its square is what a group brings.
        """
        if not self.judged:
            return self._level(self.variance, keys)
        believed = chance_to_differ(*self.best.moments(keys))
        return believed * self._truth(believed)

    def signal_draws(self, keys: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """:meth:`signal` of ``count`` worlds drawn from the beliefs, [count, K]."""
        if self.judged:
            p = self.best.draws(keys, count, generator).sigmoid()
            return 2 * p * (1 - p) * self._truth(chance_to_differ(*self.best.moments(keys)))
        return self.variance.draws(keys, count, generator).exp()

    def cost(self, keys: Tensor) -> Tensor:
        """Expected tokens of an answer, [K]."""
        return self._level(self.tokens, keys)

    def learn(self, answers: Sequence[Rollout]) -> None:
        """From the fresh answers to one prompt, begun at their start."""
        key, count = answers[0].prompt_key, len(answers)
        lengths = torch.tensor([len(answer.ids) for answer in answers], dtype=torch.float64)
        self.tokens.observe(key, lengths.mean().clamp_min(1.0).log().item(), 0.2)
        worth = torch.tensor(merits(answers), dtype=torch.float64)
        self.judged = self.judged and all(answer.merit is None for answer in answers)
        if self.judged:
            right = float(worth.sum())
            if count > 1:
                expected = chance_to_differ(*self.best.moments(torch.tensor([key])))
                seen = 2 * right * (count - right) / (count * (count - 1))
                self.differences[:, self._bin(expected)] += torch.tensor([[expected.item()], [seen]]).double()
            for i, field in enumerate(self.success):
                self.evidence[i] += field.observe_right(key, right, count)
        elif count > 1:
            self.variance.observe(key, (worth.var() + 1e-6).log().item(), (2 / (count - 1)) ** 0.5)

    def _bin(self, chance: Tensor) -> Tensor:
        return (2 * BINS * chance).long().clamp(0, BINS - 1)

    def _truth(self, believed: Tensor) -> Tensor:
        """Differences seen over those believed in, where chances to differ like these were believed, [K].

        Beliefs are normal, difficulty is not: where most prompts are nearly always or never answered right, what is
        believed is too high.
        """
        middles = (torch.arange(BINS, dtype=torch.float64) + 0.5) / (2 * BINS)
        expected, seen = self.differences + PRIOR_GROUPS * middles
        return (seen / expected)[self._bin(believed)]

    def _level(self, field: Field, keys: Tensor) -> Tensor:
        """The mean of what ``field`` has the logarithm of."""
        mean, variance = field.moments(keys)
        return (mean + variance.clamp_max(4.0) / 2).exp()

    def state_dict(self) -> dict[str, Any]:
        fields = (self.tokens, self.variance, *self.success)
        return {name: field.state_dict() for name, field in zip(FIELDS, fields)} | {
            "evidence": self.evidence.clone(),
            "differences": self.differences.clone(),
            "judged": self.judged,
            "earlier": None if self.earlier is None else self.earlier.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (earlier := state.get("earlier")) is not None:
            self.know(earlier.clone())
        for name, field in zip(FIELDS, (self.tokens, self.variance, *self.success)):
            field.load_state_dict(state[name])
        self.evidence, self.differences = state["evidence"].clone(), state["differences"].clone()
        self.judged = bool(state["judged"])
