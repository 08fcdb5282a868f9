"""Stage 2: the current policy looks at stored answers, and ranks them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.rhyme.evidence import Evidence, examine
from python_trainer.accelerators.rhyme.records import StoredAnswer
from python_trainer.accelerators.rhyme.retrodiction import Retrodictor, alignments, rank_correlation
from python_trainer.accelerators.rhyme.settings import RhymeSettings
from python_trainer.algorithms.advantages import group_advantages
from python_trainer.data import Rollout
from python_trainer.keyed import keyed_seed, keyed_unit

GRADIENT_MEMORY = 0.7  # how much of the remembered held-out gradient stays when a new one comes


@dataclass
class Candidate:
    """A stored answer in stage 2."""

    sample: StoredAnswer
    prompt_ids: Sequence[int]
    place: int  # of its group among the planned ones
    match: float = 0.0
    own: bool = False  # of this run
    age: float = 0.0  # steps, of this run's own answers
    group: int = -1  # of the fresh answers, once they are there
    fresh: Sequence[Rollout] = ()


class Ranking:
    """Ranks stored answers by the setting ``selection``, and learns from hindsight how useful they are.

    Attributes:
        last_gradient: running mean of held-out gradients.
    """

    def __init__(self, settings: RhymeSettings):
        self.settings = settings
        self.retrodictor = Retrodictor(0)
        self.last_gradient: torch.Tensor | None = None

    def examine(self, context: StepContext, candidates: Sequence[Candidate]) -> Evidence:
        """What the present policy says of the candidates."""
        gradients = bool(self.settings.retrodiction_steps) or self.settings.selection == "oracle"
        return self._examine(context, [(c.prompt_ids, c.sample) for c in candidates], gradients=gradients)

    def rank(
        self,
        context: StepContext,
        candidates: list[Candidate],
        evidence: Evidence,
        groups: dict[int, list[Rollout]],
        accuracy: float,
    ) -> torch.Tensor:
        """What the candidates are ranked by, [N].

        Args:
            candidates: with the fresh answers of their groups.
            evidence: of :meth:`examine`.
            groups: the fresh answers of the step.
            accuracy: of this run at its last step.
        """
        settings = self.settings
        due = settings.retrodiction_steps and context.step % settings.retrodiction_steps == 0
        scores = self._simple_scores(context, candidates, evidence)
        features = None
        if settings.retrodiction_steps:
            features = self._features(candidates, evidence, accuracy)
            if self.retrodictor.ready:
                scores["retrodiction"] = self.retrodictor.predict(features)
        if due or settings.selection == "oracle":
            self._look_back(context, candidates, evidence, scores, features, groups)
        return scores.get(settings.selection, scores["likelihood"])

    def _examine(
        self, context: StepContext, answers: Sequence[tuple[Sequence[int], StoredAnswer]], *, gradients: bool
    ) -> Evidence:
        """Of answers to prompts, given as tokens."""
        return examine(
            context.policy,
            [Rollout(prompt_ids, sample.response_ids) for prompt_ids, sample in answers],
            [sample.logprobs for _, sample in answers],
            temperature=context.generation.temperature,
            cap=self.settings.importance_cap,
            max_tokens=context.micro_batch_tokens,
            gradients=gradients,
        )

    def _simple_scores(
        self, context: StepContext, candidates: list[Candidate], evidence: Evidence
    ) -> dict[str, torch.Tensor]:
        """What else one could rank by, each [N]."""
        return {
            "likelihood": torch.stack([values.mean() for values in evidence.logprobs]),
            "reward": torch.tensor([c.sample.reward for c in candidates]),
            "recent": torch.tensor([float(c.sample.step - 1e6 * (not c.own)) for c in candidates]),
            "random": torch.tensor([keyed_unit(context.seed, "rhyme random", i) for i in range(len(candidates))]),
        }

    def _features(self, candidates: list[Candidate], evidence: Evidence, accuracy: float) -> torch.Tensor:
        """What the retrodiction network sees, [N, len(FEATURES)] in the order of FEATURES."""
        assert evidence.gradients is not None
        last = torch.zeros(len(candidates))
        if self.last_gradient is not None:
            last = torch.nn.functional.cosine_similarity(evidence.gradients, self.last_gradient[None])
        norms = evidence.gradients.norm(dim=1).clamp(min=1e-6).log()
        rows = []
        for i, candidate in enumerate(candidates):
            now, then = evidence.logprobs[i], torch.tensor(candidate.sample.logprobs)
            known = ~then.isnan()
            behaviour = float(then[known].mean()) if known.any() else 0.0
            ratio = float((now - then)[known].mean()) if known.any() else 0.0
            success = sum(r.accuracy for r in candidate.fresh) / len(candidate.fresh)
            rows.append(
                [
                    float(now.mean()),
                    float(now.min()),
                    float(evidence.entropy[i]),
                    behaviour,
                    ratio,
                    float(evidence.weights[i]),
                    float(known.float().mean()),
                    float(torch.tensor(len(now) + 1.0).log()),
                    candidate.sample.reward,
                    float(candidate.own),
                    float(torch.tensor(candidate.age + 1.0).log()),
                    candidate.match,
                    success,
                    float(last[i]),
                    float(norms[i]),
                    accuracy,
                ]
            )
        return torch.tensor(rows)

    def _look_back(
        self,
        context: StepContext,
        candidates: list[Candidate],
        evidence: Evidence,
        scores: dict[str, torch.Tensor],
        features: torch.Tensor | None,
        groups: dict[int, list[Rollout]],
    ) -> None:
        """Hindsight: how well each candidate's gradient agrees with this step's held-out batch.

        First measures every ranking against it, then lets the network learn from it: each step is held out until it
        has been predicted.
        """
        assert evidence.gradients is not None
        held_out = self._held_out_gradients(context, groups)
        owners = torch.tensor([candidate.group for candidate in candidates])
        truth = alignments(evidence.gradients, owners, held_out)
        known = ~truth.isnan()
        if not known.any():
            return
        if int(known.sum()) >= 4:
            for name, values in scores.items():
                context.telemetry[f"rhyme/rank/{name}"] = rank_correlation(values[known], truth[known])
        context.telemetry["rhyme/alignment"] = float(truth[known].mean())
        scores["oracle"] = truth.nan_to_num(-1.0)
        if features is not None:
            self.retrodictor.learn(features[known], truth[known])
        total = torch.stack(list(held_out.values())).sum(0)
        total = total / total.norm().clamp(min=1e-9)
        if self.last_gradient is not None:
            total = GRADIENT_MEMORY * self.last_gradient + (1 - GRADIENT_MEMORY) * total
        self.last_gradient = total

    def _held_out_gradients(self, context: StepContext, groups: dict[int, list[Rollout]]) -> dict[int, torch.Tensor]:
        """By group, advantage times gradient summed over fresh answers, of groups that have any spread."""
        numbers = [number for number, fresh in groups.items() if len({r.reward for r in fresh}) > 1]
        numbers.sort(key=lambda number: keyed_seed(context.seed, "rhyme held out", number))
        taken: list[Rollout] = []
        for number in numbers:
            if self.settings.selection == "oracle" or len(taken) < self.settings.held_out:
                taken += groups[number]
        if not taken:
            return {}
        samples = [
            StoredAnswer(0, 0, 0, "", r.text, True, r.reward, r.response_ids, [float("nan")] * len(r.response_ids))
            for r in taken
        ]
        evidence = self._examine(context, [(r.prompt_ids, s) for r, s in zip(taken, samples)], gradients=True)
        assert evidence.gradients is not None
        found: dict[int, torch.Tensor] = {}
        rewards, owners = torch.tensor([r.reward for r in taken]), torch.tensor([r.group for r in taken])
        for rollout, advantage, gradient in zip(taken, group_advantages(rewards, owners).tolist(), evidence.gradients):
            found[rollout.group] = found.get(rollout.group, 0.0) + advantage * gradient
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"retrodictor": self.retrodictor.state_dict(), "last_gradient": self.last_gradient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.retrodictor.load_state_dict(state["retrodictor"])
        self.last_gradient = state["last_gradient"]
