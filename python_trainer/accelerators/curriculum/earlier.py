"""What earlier runs answered right, from the retrospective database; and what this run does, for later ones.

Of several ranks the first alone opens the database; what it reads all know.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from python_trainer.accelerators.base import RunContext, StepContext
from python_trainer.accelerators.curriculum.better import clearly_better, last_shares
from python_trainer.accelerators.curriculum.difficulty import difficulties
from python_trainer.accelerators.curriculum.notes import say
from python_trainer.accelerators.curriculum.settings import AUTO, CurriculumSettings
from python_trainer.accelerators.rhyme.attempts import begin_run, resume_run
from python_trainer.accelerators.rhyme.bank import answers_in, for_tokenizer, state_of
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.judging import judged
from python_trainer.accelerators.rhyme.recording import GatheredStep, right_answers, run_facts
from python_trainer.accelerators.rhyme.records import StoredAnswer, prompt_key
from python_trainer.data import Rollout
from python_trainer.errors import UserError
from python_trainer.model.loading import tokenizer_fingerprint

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

NOTE = "recorded_run.json"
STATE = "run_id", "created", "found", "generated_tokens", "settled"
NOBODY = 0  # no run has this id
MOST = 16_384  # answers that are read
RUNS = 8  # whose answers and difficulties are looked at, the newest
LOOKS = 12  # steps in which earlier runs may turn out to be better


@dataclass
class Left:
    """What other runs had left in the database when this one began.

    Attributes:
        answers: right ones to its prompts, the newest first.
        shares: of the runs that they are from, how often each prompt was answered right in the end.
        tokens: that each run had generated.
    """

    answers: list[StoredAnswer]
    shares: dict[int, dict[str, float]]
    tokens: dict[int, int]

    @cached_property
    def state(self) -> dict[str, Any]:
        """As a checkpoint holds it; answers do not change as long as they are waiting here."""
        return {"answers": state_of(self.answers), "shares": self.shares, "tokens": self.tokens}


class EarlierRuns:
    """This run among those of a retrospective database.

    Args:
        url: of the database, which is made where there is none.
        folder: of this run, where it is new.

    Attributes:
        run_id: of this run in the database; None: it is new.
        created: when it was added; ids are used again.
        begun: whether this process has entered it.
        settled: whether it is known which runs are better than this one, or it does not matter any more.
        found: answers that were taken of other runs.
        generated_tokens: by those runs.
    """

    def __init__(self, url: str, folder: Path):
        self.url, self.folder = url, folder
        self.run_id: int | None = None
        self.created = 0.0
        self.fingerprint, self.begun, self.settled = "", False, False
        self.left: Left | None = None  # on the first rank, until it is settled
        self.found = self.generated_tokens = 0
        self.gathered = GatheredStep()

    @cached_property
    def database(self) -> RetrospectiveDatabase:
        """Opened where it is first asked for, which only the first rank does."""
        return RetrospectiveDatabase(self.url)

    def reach(self, run: RunContext) -> None:
        """Opens the database, where it is not open.

        Raises:
            UserError: as of :class:`RetrospectiveDatabase`.
        """
        run.once(lambda: self.database.name)  # which can be sent to the other ranks

    def begin(self, context: StepContext) -> bool:
        """Enters this run; of one that is resumed, forgets the steps that are made again -> whether it is new."""
        self.fingerprint, self.begun = tokenizer_fingerprint(context.policy.tokenizer), True
        new = self.run_id is None
        if not context.once(lambda: self._enter(context)):
            self.settled, self.left = True, None  # without its own steps no run can be told to be better
        return new

    def _enter(self, context: StepContext) -> bool:
        """A resumed run that the database does not have is not recorded any more -> whether this one is."""
        if self.run_id is None:
            facts = run_facts(context, self.fingerprint)
            self.run_id, self.created = begin_run(self.database, facts, self.folder, NOTE)
            return True
        there = resume_run(
            self.database, self.run_id, context.step - 1, created=self.created, lost="it learns nothing from there"
        )
        if not there:
            self.run_id = NOBODY
        return there

    def answers(self, context: StepContext, per_prompt: int) -> list[list[Rollout]]:
        """Different right answers of better runs to each prompt of this one, the newest first, at most so many.

        There are none before this run has answered enough prompts to tell that a run is better, and none any more
        once that has been told of one, or after :data:`LOOKS` steps.

        Their log-probabilities are unknown: those under a policy that had learned more than this one would weigh the
        answers down from which there is most to learn.
        """
        if self.settled:
            return []
        few, tokens = context.once(lambda: self._newest(context, per_prompt))
        if few or context.step > LOOKS:
            self.settled, self.left = True, None
        if not few:
            return []
        numbers: dict[str, list[int]] = {}
        for number, key in enumerate(keys_of(context)):
            numbers.setdefault(key, []).append(number)
        ours = for_tokenizer(few, context.policy.tokenizer, self.fingerprint)
        right = judged(ours, context, unjudged=False)
        self.generated_tokens = sum(tokens[run_id] for run_id in {sample.run_id for sample in right})
        by_prompt: dict[int, list[StoredAnswer]] = {}
        for sample in right:
            for number in numbers[sample.prompt_key]:
                by_prompt.setdefault(number, []).append(sample)
        self.found = sum(map(len, by_prompt.values()))
        return [
            [as_rollout(sample, group.prompt_key, list(group.prompt_ids)) for sample in by_prompt[group.prompt_key]]
            for group in context.groups_of(list(by_prompt))
        ]

    def _newest(self, context: StepContext, per_prompt: int) -> tuple[list[StoredAnswer], dict[int, int]]:
        """Different answers of better runs, and what each run has generated."""
        left = self.left = self.left or self._others(keys_of(context))
        if context.step == 1:
            return [], {}
        own = self._last_shares(self.run_id or NOBODY)
        better = {run_id for run_id, theirs in left.shares.items() if clearly_better(theirs, own)}
        chosen: dict[str, dict[str, StoredAnswer]] = {}
        for sample in left.answers:
            if sample.run_id in better:
                chosen.setdefault(sample.prompt_key, {}).setdefault(sample.text, sample)
        few = [sample for texts in chosen.values() for sample in list(texts.values())[:per_prompt]]
        return few, left.tokens

    def _others(self, prompt_keys: list[str]) -> Left:
        """Of the newest other runs that have answered these prompts."""
        found = self.database.samples(prompt_keys=prompt_keys, limit=MOST, without_run=self.run_id)
        newest = sorted({sample.run_id for sample in found})[-RUNS:]
        answers = [sample for sample in found if sample.run_id in newest]
        return Left(
            sorted(answers, key=lambda sample: (-sample.run_id, -sample.step)),
            {run_id: self._last_shares(run_id) for run_id in newest},
            {run.id: run.generated_tokens for run in self.database.runs() if run.id in newest},
        )

    def _last_shares(self, run_id: int) -> dict[str, float]:
        return last_shares(step.outcomes for step in self.database.trajectory(run_id))

    def difficulties(self, context: StepContext, memory: float) -> Tensor | None:
        """As :func:`.difficulty.difficulties` of each training prompt, by the newest runs of the task."""
        return context.once(lambda: self._difficulties(context, memory))

    def _difficulties(self, context: StepContext, memory: float) -> Tensor | None:
        others = [run for run in self.database.runs() if run.id != self.run_id and run.facts.task == context.task.name]
        trajectories = [self.database.trajectory(run.id) for run in others[-RUNS:]]
        return difficulties([[step.outcomes for step in steps] for steps in trajectories], keys_of(context), memory)

    def record(self, context: StepContext, groups: Sequence[list[Rollout]]) -> None:
        """The step, as far as it has come, with a few right answers of each group."""
        context.once(lambda: self._write(context, groups))

    def _write(self, context: StepContext, groups: Sequence[list[Rollout]]) -> None:
        run_id = self.run_id or NOBODY
        kept = right_answers(context, groups, run_id, self.fingerprint)
        self.database.add_step(run_id, *self.gathered.add(context, groups, kept))

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE} | {"left": None if self.left is None else self.left.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a run that was begun without a database, the state is empty: it has no place in one."""
        # checkpoints of November 2026 and before do not say "settled": answers were taken before the first step then
        known = {"run_id": None, "created": 0.0, "found": 0, "generated_tokens": 0, "settled": True, **state}
        for name in STATE:
            setattr(self, name, known[name])
        if (left := state.get("left")) is not None:  # what others have written since is not for this run
            self.left = Left(answers_in(left["answers"]), left["shares"], left["tokens"])
        self.run_id = self.run_id or NOBODY


