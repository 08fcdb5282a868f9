"""RhymeRL: training guided by history, where right answers are rare.

Changes the objective: answers of earlier policies are trained on. In the order in which history comes in:

1. Right answers of a clearly better earlier run are trained on first, by themselves (:mod:`.replay`).
2. Execution matching: the last steps of this run are compared with the stages of earlier runs (:mod:`.matching`).
3. Two-stage sampling: stored answers from the stages that rhyme, and recent ones of this run, take the places of fresh
   ones in their groups (:mod:`.sampling`), above all where every fresh answer failed.
4. Replay: right answers to prompts that are hardly ever answered right are trained on again (:mod:`.replay`).

All of it waits until it is known that right answers are rare, or that an earlier run was better. Otherwise training is
what it is without rhyme, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.rhyme import replay, sampling
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StoredAnswer, prompt_key
from python_trainer.accelerators.rhyme.matching import Curve, curve_of, find_rhyming_stages, match_score
from python_trainer.accelerators.rhyme.recording import OWN, RunRecorder
from python_trainer.accelerators.rhyme.retrodiction import Retrodictor
from python_trainer.accelerators.settings import RhymeSettings
from python_trainer.data import Group, Rollout, by_group, fresh_ones, merits

MOST = 8192  # answers that are read from the database
RUNS = 8  # whose answers are read, the newest
LOOKS = 12  # steps in which earlier runs may turn out to be better
FIRST_STEPS = 2  # of a run, before any stage is trusted
REHEARSED = 4  # answers of better runs to a prompt that are trained on first, the newest
REHEARSALS = 3  # how often they are
REHEARSAL_SHARE = 0.2  # of the answers that the run is to generate: most answers in all these updates
REHEARSAL_BATCH = 16  # answers in an update on nothing else; those to one prompt stay together
REPLAY_SHARE = 0.5  # replayed tokens for each of the fresh answers of the step that teach something, at most
PARTS = "recorder", "bank", "rates", "retrodictor"  # whose states are in a checkpoint
FACTS = "active", "settled", "judged", "better", "shares", "rules"


def read_runs(database: RetrospectiveDatabase, keys: list[str], own: int) -> tuple[list[Curve], list[StoredAnswer]]:
    """Returns the newest runs but this one, and their right answers to these prompts, best and newest first."""
    found = database.samples(prompt_keys=keys, limit=MOST, without_run=own)
    newest = sorted({answer.run_id for answer in found})[-RUNS:]
    curves = [curve_of(run_id, database.trajectory(run_id)) for run_id in newest]
    return curves, [answer for answer in found if answer.run_id in newest]


def reward_rules(config: Any) -> dict[str, Any]:
    """Returns the settings that decide the reward of an answer."""
    longest, cache = config.rollout.max_completion_length, config.algorithm.overlong_cache
    return {"task": config.task.model_dump(mode="json"), "longest": longest, "overlong_cache": cache}


class Rhyme(Accelerator):
    """Success rates of the prompts, a bank of right answers, and where in the history this run is."""

    settings: RhymeSettings

    def __init__(self, settings: RhymeSettings):
        super().__init__(settings)
        self.recorder = RunRecorder(settings)
        self.earlier: list[Curve] = []  # runs in the database when this one began
        self.earlier_answers: list[StoredAnswer] = []  # their right ones, while they are of use
        self.bank, self.retrodictor, self.rates = sampling.AnswerBank(), Retrodictor(), replay.SuccessRates(0)
        self.groups = sampling.GroupSampler(settings, self.retrodictor)
        self.active = False  # whether history is used: right answers are rare, or an earlier run is better
        self.better: list[int] = []  # earlier runs that are clearly better than this one
        self.settled = False  # whether it is known which ones are, or does not matter any more
        self.shares: dict[str, float] = {}  # of right answers at the last visit to each prompt, while runs are compared
        self.judged = True  # whether answers are right or wrong
        self.rules: dict[str, Any] = {}  # by which the answers in the bank were judged

    def begin(self, run: RunContext) -> None:
        self.recorder.begin(run)
        self.rates, self.rules = replay.SuccessRates(len(run.prompts)), reward_rules(run.config)
        if self.settings.database is not None:
            keys, own = [prompt_key(example.prompt) for example in run.task.train], self.recorder.run_id
            self.earlier, self.earlier_answers = run.once(lambda: read_runs(self.recorder.database, keys, own))

    def before_step(self, context: StepContext) -> list[list[Rollout]]:
        if self.rules != (rules := reward_rules(context.run.config)):  # resumed with other rewards
            self.rules = rules
            self.bank.fill([])
        self.groups.untrained = []
        self.rates.advance(context.step)
        self.active = self.active or self.rates.rare(self.settings.rare_share) is True
        if self.settled and not self.active and self.rates.rare(self.settings.rare_share) is False:
            self.earlier_answers = []  # none of them will be used
        context.telemetry["rhyme/replayed_answers"] = 0.0
        return [] if self.settled or context.step == 1 else self._rehearse(context)

    def _rehearse(self, context: StepContext) -> list[list[Rollout]]:
        """Finds out whether an earlier run is clearly better -> batches of its right answers."""
        config, rollout = context.run.config, context.run.config.rollout
        if rollout.num_generations > 1 and self.judged:
            self.better = [run.run_id for run in self.earlier if replay.clearly_better(run.shares, self.shares)]
        self.settled = bool(self.better) or context.step > LOOKS or not self.earlier
        if not self.better:
            return []
        self.active = True
        self._adopt(context)
        groups = []
        for entries in self.bank.by_prompt.values():
            theirs = [entry for entry in entries if entry.answer.run_id in self.better]
            newest = sorted(theirs, key=lambda entry: (-entry.answer.run_id, -entry.answer.step))
            if theirs:
                groups.append([self._alone(e, context, 0.5) for e in sampling.different(newest)[:REHEARSED]])
        batches = replay.in_batches(groups, REHEARSAL_BATCH, REHEARSALS, context.seed)
        most = REHEARSAL_SHARE * (config.max_steps * rollout.prompts_per_step * rollout.num_generations)
        batches = [batch for batch, so_far in zip(batches, accumulate(map(len, batches))) if so_far <= most]
        context.count("rhyme/rehearsed_answers", sum(map(len, batches)))
        for cost in ("tokens", "seconds"):
            spent = sum(getattr(run, cost) for run in self.earlier if run.run_id in self.better)
            context.count(f"rhyme/earlier_{cost}", spent)
        return batches

    def _adopt(self, context: StepContext) -> None:
        """Moves the answers of earlier runs that may be used into the bank, as this run judges them."""
        ours = sampling.encode_again(self.earlier_answers, context.run, self.recorder.fingerprint)
        self.bank.add(sampling.judge_again(ours, context.run), context.step)
        self.earlier_answers = []

    def _alone(self, entry: sampling.BankEntry, context: StepContext, rate: float) -> Rollout:
        """Makes an answer a group of its own, judged against the rate of its prompt."""
        answer, logprobs = entry.answer, entry.answer.logprobs.tolist()
        if answer.run_id in self.better:  # they would weigh those down from which there is most to learn
            logprobs = [float("nan")] * len(logprobs)
        prompt_ids = context.run.prompts[entry.prompt]
        return sampling.as_rollout(answer, entry.prompt, prompt_ids, logprobs=logprobs, expected=rate)

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        if not self.active:
            return groups
        if self.earlier_answers:
            self._adopt(context)
        stages = []
        if len(self.recorder.steps) >= FIRST_STEPS:
            query = curve_of(OWN, self.recorder.steps)
            stages = find_rhyming_stages(query, self.earlier, self.settings.fraction)
        trusted = [stage for stage in stages if stage.score >= self.settings.threshold]
        best = stages[0].score if stages else 0.0
        context.telemetry |= {"rhyme/best_match": best, "rhyme/trusted_stages": len(trusted)}
        context.telemetry["rhyme/bank"] = len(self.bank)

        def worth(answer: StoredAnswer) -> float:
            if answer.run_id == OWN:
                return max(1 - (context.step - answer.step) / (self.settings.max_staleness + 1), 0.0)
            return match_score(trusted, answer.run_id, answer.step)

        self.groups.plan(context, groups, self.bank, worth)
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        self.recorder.collect(context, rollouts)
        whole = list(by_group(fresh_ones(rollouts)).values())
        judged = self.judged and all(answer.merit is None for answer in rollouts)
        if self.judged and not judged and not self.active:
            context.run.note(
                "rhyme: no answer is right or wrong in this task, so history is not used; "
                "accelerators.rhyme.rare_share=0 uses it all the same"
            )
        self.judged = judged
        mixed = self.groups.mix(context, rollouts) if self.active else rollouts
        if not self.judged or context.run.config.rollout.num_generations == 1:
            return mixed
        self._count(context, whole)
        first = 1 + max((rollout.group for rollout in rollouts), default=-1)
        return mixed + [replace(r, group=first + i) for i, r in enumerate(self._replay(context, whole))]

    def _count(self, context: StepContext, groups: Sequence[list[Rollout]]) -> None:
        """Counts right answers, and decides whether they are rare once enough groups were seen."""
        least = self.settings.rare_share
        before = self.rates.rare(least)
        self.rates.add(groups)
        if self.earlier and not self.settled:
            for group in groups:
                key = prompt_key(context.run.task.train[group[0].prompt_key].prompt)
                self.shares[key] = sum(answer.accuracy > 0.5 for answer in group) / len(group)
        rare = self.rates.rare(least)
        if before is None and rare is not None and not self.active:
            found = f"{self.rates.failed} of the first {replay.FIRST_GROUPS} groups had no right answer"
            use = "right answers are rare, history is used" if rare else f"a share below {least:g}, history is not used"
            context.run.note(f"rhyme: {found}: {use}")
            self.active = rare
            if not rare:
                self.bank.fill([])

    def _replay(self, context: StepContext, groups: Sequence[list[Rollout]]) -> list[Rollout]:
        """Takes right answers again to prompts that are answered right less than once in a group, least used first."""
        if not self.active:
            return []
        size = context.run.config.rollout.num_generations
        teaching = sum(len(answer.ids) for group in groups if len(set(merits(group))) > 1 for answer in group)
        tokens, taken = REPLAY_SHARE * teaching, []
        entries = self.bank.replayable(context.step, {OWN, *self.better})
        rows = zip(entries, self.rates.rates([entry.prompt for entry in entries]))
        for entry, rate in sorted(rows, key=lambda row: (row[0].uses, row[1], -row[0].born)):
            if rate < 1 / size and (tokens := tokens - len(entry.answer.response_ids)) >= 0:
                entry.uses, entry.last_use = entry.uses + 1, context.step
                taken.append(self._alone(entry, context, max(rate, 1 / (size + 2))))
        context.count("rhyme/replayed_answers", len(taken))
        return taken

    def after_update(self, context: StepContext) -> None:
        self.recorder.after_update(context)
        if self.active or self.rates.rare(self.settings.rare_share) is None:
            self.bank.add(self.recorder.kept, context.step)
        if self.settings.selection == "retrodiction":
            self.groups.look_back(context)

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in PARTS}
        earlier = {name: [vars(x) for x in getattr(self, name)] for name in ("earlier", "earlier_answers")}
        return parts | earlier | {name: getattr(self, name) for name in FACTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.earlier = [Curve(**run) for run in state["earlier"]]
        self.earlier_answers = [StoredAnswer(**answer) for answer in state["earlier_answers"]]
        vars(self).update({name: state[name] for name in FACTS})
