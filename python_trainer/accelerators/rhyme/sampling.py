"""Two-stage sampling: the bank of stored answers, and which of them join the groups of a step.

Stage 1 finds the stages of earlier runs that rhyme with the present (:mod:`.matching`). In stage 2 the policy scores
the stored answers from those stages and its own recent ones. As many fresh answers are spared as stored ones can take
their places; the best of these join the groups, with truncated importance weights.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from python_trainer.accelerators.base import RunContext, StepContext
from python_trainer.accelerators.rhyme.database import StoredAnswer, prompt_hash
from python_trainer.accelerators.rhyme.replay import DECAY_STEPS, MOST_USES, PER_PROMPT, REST
from python_trainer.accelerators.rhyme.retrodiction import MIN_EXAMPLES, Retrodictor
from python_trainer.accelerators.settings import RhymeSettings
from python_trainer.algorithms.losses import importance_weights
from python_trainer.data import Group, Rollout, by_group, is_right, select_good
from python_trainer.model.packing import micro_batches, pack_rollouts
from rlkernels.sampling.keys import keyed_unit

BANK_SIZE = 8192  # answers
BANK_PER_PROMPT = 16
STAGE_2_ANSWERS = 4  # stored answers of a prompt that stage 2 looks at
RESCUERS = 1  # stored answers that a group without a right fresh answer may get in any case
MAX_IMPORTANCE_WEIGHT = 1.0  # pi / pi_behaviour of each token of a stored answer
MIN_WEIGHT = 0.1  # mean importance weight below which an answer is too far from the policy
Trust = Callable[[StoredAnswer], float]  # in [0, 1]; 0: never use the answer


@dataclass
class BankEntry:
    """A stored answer to a training prompt, the step at which it came into the bank, and its uses in replay."""

    prompt: int  # its index
    answer: StoredAnswer
    born: int
    last_use: int
    uses: int = 0


class AnswerBank:
    """Stored answers by training prompt, best and newest first. Several steps and runs may have given one text."""

    def __init__(self) -> None:
        self.by_prompt: dict[int, list[BankEntry]] = {}

    def __iter__(self) -> Iterator[BankEntry]:
        return (entry for entries in self.by_prompt.values() for entry in entries)

    def __len__(self) -> int:
        return sum(map(len, self.by_prompt.values()))

    def add(self, answers: Iterable[tuple[int, StoredAnswer]], step: int) -> None:
        """Add (prompt index, answer) pairs at a step of this run, equally good ones in their order."""
        self.fill([*self, *(BankEntry(prompt, answer, step, step) for prompt, answer in answers)])

    def fill(self, entries: Sequence[BankEntry]) -> None:
        """Replace all entries by these. If they are too many the oldest go."""
        self.by_prompt = {}
        for entry in sorted(entries, key=lambda entry: (-entry.answer.reward, -entry.born)):
            of_prompt = self.by_prompt.setdefault(entry.prompt, [])
            if len(of_prompt) < BANK_PER_PROMPT:
                of_prompt.append(entry)
        if len(self) > BANK_SIZE:
            self.fill(sorted(self, key=lambda entry: -entry.born)[:BANK_SIZE])

    def candidates(self, prompt: int, trust: Trust) -> list[StoredAnswer]:
        """Return a few different answers of a prompt that are trusted, the most trusted first."""
        trusted = [entry for entry in self.by_prompt.get(prompt, ()) if trust(entry.answer) > 0]
        trusted.sort(key=lambda entry: -trust(entry.answer))
        return [entry.answer for entry in different(trusted)[:STAGE_2_ANSWERS]]

    def replayable(self, step: int, runs: Collection[int]) -> list[BankEntry]:
        """Return the best and newest answers of these runs to each prompt that may be trained on again."""
        candidates: list[BankEntry] = []
        for entries in self.by_prompt.values():
            young = [entry for entry in entries if entry.answer.run_id in runs and step - entry.born <= DECAY_STEPS]
            candidates += different(young)[:PER_PROMPT]
        return [entry for entry in candidates if entry.uses < MOST_USES and step - entry.last_use >= REST]

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [vars(entry) | {"answer": vars(entry.answer)} for entry in self]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fill([BankEntry(**row | {"answer": StoredAnswer(**row["answer"])}) for row in state["entries"]])


def different(entries: Iterable[BankEntry]) -> list[BankEntry]:
    """Return the first entry of each text."""
    first: dict[str, BankEntry] = {}
    for entry in entries:
        first.setdefault(entry.answer.text, entry)
    return list(first.values())


def encode_again(answers: Sequence[StoredAnswer], run: RunContext, fingerprint: str) -> list[StoredAnswer]:
    """Encode the texts of other tokenizers by the policy's; drop texts that do not survive encoding and decoding.

    Nobody sampled the new tokens, so their log-probabilities are unknown (NaN) and they stay out of importance ratios.
    """
    policy = run.policy
    prompts = {prompt_hash(example.prompt): example.prompt for example in run.task.train}
    usable = []
    for answer in answers:
        if answer.tokenizer != fingerprint:
            ids = policy.tokenizer(answer.text, add_special_tokens=False)["input_ids"]
            if not ids or policy.decode(ids) != answer.text:
                continue
            if answer.finished:
                ids = [*ids, *policy.ending(prompts.get(answer.prompt_key, ""))]
            answer.response_ids = torch.tensor(ids, dtype=torch.int32)
            answer.tokenizer = fingerprint
            answer.logprobs = torch.full((len(ids),), math.nan)
        elif answer.response_ids.numel() and int(answer.response_ids.max()) >= len(policy.tokenizer):
            continue  # a damaged or malicious row: no policy has an embedding for these
        usable.append(answer)
    return usable


def score_again(answers: Sequence[StoredAnswer], run: RunContext) -> list[tuple[int, StoredAnswer]]:
    """Score answers to the training prompts; return (prompt index, answer) of the right ones, with new rewards.

    Where two examples have one prompt, each scores the answers by its own columns. If the task has no right and wrong,
    all answers that the run could give stay, as each was better than the mean of its group. Reward functions get as
    many answers in a call as in a step, which their time limit assumes.
    """
    rollout = run.config.rollout
    by_hash: dict[str, list[StoredAnswer]] = {}
    for answer in answers:
        if len(answer.response_ids) <= rollout.max_completion_length:
            by_hash.setdefault(answer.prompt_key, []).append(answer)
    hashes = enumerate(prompt_hash(example.prompt) for example in run.task.train)
    pairs = [(index, replace(answer)) for index, key in hashes for answer in by_hash.get(key, ())]
    right = []
    batch_size = rollout.prompts_per_step * rollout.num_generations
    for first in range(0, len(pairs), batch_size):
        batch = pairs[first : first + batch_size]
        examples = [run.task.train[index] for index, _ in batch]
        texts = [answer.text for _, answer in batch]
        ids = [answer.response_ids.tolist() for _, answer in batch]
        scores = run.score_stored(examples, texts, ids)
        for (index, answer), reward, accuracy in zip(batch, scores.total, scores.accuracy):
            answer.reward = reward
            if is_right(accuracy) or scores.filter_scores is not None:
                right.append((index, answer))
    return right


def as_rollout(answer: StoredAnswer, prompt_index: int, prompt_ids: Sequence[int], **fields: Any) -> Rollout:
    """Return a stored answer to this training prompt as a rollout; ``fields`` are further ones of it."""
    return Rollout(
        prompt_ids,
        answer.response_ids.tolist(),
        finish_reason="stop" if answer.finished else "length",
        prompt_index=prompt_index,
        text=answer.text,
        reward=answer.reward,
        accuracy=1.0,
        importance_cap=MAX_IMPORTANCE_WEIGHT,
        **fields,
    )


@dataclass
class Candidate:
    """A stored answer that may join a group, as the present policy sees it."""

    answer: StoredAnswer
    group: int  # index of its group in the step
    prompt_ids: Sequence[int]
    trust: float  # C_rhyme of its stage or, in this run, how recent it is, in (0, 1]
    logprobs: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # float32 [tokens]
    entropy: float = 0.0  # mean over tokens
    weight: float = 1.0  # mean truncated importance weight
    fresh: Sequence[Rollout] = ()  # answers of its group, after generation

    def features(self) -> list[float]:
        """Return the input of the retrodiction network."""
        change = (self.logprobs - self.answer.logprobs)[~self.answer.logprobs.isnan()]
        success_rate = sum(rollout.accuracy for rollout in self.fresh) / max(len(self.fresh), 1)
        return [
            float(self.logprobs.mean()),
            float(self.logprobs.min()),
            self.entropy,
            self.weight,
            self.trust,
            success_rate,
            float(change.mean()) if len(change) else 0.0,
            math.log(len(self.logprobs)),
            self.answer.reward,
        ]


@torch.no_grad()
def score_candidates(run: RunContext, candidates: Sequence[Candidate]) -> None:
    """Fill in log-probabilities, entropies and importance weights, by one forward pass of the present policy.

    All ranks take the numbers of rank 0, so that they choose alike.
    """
    rollouts = [Rollout(c.prompt_ids, c.answer.response_ids.tolist()) for c in candidates]
    scores = [(torch.empty(0), 0.0, 1.0)] * len(rollouts)  # log-probabilities, mean entropy, mean weight
    policy = copy.copy(run.policy)
    policy.fused = False  # the fused pass rounds differently, which could change the ranking and so a repeated run
    with policy.packed_attention():
        limit = run.config.optimizer.micro_batch_tokens
        for part in micro_batches(rollouts, range(len(rollouts)), limit, policy.device):
            packed = pack_rollouts(rollouts, part, device=policy.device)
            logprobs, entropies, _ = policy.token_logprobs(packed, run.config.rollout.temperature)  # [B, L] twice
            stored = [candidates[i].answer.logprobs for i in packed.samples]
            behaviour = torch.nn.utils.rnn.pad_sequence(stored, batch_first=True).to(logprobs)
            known = packed.mask & ~behaviour.isnan()
            weights = importance_weights(logprobs, behaviour, known, mode="truncate", cap=MAX_IMPORTANCE_WEIGHT)
            for row, i in enumerate(packed.samples):
                mask = packed.mask[row]
                mean_entropy = float(entropies[row][mask].float().mean())
                mean_weight = float(weights[row][mask].float().mean())
                scores[i] = logprobs[row][mask].float().cpu(), mean_entropy, mean_weight
    for candidate, score in zip(candidates, run.on_rank0(lambda: scores)):
        candidate.logprobs, candidate.entropy, candidate.weight = score


def likelihoods(candidates: Sequence[Candidate]) -> torch.Tensor:
    """Return the mean log-probability of a token of each, [N]."""
    return torch.tensor([float(candidate.logprobs.mean()) for candidate in candidates])


def begins_with(response_ids: Sequence[int], prefix_ids: Sequence[int]) -> bool:
    """Return whether an answer continues a prefix: only then can it be compared with others that do."""
    return len(response_ids) > len(prefix_ids) and list(response_ids[: len(prefix_ids)]) == list(prefix_ids)


class GroupSampler:
    """Mix stored answers into the groups of a step.

    Attributes:
        offers: candidates of this round that are near enough to the policy.
        spared: how many fresh answers each planned group leaves out for stored ones.
        untrained: offers of this step that joined no group; retrodiction learns from them.
    """

    def __init__(self, settings: RhymeSettings, retrodictor: Retrodictor):
        self.settings = settings
        self.retrodictor = retrodictor
        self.planned: list[Group] = []
        self.offers: list[Candidate] = []
        self.spared: list[int] = []
        self.untrained: list[Candidate] = []

    def plan(self, context: StepContext, groups: list[Group], bank: AnswerBank, trust: Trust) -> None:
        """Let each group spare as many fresh answers as stored ones can take their places."""
        candidates = [
            Candidate(answer, number, group.prompt_ids, trust(answer))
            for number, group in enumerate(groups)
            for answer in bank.candidates(group.prompt_index, trust)
            if begins_with(answer.response_ids.tolist(), group.prefix_ids)
        ]
        if candidates:
            score_candidates(context.run, candidates)
        self.planned = groups
        self.offers = [candidate for candidate in candidates if candidate.weight >= MIN_WEIGHT]
        offered = Counter(offer.group for offer in self.offers)
        share = self.settings.history_ratio / (1 + self.settings.history_ratio)
        self.spared = []
        for number, group in enumerate(groups):
            limit = math.floor(round(share * group.num_generations, 9))
            spared = min(limit, group.num_generations - 1, offered[number])
            group.num_generations -= spared
            self.spared.append(spared)
        context.count("rhyme/candidates", len(candidates))
        context.count("rhyme/spared_answers", sum(self.spared))

    def mix(self, context: StepContext, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the fresh answers, each group followed by the stored ones that join it."""
        groups = by_group(rollouts)
        failed = {number for number, fresh in groups.items() if not select_good(fresh)}
        joining: dict[int, list[Candidate]] = {number: [] for number in groups}
        for offer in self._ranked(context, self._useful_offers(groups)):
            limit = max(self.spared[offer.group], RESCUERS if offer.group in failed else 0)
            if len(joining[offer.group]) < limit:
                joining[offer.group].append(offer)
            else:
                self.untrained.append(offer)
        context.count("rhyme/failed_groups", len(failed))
        context.count("rhyme/rescued_groups", sum(bool(joining[number]) for number in failed))
        context.count("rhyme/stored_answers", sum(map(len, joining.values())))
        mixed: list[Rollout] = []
        for number, fresh in groups.items():
            mixed += [*fresh, *map(self._as_rollout, joining[number])]
        return mixed

    def _useful_offers(self, groups: Mapping[int, Sequence[Rollout]]) -> list[Candidate]:
        """Return the offers whose reward differs from one of their group: others have no advantage."""
        useful = []
        for offer in self.offers:
            offer.fresh = groups.get(offer.group, ())
            generated = offer.fresh and offer.fresh[0].prompt_index == self.planned[offer.group].prompt_index
            if generated and any(rollout.reward != offer.answer.reward for rollout in offer.fresh):
                useful.append(offer)
        return useful

    def _ranked(self, context: StepContext, offers: list[Candidate]) -> list[Candidate]:
        """Return the offers, best first, in the order of rank 0: networks trained on different CPUs differ."""
        scores = likelihoods(offers)
        if self.settings.selection == "random":
            scores = torch.tensor([keyed_unit(context.seed, "rhyme random", i) for i in range(len(offers))])
        elif self.settings.selection == "retrodiction" and self.retrodictor.ready and offers:
            scores = self.retrodictor.predict(torch.tensor([offer.features() for offer in offers]))
        order = scores.argsort(descending=True, stable=True).tolist()
        return [offers[i] for i in context.run.on_rank0(lambda: order)]

    def _as_rollout(self, offer: Candidate) -> Rollout:
        """Return a stored answer as one of its group; a prefix of the group counts as given to the answer too."""
        fresh = offer.fresh[0]
        return as_rollout(
            offer.answer,
            fresh.prompt_index,
            fresh.prompt_ids,
            group=offer.group,
            prefix_len=fresh.prefix_len,
            logprobs=offer.answer.logprobs[fresh.prefix_len :].tolist(),
            filter_score=None if fresh.filter_score is None else offer.answer.reward,
        )

    def look_back(self, context: StepContext) -> None:
        """Let the network learn how the update changed the likelihood of offers that were not trained on."""
        offers = self.untrained
        if len(offers) >= MIN_EXAMPLES:
            features = torch.tensor([offer.features() for offer in offers])
            before = likelihoods(offers)
            score_candidates(context.run, offers)
            self.retrodictor.learn(features, likelihoods(offers) - before)
