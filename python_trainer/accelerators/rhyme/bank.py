"""The sample bank: stored answers to the prompts of this task, from history and from the current run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from python_trainer.accelerators.rhyme.records import StoredAnswer


class SampleBank:
    """Answers by prompt, best and newest first. The same text may be there from several steps and runs.

    Args:
        per_prompt: most answers of one prompt.
        size: most answers of all.
    """

    def __init__(self, per_prompt: int, size: int):
        self.per_prompt, self.size = per_prompt, size
        self.by_prompt: dict[str, list[StoredAnswer]] = {}
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[StoredAnswer]:
        return (sample for samples in self.by_prompt.values() for sample in samples)

    def add(self, sample: StoredAnswer, *, fresh: bool) -> None:
        """A fresh answer goes in front of equally good ones, a historical one behind them; the last may fall out."""
        if self.knows(sample) or (not fresh and self.count >= self.size):
            return
        here = self.by_prompt.setdefault(sample.prompt_key, [])
        better = sum(other.reward > sample.reward or (other.reward == sample.reward and not fresh) for other in here)
        here.insert(better, sample)
        self.count += 1
        if len(here) > self.per_prompt:
            here.pop()
            self.count -= 1
        if self.count > self.size:
            self._drop_one()

    def knows(self, sample: StoredAnswer) -> bool:
        """Whether it is here: this text, of this step of this run."""
        place = (sample.run_id, sample.step, sample.text)
        here = self.by_prompt.get(sample.prompt_key, ())
        return any((other.run_id, other.step, other.text) == place for other in here)

    def fill(self, samples: Sequence[StoredAnswer]) -> None:
        """These and no others, equally good ones in their order, as far as there is room for them."""
        self.by_prompt = {}
        for sample in samples:
            self.by_prompt.setdefault(sample.prompt_key, []).append(sample)
        for here in self.by_prompt.values():
            here.sort(key=lambda sample: -sample.reward)
            del here[self.per_prompt :]
        self.count = sum(map(len, self.by_prompt.values()))
        while self.count > self.size:
            self._drop_one()

    def _drop_one(self) -> None:
        """Out of the prompt with the most answers, the first of several such, its last."""
        prompt = max(self.by_prompt, key=lambda key: len(self.by_prompt[key]))
        self.by_prompt[prompt].pop()
        self.count -= 1
        if not self.by_prompt[prompt]:  # a bank that is read again knows of no prompt without answers
            del self.by_prompt[prompt]

    def candidates(self, prompt_key: str, worth: Callable[[StoredAnswer], float], limit: int) -> list[StoredAnswer]:
        """At most ``limit`` different answers of a prompt for which ``worth`` is positive, those worth most first."""
        scored = [(worth(sample), sample) for sample in self.by_prompt.get(prompt_key, ())]
        distinct: dict[str, StoredAnswer] = {}
        for value, sample in sorted(scored, key=lambda pair: -pair[0]):
            if value > 0:
                distinct.setdefault(sample.text, sample)
        return list(distinct.values())[:limit]

    def state_dict(self) -> dict[str, Any]:
        return state_of(list(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undoes :meth:`state_dict`, within the bounds of this bank."""
        self.fill(answers_in(state))


def state_of(samples: Sequence[StoredAnswer]) -> dict[str, Any]:
    """Answers as a checkpoint holds them."""
    return {
        "rows": [
            [s.run_id, s.step, s.policy_version, s.prompt_key, s.text, s.finished, s.reward, len(s.response_ids),
             s.tokenizer]
            for s in samples
        ],
        "response_ids": torch.tensor([i for s in samples for i in s.response_ids], dtype=torch.int32),
        "logprobs": torch.tensor([x for s in samples for x in s.logprobs], dtype=torch.float32),
    }  # fmt: skip


def answers_in(state: Mapping[str, Any]) -> list[StoredAnswer]:
    """Undoes :func:`state_of`."""
    lengths = [row[7] for row in state["rows"]]
    ids, logprobs = (state[name].split(lengths) for name in ("response_ids", "logprobs"))
    samples = []
    for row, own_ids, own_logprobs in zip(state["rows"], ids, logprobs):
        facts = (*row[:7], own_ids.tolist(), own_logprobs.tolist(), row[8])
        samples.append(StoredAnswer(*facts))
    return samples


def for_tokenizer(
    samples: Sequence[StoredAnswer],
    tokenizer: Any,
    fingerprint: str,
) -> list[StoredAnswer]:
    """Stored answers in the tokens of this tokenizer.

    Those of another tokenizer are encoded again. Nobody sampled these tokens, so their log-probabilities are unknown
    (NaN) and they stay out of importance ratios. Texts that do not come back from their tokens are left out.
    """
    kept = []
    for sample in samples:
        if sample.tokenizer != fingerprint:
            ids = tokenizer(sample.text, add_special_tokens=False)["input_ids"]
            if not ids or tokenizer.decode(ids, skip_special_tokens=True) != sample.text:
                continue
            if sample.finished:
                ids = [*ids, tokenizer.eos_token_id]
            sample.response_ids, sample.logprobs = list(ids), [float("nan")] * len(ids)
            sample.tokenizer = fingerprint
        kept.append(sample)
    return kept
