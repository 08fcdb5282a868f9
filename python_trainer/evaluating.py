"""How a run is evaluated: the answers to test and gate prompts, their metrics, and what they tell the user."""

from abc import abstractmethod
from statistics import fmean

from python_trainer.config import Config
from python_trainer.data import Group
from python_trainer.errors import UserError
from python_trainer.evaluation import Evaluated, EvaluationSampling, PromptSet, by_prompt, metrics_of
from python_trainer.keyed import keyed_seed
from python_trainer.model.policy import ANSWER_LENGTH
from python_trainer.rollout.engine import SamplingParams
from python_trainer.run_directory import save_evaluation
from python_trainer.tasks.rewards import Scores, partial_values
from python_trainer.trainer import TrainingLoop


def first_rows(limit: int | None) -> range | None:
    """Numbers of the first prompts of a split; None: all of them."""
    return None if limit is None else range(limit)


class EvaluatingLoop(TrainingLoop):
    """A loop whose policy is evaluated, on the test split of its task and on more test sets.

    Attributes:
        config: all settings.
        named_sets: the test sets of ``evaluation.sets``, in their order.
    """

    config: Config
    named_sets: list[PromptSet]
    _work = "answers"  # what the engine is asked for, as progress calls it
    _collapse_noted = _partial_noted = False

    @abstractmethod
    def _note(self, text: str) -> None:
        """Tells the user something that is no metric."""

    @abstractmethod
    def _prompts(self, split: str) -> list[list[int]]:
        """Token ids of the prompts of a split."""

    @abstractmethod
    def _training_seconds(self) -> float:
        """Since the run began, without evaluations."""

    def evaluate_each(self, split: str, rows: range | None = None) -> list[float]:
        """What each of the answers of :meth:`answer_split` is worth, 1 for a right one; see ``StepContext``."""
        scores = self.answer_split(split, rows)
        return by_prompt(scores.accuracy if scores.merit is None else scores.merit, self._sampling(split).samples)

    def answer_split(self, split: str, rows: range | None = None) -> Scores:
        """Scores of the answers to every prompt of a split: one, at temperature 1, if ``evaluation`` says no more."""
        prompts = self._prompts(split)
        if not prompts:
            raise self._no_prompts(split)
        own = PromptSet(split, self.task, getattr(self.task, split), prompts, self._sampling(split))
        scores = self.answer_set(own, rows)
        self._note_partial(scores)
        return scores

    def answer_set(self, asked: PromptSet, rows: range | None = None) -> Scores:
        """Scores of the answers to prompts, with noise that is always the same; all answers to one side by side."""
        wanted, count = asked.sampling, asked.sampling.samples
        whole = range(len(asked.prompts))
        rows = whole if rows is None else whole[rows.start : rows.stop]
        longest, seed = self._longest(wanted), keyed_seed(self.seed, "evaluate", asked.name)
        requests = [
            Group(asked.prompts[i], [], count, longest, i * count, example=asked.examples[i], prompt_key=i)
            for i in rows
        ]
        sampling = SamplingParams(wanted.temperature, wanted.top_p, seed=seed, stop=tuple(self.generation.stop))
        rollouts = self.engine.generate(requests, sampling)
        owners = [asked.examples[i] for i in rows for _ in range(count)]
        judged = (
            [rollout.judged(example) for rollout, example in zip(rollouts, owners, strict=True)],
            [rollout.said(self.policy.decode(rollout.response_ids)) for rollout in rollouts],
            [rollout.response_ids for rollout in rollouts],
        )
        return self.raw_scores(*judged) if asked.task is self.task else self.ranks.score(asked.task, *judged)

    def _note_partial(self, scores: Scores) -> None:
        """Says once that nothing is right or wrong, where nobody chose what is and the rewards do not tell."""
        values = scores.rewards[self.task.accuracy]
        if self._partial_noted or scores.merit is None or not (partial := partial_values(values)):
            return
        self._partial_noted = True
        self._note(
            f"task.accuracy is not set, and to {len(partial)} of {len(values)} answers {self.task.accuracy} gave "
            f"neither 0 nor 1 but {partial[0]:.3g} and the like: no answer is right or wrong, dynamic sampling and "
            "accelerators compare rewards, and eval/accuracy is the share above 0.5; task.accuracy may name a reward "
            "function that gives 0 or 1 (weight 0 leaves the reward as it is)"
        )

    def _note_collapse(self, accuracy: float, count: int) -> None:
        """Says once that accuracy has fallen to less than half, by more than three standard errors."""
        before = self.state.evaluations[0][1] if self.state.evaluations else 0.0
        mean = (before + accuracy) / 2
        if not self.state.judged:
            return
        if self._collapse_noted or accuracy >= before / 2 or (before - accuracy) ** 2 <= 18 * mean * (1 - mean) / count:
            return
        self._collapse_noted = True
        self._note(
            f"accuracy fell from {before:.3f} to {accuracy:.3f} by step {self.state.step}: the policy has collapsed; "
            f"optimizer.learning_rate {self.config.optimizer.learning_rate:g} may be too high"
        )

    def evaluate(self, split: str, limit: int | None = None) -> float:
        """Accuracy of the answers of :meth:`answer_split`."""
        return fmean(self.answer_split(split, first_rows(limit)).accuracy)

    def evaluation_row(self, name: str | None = None, known: Evaluated | None = None) -> dict[str, float]:
        """Evaluates on the test split, and notes when the target was reached; with a name, each result is kept."""
        state, settings = self.state, self.config.evaluation
        if not self.prompts["test"]:
            return {}
        seconds = self._training_seconds()
        with self.clock.measure("eval"):
            rows = first_rows(settings.eval_limit_during if name is None else settings.eval_limit)
            self._work = "evaluation"
            row, correct = known or self._evaluate_all(rows)
            self._work = "answers"
            if name is not None:
                save_evaluation(self.folder, name, correct)
                state.results[name] = dict(row)
        accuracy, target = row["eval/accuracy"], settings.target_accuracy
        self._note_collapse(accuracy, len(correct))
        state.evaluations.append([state.step, accuracy, accuracy if state.judged else row.get("eval/reward", accuracy)])
        self.tell_callbacks("on_evaluate", state.step, row)
        if target is not None and accuracy >= target and state.seconds_to_target is None:
            state.seconds_to_target = seconds
            state.tokens_to_target = state.counts.get("generated_tokens", 0)
        return dict(row)

    def _evaluate_all(self, rows: range | None) -> Evaluated:
        """Of these prompts of all test sets."""
        settings = self.config.evaluation
        scores = self.answer_split("test", rows)
        row = {f"eval/{name}": value for name, value in metrics_of(scores, settings).items()}
        for name, asked in zip(settings.sets, self.named_sets):
            found = metrics_of(self.answer_set(asked, rows), asked.sampling)
            row |= {f"eval/{name}/{metric}": value for metric, value in found.items()}
        return row, by_prompt(scores.accuracy, settings.samples)

    def evaluation_due(self) -> bool:
        """Every so many steps, and after updates on stored answers alone, to show what they have brought."""
        every = self.config.evaluation.eval_steps
        return every > 0 and (self.rehearsed or self.state.step % every == 0)

    def _target_ends_it(self) -> bool:
        return self.config.evaluation.stop_at_target and self.state.seconds_to_target is not None

    def _sampling(self, split: str) -> EvaluationSampling:
        """How the prompts of a split are answered in evaluations."""
        return self.config.evaluation if split == "test" else EvaluationSampling()

    def _longest(self, sampling: EvaluationSampling) -> int:
        return sampling.max_new_tokens or self.config.rollout.max_completion_length

    def _longest_by(self, name: str, sampling: EvaluationSampling) -> str:
        """The setting of :meth:`_longest`, for a split or the section of a named set."""
        section = "evaluation" if name == "test" else name
        return ANSWER_LENGTH if sampling.max_new_tokens is None else f"{section}.max_new_tokens"

    def _no_prompts(self, split: str) -> UserError:
        size, path = (getattr(self.config.task, f"{split}_{kind}", None) for kind in ("size", "path"))
        return UserError(
            f"the task must have {split} prompts: task.{split}_size and task.{split}_path decide, got {size} and {path}"
        )
