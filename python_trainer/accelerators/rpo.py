"""RPO: only the last part of an answer is generated, after a prefix of an answer from an earlier visit.

"Suffix rollouts" of arXiv 2601.19404. Changes the objective: the policy learns to finish answers that it (or an
earlier version of it) began. What differs from the paper:

- The cut is drawn once per prompt and step and shared by its group; different cuts would confound the advantages.
- New tokens are limited by ``max_completion_length`` alone, so that answers need not shrink.
- Token ids are kept, never text: decoding and encoding again would drift. Answers that hit the limit are not kept:
  a few tokens do not bring them to an end.
- By default only right answers are kept, and the prefix itself is not trained on (``algorithm.prefix_in_loss``).
"""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.settings import RPOSettings
from python_trainer.data import Group, Rollout, by_group, good_ones, merits
from python_trainer.errors import UserError
from python_trainer.keyed import keyed_choice, keyed_seed, keyed_unit
from python_trainer.model.loading import tokenizer_fingerprint
from python_trainer.run_directory import write_bytes

FILL_BATCH = 256  # answers generated at a time
FORMAT = "rlkernels answers 1"  # of files of remembered answers
LENGTH_ALPHA = 0.01  # steepness of the length reward per token (the paper)


def length_reward(
    rewards: list[float], lengths: list[int], *, lift_wrong: bool, alpha: float = LENGTH_ALPHA
) -> list[float]:
    """Returns clip(r / (1 + exp(-alpha (mean length - length))), 0.5, 1) of one group (RPO, section 3).

    Without ``lift_wrong`` the clip applies to the factor, so that a reward of 0 stays 0.
    """
    mean = sum(lengths) / max(len(lengths), 1)
    factors = [0.5 * (1 + math.tanh(alpha * (mean - length) / 2)) for length in lengths]  # the logistic function
    if lift_wrong:
        return [min(max(reward * factor, 0.5), 1.0) for reward, factor in zip(rewards, factors)]
    return [reward * max(factor, 0.5) for reward, factor in zip(rewards, factors)]


def complete(rollout: Rollout) -> bool:
    return rollout.finish_reason != "length" and bool(rollout.response_ids)


