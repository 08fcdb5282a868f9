"""Evaluation: answers to the prompts of the test sets, and their metrics."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from python_trainer.config import Config, EvaluationConfig
from python_trainer.data import Group
from python_trainer.distributed import RankGroup
from python_trainer.keyed import keyed_seed
from python_trainer.logger import Logger
from python_trainer.prompts import Prompts, PromptSet
from python_trainer.rollout.engine import Engine, SamplingParams
from python_trainer.run_directory import save_evaluation
from python_trainer.run_state import Clock, RunState
from python_trainer.scoring import Scorer
from python_trainer.tasks.rewards import Scores, deciding_values, partial_values


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimates without bias how likely one of ``k`` answers is right (Chen et al. 2021, arXiv 2107.03374).

    Args:
        samples: number of judged answers, at least ``k``.
        right: how many of them are right.
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def by_prompt(values: Sequence[float], samples: int) -> list[float]:
    """Returns the mean over the ``samples`` answers to each prompt, which are side by side."""
    return [fmean(values[i : i + samples]) for i in range(0, len(values), samples)]


def metrics_of(scores: Scores, sampling: EvaluationConfig) -> dict[str, float]:
    """Returns ``accuracy``, ``reward`` (raw) and ``pass@k``, for powers of 2, of the answers to a test set."""
    size = sampling.samples
    counts = [round(share * size) for share in by_prompt(scores.accuracy, size)]
    powers = [1 << n for n in range(size.bit_length())] if size > 1 else []
    passed = {f"pass@{k}": fmean(pass_at_k(size, right, k) for right in counts) for k in powers}
    return {"accuracy": fmean(scores.accuracy), "reward": fmean(scores.total)} | passed


class Evaluator:
    """Evaluates a policy on the test split of its task and on more test sets, always with the same noise.

    Args:
        engine: generates the answers.
        folder: the run directory, which keeps the answers to the first and the last evaluation.
    """

    def __init__(
        self,
        config: Config,
        prompts: Prompts,
        engine: Engine,
        scorer: Scorer,
        *,
        ranks: RankGroup,
        state: RunState,
        clock: Clock,
        logger: Logger,
        folder: Path,
    ):
        self.config, self.prompts, self.engine, self.scorer = config, prompts, engine, scorer
        self.ranks, self.state, self.clock, self.logger, self.folder = ranks, state, clock, logger, folder
        self._partial_noted = False

    def due(self) -> bool:
        """Whether ``evaluation.eval_steps`` wants an evaluation after this step."""
        every = self.config.evaluation.eval_steps
        return every > 0 and self.state.step % every == 0

    def evaluate(self, name: str | None = None) -> dict[str, float]:
        """Evaluates on all test sets -> metrics; empty without test prompts.

        Args:
            name: ``start`` or ``final``, whose answers and metrics are kept; None: an evaluation in between.
        """
        state, limit = self.state, self.config.evaluation.eval_limit_during
        if not self.prompts.ids["test"]:
            return {}
        cost = [self.clock.training_seconds, state.counts.get("generated_tokens", 0)]
        with self.clock.measure("eval"):
            with self.logger.generating("evaluation"):
                row, correct = self._evaluate_all(None if name is not None or limit is None else range(limit))
            if name is not None:
                save_evaluation(self.folder, name, correct)
                state.results[name] = dict(row)
        accuracy = row["eval/accuracy"]
        state.costs.append(cost)
        state.evaluations.append([state.step, accuracy, accuracy if state.judged else row.get("eval/reward", accuracy)])
        return row

    def evaluate_each(self, split: str, rows: range | None = None) -> list[float]:
        """Returns for each prompt of a split 1 if it was answered right, else 0; with several samples their mean.

        Where no answer is simply right or wrong, the raw reward takes the place of 1 and 0.
        """
        scores, asked = self.answer_split(split, rows), self.prompts.sampling(split)
        return by_prompt(scores.accuracy if scores.merit is None else scores.merit, asked.samples)

    def answer_split(self, split: str, rows: range | None = None) -> Scores:
        """Returns the scores of answers to the prompts of a split.

        Args:
            rows: numbers of the prompts; None: all of them.
        """
        scores = self.answer_set(self.prompts.split(split), rows)
        self._note_partial(scores)
        return scores

    def answer_set(self, asked: PromptSet, rows: range | None = None) -> Scores:
        """Returns the scores of answers to prompts; all answers to one prompt are side by side.

        Args:
            rows: numbers of the prompts; None: all of them.
        """
        wanted, count = asked.sampling, asked.sampling.samples
        whole = range(len(asked.ids))
        rows = whole if rows is None else whole[rows.start : rows.stop]
        longest, seed = self.config.rollout.max_completion_length, keyed_seed(self.config.seed, "evaluate", asked.name)
        requests = [
            Group(asked.ids[i], [], count, longest, i * count, example=asked.examples[i], prompt_key=i) for i in rows
        ]
        sampling = SamplingParams(wanted.temperature, seed=seed, stop=tuple(self.config.rollout.stop))
        rollouts = self.engine.generate(requests, sampling)
        owners = [asked.examples[i] for i in rows for _ in range(count)]
        examples = [rollout.judged(example) for rollout, example in zip(rollouts, owners, strict=True)]
        completions = [rollout.said(self.scorer.decode(rollout.response_ids)) for rollout in rollouts]
        ids = [rollout.response_ids for rollout in rollouts]
        if asked.task is self.prompts.task:
            return self.scorer.raw(examples, completions, ids)
        return self.ranks.score(asked.task, examples, completions, ids)

    def _evaluate_all(self, rows: range | None) -> tuple[dict[str, float], list[float]]:
        """Evaluates these prompts of all test sets -> metrics, and the share of right answers to each test prompt."""
        settings = self.config.evaluation
        scores = self.answer_split("test", rows)
        row = {f"eval/{name}": value for name, value in metrics_of(scores, settings).items()}
        for name, asked in zip(settings.sets, self.prompts.sets):
            found = metrics_of(self.answer_set(asked, rows), asked.sampling)
            row |= {f"eval/{name}/{metric}": value for metric, value in found.items()}
        return row, by_prompt(scores.accuracy, settings.samples)

    def _note_partial(self, scores: Scores) -> None:
        """Notes once that the reward which decides what is right is neither 0 nor 1."""
        values = deciding_values(scores.rewards)
        if self._partial_noted or scores.merit is None or not (partial := partial_values(values)):
            return
        self._partial_noted = True
        self.logger.note(
            f"to {len(partial)} of {len(values)} answers {next(iter(scores.rewards))} gave neither 0 nor 1 but "
            f"{partial[0]:.3g} and the like: no answer is right or wrong, dynamic sampling and accelerators compare "
            "rewards, and eval/accuracy is the share above 0.5; a reward function that gives 0 or 1 may come first in "
            "task.reward (weight 0 leaves the reward as it is)"
        )
