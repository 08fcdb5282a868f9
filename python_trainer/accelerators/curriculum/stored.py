"""Right answers of earlier steps to prompts that are hardly ever answered right: trained on again.

Where one answer in thirty is right, the others of its group cost as much to generate and say little; the right one was
used once. Kept and used again it costs no generation. Judged against a group that failed it would seem better than it
is the more it is used, so it is judged against the chance that its prompt is answered right *now*: the advantage is
(1 - p) / sqrt(p (1 - p)), which falls as the prompt is learned, and at p = 1/n, from where fresh groups of n do the
same, no stored answer is used. Related: RLEP (arXiv 2507.07451), which replays right answers of an earlier run.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from python_trainer.data import Rollout
from python_trainer.keyed import prompt_order

PER_PROMPT = 2  # answers, the newest
MOST = 4096  # of all
REST = 2  # steps between two uses of an answer


@dataclass
class Stored:
    """A right answer, the step that it is of, the last that used it, and how many did beyond the first."""

    answer: Rollout
    born: int
    last: int
    uses: int = 0


class StoredAnswers:
    """The newest right answers to each prompt.

    Args:
        uses: after which an answer goes.
        memory: steps after which it goes.
    """

    def __init__(self, uses: int, memory: float):
        self.uses, self.memory = uses, memory
        self.by_prompt: dict[int, deque[Stored]] = {}

    def __iter__(self) -> Iterator[Stored]:
        return (stored for answers in self.by_prompt.values() for stored in answers)

    def __len__(self) -> int:
        return sum(map(len, self.by_prompt.values()))

    def add(self, answers: Sequence[Rollout], step: int) -> None:
        """The right ones of these fresh answers; not of those that others wrote in part."""
        for answer in answers:
            if answer.accuracy > 0.5 and answer.response_mask is None and answer.episode is None:
                kept = self.by_prompt.setdefault(answer.prompt_key, deque(maxlen=PER_PROMPT))
                if all(stored.answer.response_ids != answer.response_ids for stored in kept):
                    kept.append(Stored(answer, step, step))

    def clear(self) -> None:
        self.by_prompt = {}

    def advance(self, step: int) -> None:
        """Time goes on to this step: what is used up or old goes, and the oldest of too many."""
        left = [s for s in self if s.uses < self.uses and step - s.born <= self.memory]
        self._fill(sorted(left, key=lambda stored: stored.born)[-MOST:])

    def take(
        self, step: int, chances: Callable[[torch.Tensor], torch.Tensor], size: int, tokens: float
    ) -> list[Rollout]:
        """Answers to train on again, of at most so many tokens, those that were used least first.

        Args:
            chances: numbers of prompts [K] -> how often they are answered right [K].
            size: of a group. Prompts that are answered right more often than once in a group need no stored answer.
        """
        rested = [stored for stored in self if step - stored.last >= REST]
        p = chances(torch.tensor([stored.answer.prompt_key for stored in rested], dtype=torch.int64)).tolist()
        taken = []
        for stored, chance in sorted(zip(rested, p), key=lambda pair: (pair[0].uses, pair[1], -pair[0].born)):
            if chance < 1 / size and (tokens := tokens - len(stored.answer.ids)) >= 0:
                stored.uses, stored.last = stored.uses + 1, step
                taken.append(replace(stored.answer, importance_cap=1.0, expected=max(chance, 1 / (size + 2))))
        return taken

    def _fill(self, answers: Sequence[Stored]) -> None:
        self.clear()
        for stored in answers:
            self.by_prompt.setdefault(stored.answer.prompt_key, deque(maxlen=PER_PROMPT)).append(stored)

    def state_dict(self) -> dict[str, Any]:
        """Tokens and log-probabilities in one tensor each, the rest in rows."""
        answers = [stored.answer for stored in self]
        return {
            "rows": [
                [s.born, s.last, s.uses, s.answer.prompt_key, s.answer.reward, s.answer.policy_version,
                 s.answer.finish_reason, s.answer.text, len(s.answer.prompt_ids), len(s.answer.response_ids)]
                for s in self
            ],
            "prompt_ids": torch.tensor([i for a in answers for i in a.prompt_ids], dtype=torch.int32),
            "response_ids": torch.tensor([i for a in answers for i in a.response_ids], dtype=torch.int32),
            "logprobs": torch.tensor([x for a in answers for x in a.logprobs], dtype=torch.float32),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        prompts = state["prompt_ids"].split([row[-2] for row in state["rows"]])
        responses, logprobs = (
            state[name].split([row[-1] for row in state["rows"]]) for name in ("response_ids", "logprobs")
        )
        stored = []
        for row, prompt, response, values in zip(state["rows"], prompts, responses, logprobs):
            born, last, uses, key, reward, version, reason, text = row[:8]
            answer = Rollout(
                prompt_ids=prompt.tolist(),
                response_ids=response.tolist(),
                logprobs=values.tolist(),
                finish_reason=reason,
                policy_version=version,
                prompt_key=key,
                text=text,
                reward=reward,
                accuracy=1.0,
            )
            stored.append(Stored(answer, born, last, uses))
        self._fill(stored)


def in_batches(groups: Sequence[list[Rollout]], size: int, times: int, seed: int) -> list[list[Rollout]]:
    """All groups so many times, in another order each time, in batches of ``size`` answers or just above."""
    batches: list[list[Rollout]] = []
    for place in prompt_order(seed, 0, times * len(groups), len(groups)) if groups else ():
        if not batches or len(batches[-1]) >= size:
            batches.append([])
        number = len({answer.group for answer in batches[-1]})
        batches[-1] += [replace(answer, group=number) for answer in groups[place]]
    return batches