class RPO(Accelerator):
    """A cache of one answer per prompt, cut at a random place."""

    settings: RPOSettings

    def __init__(self, settings: RPOSettings):
        super().__init__(settings)
        self.answers: dict[int, list[int]] = {}  # prompt key -> token ids of a whole answer
        self.counted_step, self.counts = 0, Counter[str]()

    def begin(self, run: RunContext) -> None:
        """Fills the cache: from the file if there is one, else with the first policy's answers."""
        path = self.settings.cache_path
        if path is not None and Path(path).exists():
            self.answers = load_answers(Path(path), run.prompts, run.policy.tokenizer)
            run.note(f"rpo: {len(self.answers)} remembered answers from {path}")
        elif self.settings.fill:
            self.fill(run)
            file = Path(path) if path else run.folder / "rpo_answers.safetensors"
            run.once(lambda: save_answers(file, self.answers, run.prompts, run.policy.tokenizer))

    def fill(self, run: RunContext) -> None:
        """Asks the policy for an answer to every prompt, and again where there is none to keep."""
        start, total = time.perf_counter(), len(run.prompts)
        for attempt in range(self.settings.fill):
            keys = [key for key in range(total) if key not in self.answers]
            for first in range(0, len(keys), FILL_BATCH):
                for rollout in run.answer(keys[first : first + FILL_BATCH], attempt):
                    right = rollout.accuracy > 0.5 or rollout.merit is not None  # which no group can be the mean of
                    if complete(rollout) and (right or self.settings.keep == "any"):
                        self.answers[rollout.prompt_key] = list(rollout.response_ids)
        seconds = time.perf_counter() - start
        run.note(f"rpo: first answers to {len(self.answers)} of {total} prompts remembered, {seconds:.1f} s")

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        for group in groups:
            key, answer = group.prompt_key, self.answers.get(group.prompt_key)
            # an answer may come from a run that allowed longer ones
            if answer and not group.prefix_ids and len(answer) <= group.max_new_tokens:
                longest = math.ceil(self.settings.cut_tokens or self.settings.cut_share * len(answer))
                cut = 1 + keyed_seed(context.seed, "rpo cut", key) % max(min(longest, len(answer)), 1)
                group.prefix_ids = answer[: len(answer) - cut]
                group.max_new_tokens -= len(group.prefix_ids)
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """Shapes and remembers whole groups, with what others have mixed in."""
        groups = by_group(rollout for rollout in rollouts if rollout.expected is None).values()
        self.report(context, groups)
        for group in groups:
            if self.settings.length_reward != "none":
                rewards, lengths = [r.reward for r in group], [len(r.response_ids) for r in group]
                shaped = length_reward(rewards, lengths, lift_wrong=self.settings.length_reward == "paper")
                for rollout, reward in zip(group, shaped):
                    rollout.reward = reward
            self.remember(context.seed, group)
        return rollouts

    def report(self, context: StepContext, groups: Iterable[list[Rollout]]) -> None:
        """Sums up the step so far, of all rounds of dynamic sampling, before any of these groups is remembered."""
        if context.step != self.counted_step:
            self.counted_step, self.counts = context.step, Counter()
        for group in groups:
            prefix = group[0].prefix_len
            fresh = [rollout for rollout in group if rollout.importance_cap is None]  # others come from a store
            self.counts.update(
                groups=1,
                informative=int(len(set(merits(group))) > 1),  # merits differ
                continued=int(prefix > 0),
                prefix_tokens=prefix,
                given=prefix * len(fresh),
                tokens=sum(len(rollout.response_ids) for rollout in fresh),
            )
        counts, size = self.counts, max(self.counts["groups"], 1)
        context.telemetry |= {
            "rpo/given_tokens": float(counts["given"]),
            "rpo/hit_rate": counts["continued"] / size,
            "rpo/prefix_share": counts["given"] / max(counts["tokens"], 1),
            "rpo/prefix_tokens": counts["prefix_tokens"] / size,
            "rpo/informative": counts["informative"] / size,
            "rpo/remembered": len(self.answers),
        }

    def remember(self, seed: int, group: list[Rollout]) -> None:
        """Epsilon-greedy: the best answer with probability epsilon, otherwise one of the others."""
        key, worth = group[0].prompt_key, group if self.settings.keep == "any" else good_ones(group)
        options = [rollout for rollout in worth if complete(rollout)]
        if not options:
            return
        best = max(rollout.reward for rollout in options)
        chosen = keyed_choice([rollout for rollout in options if rollout.reward == best], seed, "rpo best", key)
        others = [rollout for rollout in options if rollout is not chosen]
        if others and keyed_unit(seed, "rpo greedy", key) >= self.settings.epsilon:
            chosen = keyed_choice(others, seed, "rpo other", key)
        self.answers[key] = list(chosen.response_ids)

    def state_dict(self) -> dict[str, Any]:
        return pack_answers(self.answers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.answers = unpack_answers(state)


def pack_answers(answers: dict[int, list[int]]) -> dict[str, torch.Tensor]:
    """``keys`` int64 [N], ``lengths`` int64 [N] and all ``ids`` int32, one answer after the other."""
    return {
        "keys": torch.tensor(list(answers), dtype=torch.int64),
        "lengths": torch.tensor([len(answer) for answer in answers.values()], dtype=torch.int64),
        "ids": torch.tensor([token for answer in answers.values() for token in answer], dtype=torch.int32),
    }


def unpack_answers(tensors: dict[str, torch.Tensor]) -> dict[int, list[int]]:
    """Undoes :func:`pack_answers`."""
    parts = tensors["ids"].split(tensors["lengths"].tolist())
    return {key: part.tolist() for key, part in zip(tensors["keys"].tolist(), parts)}


def save_answers(path: Path, answers: dict[int, list[int]], prompts: Sequence[Sequence[int]], tokenizer: Any) -> None:
    """Writes remembered answers into one safetensors file that knows which prompts and tokenizer it belongs to."""
    tensors = pack_answers(answers)
    metadata = _belongs_to(prompts, tokenizer) | {"format": FORMAT, "checksum": _checksum(tensors)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, save(tensors, metadata))
    except OSError as error:
        raise UserError(f"cannot write remembered answers to {path}: {error.strerror}") from error


def load_answers(path: Path, prompts: Sequence[Sequence[int]], tokenizer: Any) -> dict[int, list[int]]:
    """Reads what :func:`save_answers` wrote.

    Raises:
        UserError: the file is damaged, or was made for other prompts or with another tokenizer.
    """
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(f"{path} holds no remembered answers (format {metadata.get('format')!r})")
            for name, value in _belongs_to(prompts, tokenizer).items():
                if metadata.get(name) != value:
                    raise UserError(f"{path} holds answers of a run with other {name}: remove it, or give another file")
            tensors = {name: file.get_tensor(name) for name in ("keys", "lengths", "ids")}
        if metadata["checksum"] != _checksum(tensors):
            raise SafetensorError("its checksum does not fit")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged ({error}): remove it, and it is made anew") from error
    return unpack_answers(tensors)


def _belongs_to(prompts: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, str]:
    listed = json.dumps([list(prompt) for prompt in prompts])
    return {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "prompts": hashlib.blake2b(listed.encode(), digest_size=16).hexdigest(),
    }


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    data = b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
    return hashlib.blake2b(data, digest_size=16).hexdigest()