class Unasked(EarlierRuns):
    """A run that is recorded although nobody asked for it: it reads nothing, and what goes wrong ends no training."""

    console: "Console | None" = None
    lost = False

    def reach(self, run: RunContext) -> None:
        self.console = run.console

    def begin(self, context: StepContext) -> bool:
        self.fingerprint, self.begun = tokenizer_fingerprint(context.policy.tokenizer), True
        if self.run_id is not None:
            context.once(lambda: self._does(lambda: self._enter(context)))
        return False

    def _write(self, context: StepContext, groups: Sequence[list[Rollout]]) -> None:
        self._does(lambda: self._add(context, groups))

    def _add(self, context: StepContext, groups: Sequence[list[Rollout]]) -> None:
        """The run too, with its first step: one that fails before leaves nothing."""
        if self.run_id is None:
            self._enter(context)
            say(
                self.console,
                f"this run is recorded in {self.url}; with accelerators.curriculum.database={self.url} another "
                "begins with what it has learned, null records nothing",
            )
        super()._write(context, groups)

    def _does(self, function: Callable[[], T]) -> T | None:
        """What a call returns; from the first one on that fails nothing is recorded."""
        try:
            return None if self.lost else function()
        except (UserError, OSError) as error:
            self.lost = True
            say(self.console, f"this run is not recorded: {error}")
            return None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"url": self.url}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.url = state.get("url", "")  # not there where a database was named
        self.lost = not (self.run_id and self.url)
        if self.lost and self.run_id:
            say(
                None,
                "this run is not recorded any more: it was recorded in a database that "
                f"accelerators.curriculum.database named, which is {AUTO} now; name it to go on there",
            )


def runs_of(settings: CurriculumSettings, output_dir: Path) -> EarlierRuns | None:
    """Where a run with these settings reads and is recorded."""
    if settings.database is None:
        return None
    if settings.reads:
        return EarlierRuns(settings.database, output_dir)
    return Unasked(settings.default_database(output_dir), output_dir)


def keys_of(context: StepContext) -> list[str]:
    """Names of the training prompts in the database."""
    return [prompt_key(example.prompt) for example in context.task.train]


def as_rollout(sample: StoredAnswer, number: int, prompt_ids: list[int]) -> Rollout:
    """An answer that is judged against nothing but how often its prompt is answered right."""
    return Rollout(
        prompt_key=number,
        prompt_ids=prompt_ids,
        response_ids=sample.response_ids,
        logprobs=[float("nan")] * len(sample.response_ids),
        finish_reason="stop" if sample.finished else "length",
        text=sample.text,
        reward=sample.reward,
        accuracy=1.0,
        policy_version=sample.policy_version,
        importance_cap=1.0,
        expected=0.5,
    )
