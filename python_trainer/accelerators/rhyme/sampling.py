"""Two-stage sampling: the bank of stored answers, and which of them join the groups of a step.

Stage 1 finds the stages of earlier runs that rhyme with the present (:mod:`.matching`). In stage 2 the policy scores
the stored answers from those stages and its own recent ones. As many fresh answers are spared as stored ones can take
their places; the best of these join the groups, with truncated importance weights.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from python_trainer.accelerators.base import RunContext, StepContext
from python_trainer.accelerators.rhyme.database import StoredAnswer, prompt_key
from python_trainer.accelerators.rhyme.replay import MEMORY, MOST_USES, PER_PROMPT, REST
from python_trainer.accelerators.rhyme.retrodiction import LEAST, Retrodictor
from python_trainer.accelerators.settings import RhymeSettings
from python_trainer.algorithms.losses import importance_weights
from python_trainer.data import Group, Rollout, by_group, good_ones
from python_trainer.keyed import keyed_unit
from python_trainer.model.packing import micro_batches, pack

BANK_SIZE = 8192  # answers
BANK_PER_PROMPT = 16
CANDIDATES = 4  # stored answers of a prompt that stage 2 looks at
RESCUERS = 1  # stored answers at least for a group in which every fresh one failed
CAP = 1.0  # of the importance weight pi / pi_behaviour of each token
MIN_WEIGHT = 0.1  # mean importance weight below which an answer is too far from the policy
Worth = Callable[[StoredAnswer], float]  # how far an answer is to be trusted, in [0, 1]; 0: not at all


@dataclass
class BankEntry:
    """A stored answer to a training prompt, the step at which it came into the bank, and its uses in replay."""

    prompt: int
    answer: StoredAnswer
    born: int
    last_use: int
    uses: int = 0


class AnswerBank:
    """Stored answers by training prompt, best and newest first. A text may be there from several steps and runs."""

    def __init__(self) -> None:
        self.by_prompt: dict[int, list[BankEntry]] = {}

    def __iter__(self) -> Iterator[BankEntry]:
        return (entry for entries in self.by_prompt.values() for entry in entries)

    def __len__(self) -> int:
        return sum(map(len, self.by_prompt.values()))

    def add(self, answers: Iterable[tuple[int, StoredAnswer]], step: int) -> None:
        """Adds (prompt, answer) pairs at a step of this run, equally good ones in their order."""
        self.fill([*self, *(BankEntry(prompt, answer, step, step) for prompt, answer in answers)])

    def fill(self, entries: Sequence[BankEntry]) -> None:
        """Holds these entries and no others. If they are too many the oldest go."""
        self.by_prompt = {}
        for entry in sorted(entries, key=lambda entry: (-entry.answer.reward, -entry.born)):
            here = self.by_prompt.setdefault(entry.prompt, [])
            if len(here) < BANK_PER_PROMPT:
                here.append(entry)
        if len(self) > BANK_SIZE:
            self.fill(sorted(self, key=lambda entry: -entry.born)[:BANK_SIZE])

    def candidates(self, prompt: int, worth: Worth) -> list[StoredAnswer]:
        """Returns a few different answers of a prompt for which ``worth`` is positive, those worth most first."""
        trusted = [entry for entry in self.by_prompt.get(prompt, ()) if worth(entry.answer) > 0]
        return [e.answer for e in different(sorted(trusted, key=lambda entry: -worth(entry.answer)))[:CANDIDATES]]

    def replayable(self, step: int, runs: Collection[int]) -> list[BankEntry]:
        """Returns the best and newest answers of these runs to each prompt that may be trained on again."""
        found = list[BankEntry]()
        for here in self.by_prompt.values():
            young = [e for e in here if e.answer.run_id in runs and step - e.born <= MEMORY]
            found += different(young)[:PER_PROMPT]
        return [entry for entry in found if entry.uses < MOST_USES and step - entry.last_use >= REST]

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [vars(entry) | {"answer": vars(entry.answer)} for entry in self]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fill([BankEntry(**row | {"answer": StoredAnswer(**row["answer"])}) for row in state["entries"]])


def different(entries: Iterable[BankEntry]) -> list[BankEntry]:
    """Returns the first entry of each text."""
    found: dict[str, BankEntry] = {}
    for entry in entries:
        found.setdefault(entry.answer.text, entry)
    return list(found.values())


def encode_again(answers: Sequence[StoredAnswer], run: RunContext, fingerprint: str) -> list[StoredAnswer]:
    """Encodes texts of other tokenizers by the policy's, and leaves out those that do not come back from their tokens.

    Nobody sampled the new tokens, so their log-probabilities are unknown (NaN) and they stay out of importance ratios.
    """
    kept, policy = [], run.policy
    prompts = {prompt_key(example.prompt): example.prompt for example in run.task.train}
    for answer in answers:
        if answer.tokenizer != fingerprint:
            ids = policy.tokenizer(answer.text, add_special_tokens=False)["input_ids"]
            if not ids or policy.decode(ids) != answer.text:
                continue
            ids = [*ids, *policy.ending(prompts.get(answer.prompt_key, ""))] if answer.finished else ids
            answer.response_ids, answer.tokenizer = torch.tensor(ids, dtype=torch.int32), fingerprint
            answer.logprobs = torch.full((len(ids),), math.nan)
        elif answer.response_ids.numel() and int(answer.response_ids.max()) >= len(policy.tokenizer):
            continue  # whoever wrote the row: no policy has an embedding for these
        kept.append(answer)
    return kept


def judge_again(answers: Sequence[StoredAnswer], run: RunContext) -> list[tuple[int, StoredAnswer]]:
    """Judges answers to the training prompts -> (prompt, answer) of those that are right, with this run's rewards.

    Where two examples have one prompt, each judges the answers by its own columns. If nothing is right or wrong all
    that the run could give stay, as each was better than the mean of its group. Reward functions get as many answers
    in a call as in a step, which their time limit is for.
    """
    rollout, right, stored = run.config.rollout, [], dict[str, list[StoredAnswer]]()
    for answer in answers:
        if len(answer.response_ids) <= rollout.max_completion_length:
            stored.setdefault(answer.prompt_key, []).append(answer)
    prompts = enumerate(prompt_key(example.prompt) for example in run.task.train)
    possible = [(number, replace(answer)) for number, key in prompts for answer in stored.get(key, ())]
    size = rollout.prompts_per_step * rollout.num_generations
    for first in range(0, len(possible), size):
        part = possible[first : first + size]
        texts, ids = [answer.text for _, answer in part], [answer.response_ids.tolist() for _, answer in part]
        scores = run.judge([run.task.train[number] for number, _ in part], texts, ids)
        for (number, answer), reward, accuracy in zip(part, scores.total, scores.accuracy):
            answer.reward = reward
            if accuracy > 0.5 or scores.merit is not None:
                right.append((number, answer))
    return right


def as_rollout(answer: StoredAnswer, key: int, prompt_ids: Sequence[int], **facts: Any) -> Rollout:
    """Turns a stored answer to the training prompt of this number into a rollout."""
    return Rollout(
        prompt_ids, answer.response_ids.tolist(), finish_reason="stop" if answer.finished else "length", prompt_key=key,
        text=answer.text, reward=answer.reward, accuracy=1.0, importance_cap=CAP, **facts,
    )  # fmt: skip


@dataclass
class Candidate:
    """A stored answer that may join a group, as the present policy sees it."""

    answer: StoredAnswer
    place: int  # of its group in the step
    prompt_ids: Sequence[int]
    worth: float  # C_rhyme of its stage, or how recent it is of this run, in (0, 1]
    logprobs: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # float32 [tokens]
    entropy: float = 0.0  # mean over tokens
    weight: float = 1.0  # mean truncated importance weight
    fresh: Sequence[Rollout] = ()  # of its group, once they are there

    def features(self) -> list[float]:
        """Describes it to the retrodiction network."""
        change = (self.logprobs - self.answer.logprobs)[~self.answer.logprobs.isnan()]
        success = sum(rollout.accuracy for rollout in self.fresh) / max(len(self.fresh), 1)
        return [
            float(self.logprobs.mean()), float(self.logprobs.min()), self.entropy, self.weight, self.worth, success,
            float(change.mean()) if len(change) else 0.0, math.log(len(self.logprobs)), self.answer.reward,
        ]  # fmt: skip


@torch.no_grad()
def score_candidates(run: RunContext, candidates: Sequence[Candidate]) -> None:
    """Fills in log-probabilities, entropies and importance weights, by one forward pass of the present policy.

    All ranks take the numbers of rank 0, so that they choose alike.
    """
    answers = [Rollout(c.prompt_ids, c.answer.response_ids.tolist()) for c in candidates]
    policy, found = copy.copy(run.policy), [(torch.empty(0), 0.0, 1.0)] * len(answers)
    policy.fused = False  # the fused pass rounds differently, which could change the ranking and so a repeated run
    with policy.packed_attention():
        most = run.config.optimizer.micro_batch_tokens
        for part in micro_batches(answers, range(len(answers)), most, policy.device):
            packed = pack(answers, part, device=policy.device)
            values, entropies, _ = policy.score(packed, run.config.rollout.temperature)  # [B, L] twice
            then = [candidates[i].answer.logprobs for i in packed.samples]
            known = torch.nn.utils.rnn.pad_sequence(then, batch_first=True).to(values)
            weights = importance_weights(values, known, packed.mask & ~known.isnan(), mode="truncate", cap=CAP)
            for row, i in enumerate(packed.samples):
                logprobs, entropy, weight = (x[row][packed.mask[row]].float() for x in (values, entropies, weights))
                found[i] = logprobs.cpu(), float(entropy.mean()), float(weight.mean())
    for candidate, facts in zip(candidates, run.once(lambda: found)):
        candidate.logprobs, candidate.entropy, candidate.weight = facts


def likelihoods(candidates: Sequence[Candidate]) -> torch.Tensor:
    """Returns the mean log-probability of a token of each, [N]."""
    return torch.tensor([float(candidate.logprobs.mean()) for candidate in candidates])


def begins_with(response_ids: Sequence[int], prefix_ids: Sequence[int]) -> bool:
    """Tells whether an answer continues from a beginning: only then can it be judged against others that do."""
    return len(response_ids) > len(prefix_ids) and list(response_ids[: len(prefix_ids)]) == list(prefix_ids)


class GroupSampler:
    """Mixes stored answers into the groups of a step."""

    def __init__(self, settings: RhymeSettings, retrodictor: Retrodictor):
        self.settings, self.retrodictor = settings, retrodictor
        self.planned: list[Group] = []
        self.offers: list[Candidate] = []  # of this round, near enough to the policy
        self.spared: list[int] = []  # fresh answers that each planned group leaves out for stored ones
        self.untrained: list[Candidate] = []  # offers of this step that joined no group; retrodiction learns from them

    def plan(self, context: StepContext, groups: list[Group], bank: AnswerBank, worth: Worth) -> None:
        """Lets each group spare as many fresh answers as stored ones can take their places."""
        candidates = [
            Candidate(answer, place, group.prompt_ids, worth(answer))
            for place, group in enumerate(groups)
            for answer in bank.candidates(group.prompt_key, worth)
            if begins_with(answer.response_ids.tolist(), group.prefix_ids)
        ]
        if candidates:
            score_candidates(context.run, candidates)
        self.planned, self.offers = groups, [c for c in candidates if c.weight >= MIN_WEIGHT]
        offered = Counter(offer.place for offer in self.offers)
        share = self.settings.history_ratio / (1 + self.settings.history_ratio)
        sizes = [group.num_samples for group in groups]
        most = [math.floor(round(share * size, 9)) for size in sizes]
        self.spared = [min(most[place], size - 1, offered[place]) for place, size in enumerate(sizes)]
        for group, spared in zip(groups, self.spared):
            group.num_samples -= spared
        context.count("rhyme/candidates", len(candidates))
        context.count("rhyme/spared_answers", sum(self.spared))

    def mix(self, context: StepContext, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the fresh answers, each group followed by the stored ones that join it."""
        groups, useful = by_group(rollouts), []
        for offer in self.offers:
            offer.fresh = groups.get(offer.place, ())
            there = offer.fresh and offer.fresh[0].prompt_key == self.planned[offer.place].prompt_key
            if there and any(r.reward != offer.answer.reward for r in offer.fresh):  # else the group teaches nothing
                useful.append(offer)
        failed = {number for number, fresh in groups.items() if not good_ones(fresh)}
        chosen: dict[int, list[Candidate]] = {number: [] for number in groups}
        for offer in self._ranked(context, useful):
            most = max(self.spared[offer.place], RESCUERS * (offer.place in failed))
            if len(chosen[offer.place]) < most:
                chosen[offer.place].append(offer)
            else:
                self.untrained.append(offer)
        context.count("rhyme/failed_groups", len(failed))
        context.count("rhyme/rescued_groups", sum(bool(chosen[number]) for number in failed))
        context.count("rhyme/stored_answers", sum(map(len, chosen.values())))
        return [r for number, fresh in groups.items() for r in (*fresh, *map(self._as_rollout, chosen[number]))]

    def _ranked(self, context: StepContext, offers: list[Candidate]) -> list[Candidate]:
        """Returns the offers, best first, in the order of rank 0: a network is not the same on unlike CPUs."""
        scores = likelihoods(offers)
        if self.settings.selection == "random":
            scores = torch.tensor([keyed_unit(context.seed, "rhyme random", i) for i in range(len(offers))])
        elif self.settings.selection == "retrodiction" and self.retrodictor.ready and offers:
            scores = self.retrodictor.predict(torch.tensor([offer.features() for offer in offers]))
        order = scores.argsort(descending=True, stable=True).tolist()
        return [offers[i] for i in context.run.once(lambda: order)]

    def _as_rollout(self, offer: Candidate) -> Rollout:
        """Makes a stored answer one of its group; the beginning that the group was given counts as given to it too."""
        asked, start = offer.fresh[0], offer.fresh[0].prefix_len
        return as_rollout(
            offer.answer, asked.prompt_key, asked.prompt_ids, group=offer.place, prefix_len=start,
            logprobs=offer.answer.logprobs[start:].tolist(), merit=None if asked.merit is None else offer.answer.reward,
        )  # fmt: skip

    def look_back(self, context: StepContext) -> None:
        """Lets the network learn what the update did to the offers that were not trained on."""
        if len(offers := self.untrained) >= LEAST:
            features, before = torch.tensor([offer.features() for offer in offers]), likelihoods(offers)
            score_candidates(context.run, offers)
            self.retrodictor.learn(features, likelihoods(offers) - before)
