"""What earlier runs answered right, from the retrospective database; and what this run does, for later ones."""

from collections.abc import Sequence
from pathlib import Path

from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.rhyme.attempts import begin_run
from python_trainer.accelerators.rhyme.bank import for_tokenizer
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.judging import judged
from python_trainer.accelerators.rhyme.recording import GatheredStep, right_answers, run_facts
from python_trainer.accelerators.rhyme.records import StoredAnswer, prompt_key
from python_trainer.data import Rollout
from python_trainer.model.tokenizer import tokenizer_fingerprint

MOST = 16_384  # answers that are read


class EarlierRuns:
    """This run among those of a retrospective database.

    Args:
        url: of the database, which is made where there is none.
        folder: of this run, where it is new.
        run_id: of this run in the database; None: it is new.

    Attributes:
        begun: whether this process has entered it.
        generated_tokens: by the runs that answers were taken of.

    Raises:
        UserError: as of :class:`RetrospectiveDatabase`.
    """

    def __init__(self, url: str, folder: Path, run_id: int | None = None):
        self.database, self.folder, self.run_id = RetrospectiveDatabase(url), folder, run_id
        self.fingerprint, self.begun, self.generated_tokens = "", False, 0
        self.gathered = GatheredStep()

    def begin(self, context: StepContext) -> bool:
        """Enters this run; of one that is resumed, forgets the steps that are made again -> whether it is new."""
        self.fingerprint, self.begun = tokenizer_fingerprint(context.policy.tokenizer), True
        if self.run_id is not None:
            self.database.cut_run(self.run_id, context.step - 1)
            return False
        self.run_id = begin_run(self.database, run_facts(context, self.fingerprint), self.folder)
        return True

    def answers(self, context: StepContext, per_prompt: int) -> list[list[Rollout]]:
        """Different right answers of other runs to each prompt of this one, the newest first, at most so many.

        Their log-probabilities are unknown: those under a policy that had learned more than this one would weigh the
        answers down from which there is most to learn.
        """
        numbers: dict[str, list[int]] = {}
        for number, example in enumerate(context.task.train):
            numbers.setdefault(prompt_key(example.prompt), []).append(number)
        found = self.database.samples(prompt_keys=list(numbers), limit=MOST, without_run=self.run_id)
        chosen: dict[str, dict[str, StoredAnswer]] = {}
        for sample in sorted(found, key=lambda sample: (-sample.run_id, -sample.step)):
            chosen.setdefault(sample.prompt_key, {}).setdefault(sample.text, sample)
        few = [sample for texts in chosen.values() for sample in list(texts.values())[:per_prompt]]
        ours = for_tokenizer(few, context.policy.tokenizer, self.fingerprint)
        by_prompt: dict[int, list[Rollout]] = {}
        right = judged(ours, context, unjudged=False)
        used = {sample.run_id for sample in right}
        self.generated_tokens = sum(run.generated_tokens for run in self.database.runs() if run.id in used)
        for sample in right:
            for number in numbers[sample.prompt_key]:
                prompt_ids = list(context.groups_of([number])[0].prompt_ids)
                by_prompt.setdefault(number, []).append(as_rollout(sample, number, prompt_ids))
        return list(by_prompt.values())

    def record(self, context: StepContext, groups: Sequence[list[Rollout]]) -> None:
        """The step, as far as it has come, with a few right answers of each group."""
        run_id = self.run_id or 0
        kept = right_answers(context, groups, run_id, self.fingerprint)
        self.database.add_step(run_id, *self.gathered.add(context.step, groups, kept))


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
