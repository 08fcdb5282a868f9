"""RPO: answers continue a prefix of an earlier answer to their prompt, and only their last part is generated.

"Suffix rollouts" of arXiv 2601.19404, for any trainer. Changes the objective: the policy learns to finish answers that
it (or an earlier version of it) began. Differences from the paper:

- The cut is drawn once per prompt and step and shared by its group; different cuts would confound the advantages.
- The memory holds token ids, never text: decoding and encoding again would drift.
- Short cuts unlearn the part that they skip, and their groups have little spread. So a share of the groups is answered
  whole, cuts have a least length, and cutting ends if whole answers become clearly worse.

``SuffixMemory(min_cut_share=0, whole_share=0)`` undoes the last one.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, variance

from rlkernels import _check
from rlkernels.sampling.keys import keyed_choice, keyed_seed, keyed_unit

LENGTH_ALPHA = 0.01  # steepness of the length reward per token (the paper)
WATCHED_STEPS = 8  # whose whole groups are compared with the best as many steps before
MIN_GROUPS_TO_JUDGE = 16  # whole groups in the watched steps
MAX_FALL = 3.0  # standard errors by which whole answers may fall before cutting ends
BEST_ANSWER_PROBABILITY = 0.5  # of remembering the best answer of a group, and not another one

Prompt = int | str


def length_factors(lengths: Sequence[int], *, alpha: float = LENGTH_ALPHA) -> list[float]:
    """Return max(1 / (1 + exp(-alpha (mean length - length))), 0.5) of the rewarded answers of a group.

    RPO, section 3. Its formula gives wrong answers 0.5 too; the authors' code leaves them without reward: pass the
    lengths of rewarded answers only.
    """
    mean = sum(lengths) / max(len(lengths), 1)
    return [0.5 + 0.5 * max(math.tanh(alpha * (mean - length) / 2), 0) for length in lengths]  # the logistic function


def _check_finite(name: str, values: Sequence[float]) -> None:
    for i, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"{name}[{i}] must be finite, got {value}")


class SuffixMemory:
    """One answer to each prompt, from which the next answers to the prompt take their beginning.

    Every random draw is keyed by the prompt and the ``seed`` of a step, so all processes draw the same.

    Args:
        cut_share: longest cut, as a share of the answer.
        cut_tokens: longest cut in tokens instead.
        min_cut_share: shortest cut, as a share of the answer. Any cut has at least one token.
        whole_share: share of the groups that generate whole answers. Cutting ends if these become clearly worse.

    Attributes:
        answers: prompt -> token ids of a complete answer.
        whole_scores: mean scores of the whole groups, a list for each of the watched steps.
        best: the best mean of whole groups so far, and the square of its standard error; empty before the first.
        ended: whether cutting has ended.

    Raises:
        TypeError, ValueError: a share outside [0, 1], or ``cut_tokens`` below 1.
    """

    def __init__(self, *, cut_share: float = 1.0, cut_tokens: int | None = None, min_cut_share: float = 0.2,
                 whole_share: float = 0.25) -> None:  # fmt: skip
        shares = {"cut_share": cut_share, "min_cut_share": min_cut_share, "whole_share": whole_share}
        for name, share in shares.items():
            _check.in_range(name, share, 0.0, 1.0)
        if cut_tokens is not None:
            _check.integer("cut_tokens", cut_tokens, 1)
        self.cut_share = cut_share
        self.cut_tokens = cut_tokens
        self.min_cut_share = min_cut_share
        self.whole_share = whole_share
        self.answers: dict[Prompt, list[int]] = {}
        self.whole_scores: list[list[float]] = []
        self.best: list[float] = []
        self.ended = False
        self._watched_step: int | None = None  # the last entry of whole_scores

    def is_whole(self, prompt: Prompt, seed: int) -> bool:
        """Return whether the group of this prompt generates whole answers in this step, even with one to cut."""
        return keyed_unit(seed, "rpo whole", prompt) < self.whole_share

    def draw_prefix(self, prompt: Prompt, seed: int, longest: int) -> list[int]:
        """Return the beginning of the new answers to a prompt; empty where they are generated whole.

        Args:
            prompt: key of the prompt.
            seed: of the step.
            longest: most tokens of an answer. A remembered answer that is longer is not continued.
        """
        answer = self.answers.get(prompt, [])
        if self.ended or not 0 < len(answer) <= longest or self.is_whole(prompt, seed):
            return []
        return answer[: len(answer) - self.draw_cut(prompt, seed, len(answer))]

    def draw_cut(self, prompt: Prompt, seed: int, length: int) -> int:
        """Return how many last tokens of an answer of this length are generated anew."""
        longest = max(min(math.ceil(self.cut_tokens or self.cut_share * length), length), 1)
        shortest = max(min(math.ceil(self.min_cut_share * length), longest), 1)
        return shortest + keyed_seed(seed, "rpo cut", prompt) % (longest - shortest + 1)

    def remember(self, prompt: Prompt, seed: int, answers: Sequence[Sequence[int]], rewards: Sequence[float]) -> None:
        """Remember the best answer of a group or, with the rest of the probability, another one (epsilon-greedy).

        Args:
            prompt: key of the prompt.
            seed: of the step.
            answers: token ids of those that are worth it: right and complete, so that they can be cut. An answer that
                hit the length limit is not complete: a few more tokens do not end it.
            rewards: of these answers; finite, any scale.

        Raises:
            ValueError: a reward that is NaN or infinite. Nothing has changed then.
        """
        _check_finite("rewards", rewards)
        if not answers:
            return
        best_reward = max(rewards)
        best = [index for index, reward in enumerate(rewards) if reward == best_reward]
        chosen = keyed_choice(best, seed, "rpo best", prompt)
        others = [index for index in range(len(answers)) if index != chosen]
        if others and keyed_unit(seed, "rpo greedy", prompt) >= BEST_ANSWER_PROBABILITY:
            chosen = keyed_choice(others, seed, "rpo other", prompt)
        self.answers[prompt] = list(answers[chosen])

    def watch(self, step: int, scores: Iterable[float]) -> None:
        """Add the mean scores of the groups of a step that :meth:`is_whole` chose; call it in every step.

        Raises:
            ValueError: a score that is NaN or infinite. Nothing has changed then.
        """
        scores = list(scores)
        _check_finite("scores", scores)
        if step != self._watched_step:
            self._watched_step = step
            self.whole_scores = [*self.whole_scores, []][-WATCHED_STEPS:]
        self.whole_scores[-1].extend(scores)

    def forget_scores(self) -> None:
        """Forget the scores of whole groups: later ones have another scale."""
        self.whole_scores = []
        self.best = []
        self._watched_step = None

    def end_if_worse(self) -> str | None:
        """End cutting if whole answers have become clearly worse, and return a sentence about it; else None."""
        scores = [score for step in self.whole_scores for score in step]
        if self.ended or len(self.whole_scores) < WATCHED_STEPS or len(scores) < MIN_GROUPS_TO_JUDGE:
            return None
        mean = fmean(scores)
        squared_error = variance(scores) / len(scores)
        if self.best and self.best[0] - mean > MAX_FALL * math.sqrt(self.best[1] + squared_error):
            self.ended = True
            fall = f"whole answers fell from {self.best[0]:.3f} to {mean:.3f} (means over {WATCHED_STEPS} steps)"
            return f"{fall}: every answer is generated whole from now on"
        if not self.best or mean > self.best[0]:
            self.best = [mean, squared_error]
        return None
