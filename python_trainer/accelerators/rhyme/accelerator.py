"""RhymeRL: stored answers from stages of earlier training that rhyme with the present take the place of fresh ones.

Changes the objective: part of each group was sampled by other policies and enters the loss with truncated importance
weights. A step goes like this:

1. Execution matching (plan): the last steps of this run are aligned with every earlier run in the retrospective
   database; the most similar stages that can be trusted are kept (stage 1).
2. Stage 2: the current policy looks at the good stored answers from those stages, and from earlier steps of this run.
   As many fresh answers are spared as stored ones that it might have written can take their places.
3. The best of these join the groups (collect), also where every fresh answer failed.
4. The step and its good answers go into the sample bank and the database.

docs/rhyme.md has the method, its settings and what was measured.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_trainer.accelerators.base import Accelerator, StepContext
from python_trainer.accelerators.rhyme.attempts import begin_run, resume_run
from python_trainer.accelerators.rhyme.bank import SampleBank, for_tokenizer
from python_trainer.accelerators.rhyme.counts import Counts
from python_trainer.accelerators.rhyme.evidence import Evidence
from python_trainer.accelerators.rhyme.judging import judged
from python_trainer.accelerators.rhyme.matching import Curve, Matches, curve_of, rhyming_stages
from python_trainer.accelerators.rhyme.ranking import Candidate, Ranking
from python_trainer.accelerators.rhyme.recording import GatheredStep, Shown, right_answers, run_facts
from python_trainer.accelerators.rhyme.records import StoredAnswer, prompt_key
from python_trainer.accelerators.rhyme.settings import RhymeSettings
from python_trainer.data import Group, Rollout, by_group, good_ones
from python_trainer.errors import tell
from python_trainer.model.loading import tokenizer_fingerprint

if TYPE_CHECKING:
    from python_trainer.accelerators.base import RunContext
    from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase

FIRST_STEPS = 2  # of a run, before any stage is trusted


class Rhyme(Accelerator):
    """A sample bank of good answers, and where in the history this run is."""

    settings: RhymeSettings
    numbers_prompts = False

    def __init__(self, settings: RhymeSettings):
        super().__init__(settings)
        self.database: RetrospectiveDatabase | None = None
        if settings.database is not None:
            from python_trainer.accelerators.rhyme import database  # imports sqlalchemy

            self.database = database.RetrospectiveDatabase(settings.database, max_bytes=settings.max_database_bytes)
        self.folder = Path()  # of this run
        self.run_id: int | None = None  # None until the first step; 0 without a database
        self.created = 0.0  # when it was added there; ids are used again
        self.records = self.database is not None and settings.record
        self.read_from: str | None = None  # name of the database that was read at the first step
        self.fingerprint = ""
        self.rules: dict[str, Any] | None = None  # by which the answers in the bank were judged
        self.curve = curve_of(0, [])
        self.history: list[Curve] = []
        self.earlier_tokens = 0  # what the runs of that history generated
        self.bank = SampleBank(settings.bank_per_prompt, settings.bank_size)
        self.matches = Matches([], threshold=settings.threshold, lookahead=settings.lookahead)
        self.ranking = Ranking(settings)
        self.offers: list[Candidate] = []  # of this step, near enough to the policy
        self.evidence: Evidence | None = None  # of the offers; None: there are none
        self.planned: list[Group] = []
        self.spared: list[int] = []  # of each planned group: fresh answers that were left out for stored ones
        self.counts = Counts()
        self.gathered = GatheredStep()
        self.warned = False  # of rewards outside of their range

    def begin(self, run: "RunContext") -> None:
        self.folder = run.output_dir

    def _begin(self, context: StepContext) -> None:
        """At the first step of a process: who this run is, and what there is to learn from."""
        if not self.fingerprint:
            self.fingerprint = tokenizer_fingerprint(context.policy.tokenizer)
            rules = dict(context.rules)
            if self.run_id is not None and self.rules != rules:  # resumed with other rewards
                self.bank.fill(judged(list(self.bank), context))
            self.rules = rules
        if self.run_id is None:
            self.run_id = 0
            if self.database is not None:
                if self.records:
                    facts = run_facts(context, self.fingerprint)
                    self.run_id, self.created = begin_run(self.database, facts, self.folder)
                self._read_history(context)
        elif self.database is not None and self._refresh_due(context.step):
            self._read_history(context)

    def _refresh_due(self, step: int) -> bool:
        every = self.settings.refresh_steps
        return every > 0 and step % every == 0

    def _read_history(self, context: StepContext) -> None:
        """Good answers to the prompts of this task, and the trajectories of the runs that found them."""
        assert self.database is not None
        self.read_from = self.database.name
        keys = [prompt_key(example.prompt) for example in context.task.train]
        found = self.database.samples(prompt_keys=keys, limit=self.settings.bank_size, without_run=self.run_id)
        news = [s for s in for_tokenizer(found, context.policy.tokenizer, self.fingerprint) if not self.bank.knows(s)]
        for sample in sorted(judged(news, context), key=lambda s: -s.reward):
            self.bank.add(sample, fresh=False)
        runs = sorted({sample.run_id for sample in self.bank} - {self.run_id})
        low, high = self.settings.reward_range
        trajectories = {run: self.database.trajectory(run) for run in runs}
        self.history = [curve_of(run, records, low, high) for run, records in trajectories.items()]
        self.earlier_tokens = sum(record.generated_tokens for records in trajectories.values() for record in records)

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        settings = self.settings
        with timed(context, "database"):
            self._begin(context)
        with timed(context, "similarity"):
            stages = []
            if len(self.curve) >= FIRST_STEPS:
                stages = rhyming_stages(
                    self.curve.last(settings.window),
                    self.history,
                    window=settings.window,
                    fraction=settings.fraction,
                    reward_weight=settings.reward_weight,
                    reward_scale=settings.reward_scale,
                )
            self.matches = Matches(stages, threshold=settings.threshold, lookahead=settings.lookahead)
        if context.step != self.counts.step:  # not a further round of dynamic sampling
            self.counts = Counts(context.step)
        self.planned = groups
        candidates = [c for place in range(len(groups)) for c in self._candidates(place, context.step)]
        with timed(context, "stage2"):
            self._look(context, candidates)
        offered = Counter(offer.place for offer in self.offers)
        share = settings.history_ratio / (1 + settings.history_ratio)
        self.spared = []
        for place, group in enumerate(groups):
            size = group.num_samples
            self.spared.append(min(round(share * size), size - 1, offered[place]))
            group.num_samples -= self.spared[-1]
        self.counts.with_candidates += len({candidate.place for candidate in candidates})
        context.telemetry |= {
            "rhyme/best_match": stages[0].score if stages else 0.0,
            "rhyme/trusted_stages": len(self.matches.trusted),
            "rhyme/bank": len(self.bank),
        }
        return groups

    def _candidates(self, place: int, step: int) -> list[Candidate]:
        """The stored answers to the prompt of a planned group that stage 2 looks at."""
        group = self.planned[place]
        key = prompt_key(group.example.prompt)
        found = self.bank.candidates(key, lambda sample: self._worth(sample, step), self.settings.candidates)
        made = []
        for sample in found:
            own, match = sample.run_id == self.run_id, self.matches.score(sample.run_id, sample.step)
            if begins_with(sample.response_ids, list(group.prefix_ids)):
                age = float(step - sample.step) if own else 0.0
                made.append(Candidate(sample, group.prompt_ids, place, match, own, age))
        return made

    def _look(self, context: StepContext, candidates: list[Candidate]) -> None:
        """Keeps those that the present policy might have written."""
        self.offers, self.evidence = [], None
        if not candidates:
            return
        evidence = self.ranking.examine(context, candidates)
        near = (evidence.weights >= self.settings.min_weight).nonzero()[:, 0].tolist()
        self.counts.candidates += len(candidates)
        self.counts.near += len(near)
        self.counts.weight += float(evidence.weights.sum())
        if near:
            self.offers, self.evidence = [candidates[i] for i in near], evidence.of(near)

    def _worth(self, sample: StoredAnswer, step: int) -> float:
        """How far a stored answer is to be trusted, in [0, 1]; 0: not a candidate."""
        if sample.run_id == self.run_id:
            return max(1 - (step - sample.step) / (self.settings.max_staleness + 1), 0.0)
        return self.matches.score(sample.run_id, sample.step)

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        groups = by_group(rollouts)
        with timed(context, "stage2"):
            chosen = self._choose(context, groups)
        mixed = []
        for number, fresh in groups.items():
            mixed += [*fresh, *(self._as_rollout(candidate) for candidate in chosen.get(number, ()))]
        with timed(context, "database"):
            self._remember(context, list(groups.values()))
        failed, counts = {number for number, fresh in groups.items() if not good_ones(fresh)}, self.counts
        counts.groups += len(groups)
        counts.fresh += len(rollouts)
        counts.stored += len(mixed) - len(rollouts)
        counts.spared += sum(self.spared)
        counts.failed += len(failed)
        counts.rescued += len(failed & chosen.keys())
        context.telemetry |= counts.metrics()
        return mixed

    def _choose(self, context: StepContext, groups: dict[int, list[Rollout]]) -> dict[int, list[Candidate]]:
        """The stored answers that join each group."""
        numbers = self._numbers(groups)
        useful = []
        for i, offer in enumerate(self.offers):
            if offer.place not in numbers:
                continue
            offer.group = numbers[offer.place]
            offer.fresh = groups[offer.group]
            given = offer.fresh[0].response_ids[: offer.fresh[0].prefix_len]
            differs = any(rollout.reward != offer.sample.reward for rollout in offer.fresh)
            if differs and begins_with(offer.sample.response_ids, given):  # otherwise the group teaches nothing
                useful.append(i)
        if not useful or self.evidence is None:
            return {}
        accuracy = float(self.curve.rewards[-1]) if len(self.curve) else 0.0
        candidates = [self.offers[i] for i in useful]
        ranking = self.ranking.rank(context, candidates, self.evidence.of(useful), groups, accuracy)
        chosen: dict[int, list[Candidate]] = {}
        for i in ranking.argsort(descending=True, stable=True).tolist():
            candidate = candidates[i]
            failed = self.settings.rescue and not good_ones(candidate.fresh)
            taken = chosen.setdefault(candidate.group, [])
            if len(taken) < max(self.spared[candidate.place], int(failed)):
                taken.append(candidate)
        chosen = {number: taken for number, taken in chosen.items() if taken}
        rivals = sum(candidate.group in chosen for candidate in candidates)
        self.counts.passed_over += rivals - sum(map(len, chosen.values()))
        return chosen

    def _numbers(self, groups: dict[int, list[Rollout]]) -> dict[int, int]:
        """Place of a planned group -> number of its fresh answers; a prompt may come twice, others may drop groups."""
        of_prompt: dict[int, list[int]] = {}
        for number, fresh in groups.items():
            of_prompt.setdefault(fresh[0].prompt_key, []).append(number)
        waiting = {key: iter(numbers) for key, numbers in of_prompt.items()}
        found = {i: next(waiting.get(group.prompt_key, iter(())), None) for i, group in enumerate(self.planned)}
        return {place: number for place, number in found.items() if number is not None}

    def _as_rollout(self, candidate: Candidate) -> Rollout:
        """A stored answer as one of its group; what the group was given counts as given to it too."""
        sample, asked = candidate.sample, candidate.fresh[0]
        return Rollout(
            prompt_key=asked.prompt_key,
            group=candidate.group,
            prompt_ids=asked.prompt_ids,
            response_ids=list(sample.response_ids),
            prefix_len=asked.prefix_len,
            logprobs=list(sample.logprobs[asked.prefix_len :]),
            finish_reason="stop" if sample.finished else "length",
            text=sample.text,
            reward=sample.reward,
            accuracy=1.0,
            merit=None if asked.merit is None else sample.reward,
            policy_version=sample.policy_version,
            importance_cap=self.settings.importance_cap,
        )

    def _remember(self, context: StepContext, groups: list[list[Rollout]]) -> None:
        """The step goes into this run's trajectory, its right answers into the bank, all of it into the database."""
        if len(self.curve) and int(self.curve.steps[-1]) == context.step:  # a further round
            self.curve = self.curve.first(len(self.curve) - 1)
        kept = right_answers(context, groups, self.run_id or 0, self.fingerprint)
        record, answers = self.gathered.add(context, groups, kept)
        self._check_range(record.reward)
        self.curve = self.curve.extended(record, *self.settings.reward_range)
        for sample in kept:
            self.bank.add(sample, fresh=True)
        if self.database is not None and self.records:
            self.database.add_step(self.run_id or 0, record, answers)

    def _check_range(self, reward: float) -> None:
        """Beyond it all rewards are alike in C_rhyme, which nobody would notice."""
        low, high = self.settings.reward_range
        if not self.warned and not low <= reward <= high:
            self.warned = True
            tell(
                f"note: the mean reward of this step is {reward:.4g}, outside of accelerators.rhyme.reward_range "
                f"[{low:g}, {high:g}]: runs are compared as if it were at its edge"
            )

    def summary(self) -> dict[str, Any]:
        """The runs that answers were taken from, and what those had cost."""
        return {"earlier_runs": len(self.history), "earlier_generated_tokens": self.earlier_tokens}

    def state_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "created": self.created,
            "rules": self.rules,
            "read_from": self.read_from,
            "curve": dict(vars(self.curve)),
            "history": [dict(vars(curve)) for curve in self.history],
            "earlier_tokens": self.earlier_tokens,
            "bank": self.bank.state_dict(),
            "ranking": self.ranking.state_dict(),
            "shown": None if self.gathered.shown is None else self.gathered.shown._asdict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id, self.created, self.rules = state["run_id"], state["created"], state.get("rules")
        self.curve, self.history = Curve(**state["curve"]), [Curve(**curve) for curve in state["history"]]
        self.earlier_tokens = state["earlier_tokens"]
        self.bank.load_state_dict(state["bank"])
        self.ranking.load_state_dict(state["ranking"])
        self.gathered.shown = Shown(**shown) if (shown := state.get("shown")) is not None else None
        if self.database is None or self.run_id is None:
            return
        # checkpoints of November 2026 and before do not say what was read
        self.read_from, name = state.get("read_from", self.database.name), self.database.name
        lost = "it is read only every accelerators.rhyme.refresh_steps, where these are above 0"
        if self.records:
            done = int(self.curve.steps[-1]) if len(self.curve) else 0
            self.records = resume_run(self.database, self.run_id, done, created=self.created, lost=lost)
        elif self.read_from != name:
            tell(f"note: this run was begun without {name}: {lost}")


def begins_with(response_ids: list[int], prefix_ids: list[int]) -> bool:
    """Whether an answer goes on from a beginning: only then can it be judged against others that do."""
    return len(response_ids) > len(prefix_ids) and response_ids[: len(prefix_ids)] == prefix_ids


@contextmanager
def timed(context: StepContext, what: str) -> Iterator[None]:
    """Adds the seconds of a stretch to the metric ``time/rhyme/WHAT_s``."""
    start = time.perf_counter()
    yield
    name = f"time/rhyme/{what}_s"
    context.telemetry[name] = context.telemetry.get(name, 0.0) + time.perf_counter() - start
