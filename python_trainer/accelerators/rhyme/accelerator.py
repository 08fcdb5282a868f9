"""RhymeRL: training guided by history, where right answers are rare.

Changes the objective: answers of earlier policies are trained on. History comes in at four places:

1. Right answers of a clearly better earlier run are trained on first, by themselves (:mod:`.replay`).
2. Execution matching: the last steps of this run are compared with the stages of earlier runs (:mod:`.matching`).
3. Two-stage sampling: stored answers from the stages that rhyme, and recent ones of this run, take the places of fresh
   ones in their groups (:mod:`.sampling`), above all where every fresh answer failed.
4. Replay: right answers to prompts with a very low success rate are trained on again (:mod:`.replay`).

All of it waits until right answers are known to be rare, or an earlier run to be better (:class:`HistoryUse`). Without
history, training is bit for bit what it is without rhyme.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from itertools import accumulate
from typing import Any

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.rhyme import replay, sampling
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StoredAnswer, prompt_hash
from python_trainer.accelerators.rhyme.matching import Curve, curve_of, find_rhyming_stages, match_score
from python_trainer.accelerators.rhyme.recording import OWN, RunRecorder
from python_trainer.accelerators.rhyme.retrodiction import Retrodictor
from python_trainer.accelerators.settings import RhymeSettings
from python_trainer.data import Group, Rollout, by_group, has_spread, select_fresh

MAX_ANSWERS_READ = 8192  # from the database
MAX_RUNS_READ = 8  # the newest ones
COMPARED_STEPS = 12  # in which an earlier run may turn out to be better
MIN_STEPS_TO_MATCH = 2  # of this run, before any stage is trusted
REHEARSED_PER_PROMPT = 4  # newest answers of better runs that are trained on first
REHEARSALS = 3  # how often they are trained on
REHEARSAL_SHARE = 0.2  # largest ratio of rehearsed answers to those that the run is to generate
REHEARSAL_BATCH = 16  # answers in an update on nothing else; those to one prompt stay together
REPLAY_SHARE = 0.5  # largest ratio of replayed tokens to those of fresh answers whose group has a spread
REHEARSAL_RATE = 0.5  # success rate that rehearsed answers are compared with


class HistoryUse(Enum):
    """Whether training uses stored answers."""

    UNDECIDED = "undecided"  # too few groups so far to tell whether right answers are rare
    USED = "used"  # right answers are rare, or an earlier run is better
    UNUSED = "unused"  # right answers are not rare; an earlier run that turns out better still changes that


def read_runs(
    database: RetrospectiveDatabase, prompt_hashes: list[str], run_id: int
) -> tuple[list[Curve], list[StoredAnswer]]:
    """Return the newest runs but this one, and their right answers to these prompts, best and newest first."""
    answers = database.samples(prompt_hashes=prompt_hashes, limit=MAX_ANSWERS_READ, without_run=run_id)
    newest = sorted({answer.run_id for answer in answers})[-MAX_RUNS_READ:]
    curves = [curve_of(run, database.trajectory(run)) for run in newest]
    return curves, [answer for answer in answers if answer.run_id in newest]


def reward_rules(config: Any) -> dict[str, Any]:
    """Return the settings that decide the reward of an answer."""
    return {
        "task": config.task.model_dump(mode="json"),
        "longest": config.rollout.max_completion_length,
        "overlong_cache": config.algorithm.overlong_cache,
    }


class Rhyme(Accelerator):
    """Success rates of the prompts, a bank of right answers, and where in the history this run is."""

    settings: RhymeSettings

    def __init__(self, settings: RhymeSettings):
        super().__init__(settings)
        self.recorder = RunRecorder(settings)
        self.earlier: list[Curve] = []  # runs in the database when this one began
        self.earlier_answers: list[StoredAnswer] = []  # their right ones, while they are of use
        self.bank = sampling.AnswerBank()
        self.retrodictor = Retrodictor()
        self.rates = replay.SuccessRates(0)
        self.groups = sampling.GroupSampler(settings, self.retrodictor)
        self.use = HistoryUse.UNDECIDED
        self.compared = False  # with earlier runs, or the comparison does not matter any more
        self.better: list[int] = []  # earlier runs that are clearly better than this one
        self.shares: dict[str, float] = {}  # of right answers at the last visit to each prompt, until compared
        self.binary_reward = True  # False once the rewards show that the task has no right and wrong
        self.rules: dict[str, Any] = {}  # reward rules that scored the answers in the bank

    def begin(self, run: RunContext) -> None:
        self.recorder.begin(run)
        self.rates = replay.SuccessRates(len(run.prompts))
        self.rules = reward_rules(run.config)
        if self.settings.database is not None:
            hashes = [prompt_hash(example.prompt) for example in run.task.train]
            run_id = self.recorder.run_id
            self.earlier, self.earlier_answers = run.on_rank0(lambda: read_runs(self.recorder.database, hashes, run_id))

    def before_step(self, context: StepContext) -> list[list[Rollout]]:
        rules = reward_rules(context.run.config)
        if self.rules != rules:  # the run was resumed with other rewards
            self.rules = rules
            self.bank.fill([])
        self.groups.untrained = []
        self.rates.advance(context.step)
        if self.use is not HistoryUse.USED:
            self.use = self._decide_use()
        if self.compared and self.use is HistoryUse.UNUSED:
            self.earlier_answers = []
        context.telemetry["rhyme/replayed_answers"] = 0.0
        return [] if self.compared or context.step == 1 else self._rehearse(context)

    def _decide_use(self) -> HistoryUse:
        """Return the use of history that the first groups of the run suggest."""
        rare = self.rates.rare(self.settings.rare_share)
        if rare is None:
            return HistoryUse.UNDECIDED
        return HistoryUse.USED if rare else HistoryUse.UNUSED

    def _rehearse(self, context: StepContext) -> list[list[Rollout]]:
        """Compare this run with earlier ones; if some are clearly better, return batches of their right answers."""
        if context.run.config.rollout.num_generations > 1 and self.binary_reward:
            self.better = [run.run_id for run in self.earlier if replay.clearly_better(run.shares, self.shares)]
        self.compared = bool(self.better) or context.step > COMPARED_STEPS or not self.earlier
        if not self.better:
            return []
        self.use = HistoryUse.USED
        self._adopt(context)
        batches = self._rehearsal_batches(context)
        context.count("rhyme/rehearsed_answers", sum(map(len, batches)))
        better = [run for run in self.earlier if run.run_id in self.better]
        context.count("rhyme/earlier_tokens", sum(run.tokens for run in better))
        context.count("rhyme/earlier_seconds", sum(run.seconds for run in better))
        return batches

    def _rehearsal_batches(self, context: StepContext) -> list[list[Rollout]]:
        """Return the newest answers of better runs to each prompt, in batches to train on."""
        config, rollout = context.run.config, context.run.config.rollout
        groups = []
        for entries in self.bank.by_prompt.values():
            candidates = [entry for entry in entries if entry.answer.run_id in self.better]
            candidates.sort(key=lambda entry: (-entry.answer.run_id, -entry.answer.step))
            if candidates:
                rehearsed = sampling.different(candidates)[:REHEARSED_PER_PROMPT]
                groups.append([self._as_own_group(entry, context, REHEARSAL_RATE) for entry in rehearsed])
        batches = replay.in_batches(groups, REHEARSAL_BATCH, REHEARSALS, context.seed)
        limit = REHEARSAL_SHARE * (config.max_steps * rollout.prompts_per_step * rollout.num_generations)
        totals = accumulate(map(len, batches))
        return [batch for batch, total in zip(batches, totals) if total <= limit]

    def _adopt(self, context: StepContext) -> None:
        """Move the usable answers of earlier runs into the bank, with the rewards of this run."""
        answers = sampling.encode_again(self.earlier_answers, context.run, self.recorder.fingerprint)
        self.bank.add(sampling.score_again(answers, context.run), context.step)
        self.earlier_answers = []

    def _as_own_group(self, entry: sampling.BankEntry, context: StepContext, success_rate: float) -> Rollout:
        """Return an answer as a group of its own, with the success rate of its prompt as the baseline."""
        answer = entry.answer
        logprobs = answer.logprobs.tolist()
        if answer.run_id in self.better:  # importance weights would weaken the answers that teach most
            logprobs = [float("nan")] * len(logprobs)
        prompt_ids = context.run.prompts[entry.prompt]
        return sampling.as_rollout(answer, entry.prompt, prompt_ids, logprobs=logprobs, success_rate=success_rate)

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        if self.use is not HistoryUse.USED:
            return groups
        if self.earlier_answers:
            self._adopt(context)
        stages = []
        if len(self.recorder.steps) >= MIN_STEPS_TO_MATCH:
            query = curve_of(OWN, self.recorder.steps)
            stages = find_rhyming_stages(query, self.earlier, self.settings.fraction)
        trusted = [stage for stage in stages if stage.score >= self.settings.threshold]
        best_score = stages[0].score if stages else 0.0
        context.telemetry |= {"rhyme/best_match": best_score, "rhyme/trusted_stages": len(trusted)}
        context.telemetry["rhyme/bank"] = len(self.bank)

        def trust(answer: StoredAnswer) -> float:
            if answer.run_id == OWN:
                age = context.step - answer.step
                return max(1 - age / (self.settings.max_staleness + 1), 0.0)
            return match_score(trusted, answer.run_id, answer.step)

        self.groups.plan(context, groups, self.bank, trust)
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        self.recorder.collect(context, rollouts)
        fresh_groups = list(by_group(select_fresh(rollouts)).values())
        used = self.use is HistoryUse.USED
        binary_reward = self.binary_reward and all(rollout.filter_score is None for rollout in rollouts)
        if self.binary_reward and not binary_reward and not used:
            context.run.note(
                "rhyme: no answer is right or wrong in this task, so history is not used; "
                "accelerators.rhyme.rare_share=0 uses it all the same"
            )
        self.binary_reward = binary_reward
        mixed = self.groups.mix(context, rollouts) if used else rollouts
        if not self.binary_reward or context.run.config.rollout.num_generations == 1:
            return mixed
        self._count(context, fresh_groups)
        first = 1 + max((rollout.group for rollout in rollouts), default=-1)
        replayed = self._replay(context, fresh_groups)
        return mixed + [replace(rollout, group=number) for number, rollout in enumerate(replayed, first)]

    def _count(self, context: StepContext, groups: Sequence[list[Rollout]]) -> None:
        """Count right answers, and decide whether they are rare after enough groups."""
        self.rates.add(groups)
        if self.earlier and not self.compared:
            for group in groups:
                prompt = context.run.task.train[group[0].prompt_index].prompt
                self.shares[prompt_hash(prompt)] = sum(answer.right for answer in group) / len(group)
        use = self._decide_use()
        if self.use is HistoryUse.UNDECIDED and use is not HistoryUse.UNDECIDED:
            self.use = use
            used = use is HistoryUse.USED
            share = f"a share below {self.settings.rare_share:g}, history is not used"
            verdict = "right answers are rare, history is used" if used else share
            failed = f"{self.rates.failed} of the first {replay.FIRST_GROUPS} groups had no right answer"
            context.run.note(f"rhyme: {failed}: {verdict}")
            if not used:
                self.bank.fill([])

    def _replay(self, context: StepContext, groups: Sequence[list[Rollout]]) -> list[Rollout]:
        """Return right answers again to prompts with less than one right answer in a group, least used first."""
        if self.use is not HistoryUse.USED:
            return []
        num_generations = context.run.config.rollout.num_generations
        tokens_left = REPLAY_SHARE * sum(len(answer.ids) for group in groups if has_spread(group) for answer in group)
        entries = self.bank.replayable(context.step, {OWN, *self.better})
        rated = zip(entries, self.rates.rates([entry.prompt for entry in entries]))
        replayed = []
        for entry, rate in sorted(rated, key=lambda row: (row[0].uses, row[1], -row[0].born)):
            if rate >= 1 / num_generations:
                continue
            tokens_left -= len(entry.answer.response_ids)
            if tokens_left >= 0:
                entry.uses += 1
                entry.last_use = context.step
                replayed.append(self._as_own_group(entry, context, max(rate, 1 / (num_generations + 2))))
        context.count("rhyme/replayed_answers", len(replayed))
        return replayed

    def after_update(self, context: StepContext) -> None:
        self.recorder.after_update(context)
        if self.use is not HistoryUse.UNUSED:
            self.bank.add(self.recorder.right_answers, context.step)
        if self.settings.selection == "retrodiction":
            self.groups.look_back(context)

    def state_dict(self) -> dict[str, Any]:
        return {
            "recorder": self.recorder.state_dict(),
            "bank": self.bank.state_dict(),
            "rates": self.rates.state_dict(),
            "retrodictor": self.retrodictor.state_dict(),
            "earlier": [vars(curve) for curve in self.earlier],
            "earlier_answers": [vars(answer) for answer in self.earlier_answers],
            "active": self.use is HistoryUse.USED,
            "settled": self.compared,
            "judged": self.binary_reward,
            "better": self.better,
            "shares": self.shares,
            "rules": self.rules,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recorder.load_state_dict(state["recorder"])
        self.bank.load_state_dict(state["bank"])
        self.rates.load_state_dict(state["rates"])
        self.retrodictor.load_state_dict(state["retrodictor"])
        self.earlier = [Curve(**curve) for curve in state["earlier"]]
        self.earlier_answers = [StoredAnswer(**answer) for answer in state["earlier_answers"]]
        self.use = HistoryUse.USED if state["active"] else HistoryUse.UNDECIDED  # the next step decides, by the rates
        self.compared = state["settled"]
        self.binary_reward = state["judged"]
        self.better = state["better"]
        self.shares = state["shares"]
        self.rules = state["rules"]
