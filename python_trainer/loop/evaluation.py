"""Evaluate a policy by its answers to the test sets."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from python_trainer.config import EvaluationConfig
from python_trainer.data import Rollout
from python_trainer.loop.origin import digest_examples, digest_value
from python_trainer.loop.prompts import PromptSet
from python_trainer.loop.scoring import Scorer
from python_trainer.rollout.engine import Engine, SamplingParams
from python_trainer.run.directory import EVALUATIONS, append_row
from python_trainer.run.logger import SAMPLES, Logger, clip
from python_trainer.tasks.rewards import Scores
from rlkernels.sampling.keys import keyed_seed


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate without bias how likely one of ``k`` answers is right (Chen et al. 2021, arXiv 2107.03374).

    Args:
        samples: number of scored answers, at least ``k``.
        right: how many of them are right.
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def by_prompt(values: Sequence[float], samples: int) -> list[float]:
    """Return the mean over the ``samples`` answers to each prompt, which are side by side."""
    return [fmean(values[i : i + samples]) for i in range(0, len(values), samples)]


def metrics_of(scores: Scores, sampling: EvaluationConfig, prompts: int | None = None) -> dict[str, float]:
    """Return ``accuracy``, ``reward`` (raw) and ``pass@k``, for powers of 2, of the answers to a test set.

    Args:
        prompts: count the answers to so many first prompts only; None: to all.
    """
    size = sampling.samples
    answers = None if prompts is None else prompts * size
    accuracy, total = scores.accuracy[:answers], scores.total[:answers]
    counts = [round(share * size) for share in by_prompt(accuracy, size)]
    powers = [1 << n for n in range(size.bit_length())] if size > 1 else []
    passed = {f"pass@{k}": fmean(pass_at_k(size, right, k) for right in counts) for k in powers}
    return {"accuracy": fmean(accuracy), "reward": fmean(total)} | passed


class Evaluator:
    """Evaluate a policy on the test split of its task and on more test sets, always with the same noise.

    Evaluations during training answer the first ``eval_limit_during`` prompts of each set, the first and the last
    evaluation all. Metrics ``eval/`` cover the prompts that every evaluation answers: these are compared. Metrics
    ``eval_all/`` cover all prompts of a set that has more.

    Args:
        notify: calls a method of all callbacks.
    """

    def __init__(self, scorer: Scorer, engine: Engine, logger: Logger, notify: Callable[..., None]):
        self.scorer = scorer
        self.engine = engine
        self.logger = logger
        self.notify = notify
        self.config = scorer.config
        self.prompts = scorer.prompts

    def evaluate(self, name: str | None = None) -> dict[str, float]:
        """Evaluate on all test sets; return metrics, none without test prompts.

        Args:
            name: ``start`` or ``final``, whose answers and metrics are recorded; None: an evaluation in between.
        """
        settings, state = self.config.evaluation, self.prompts.state
        if not self.prompts.ids["test"]:
            return {}
        rows = slice(settings.eval_limit_during if name is None else None)
        self._forget_other_evaluations()
        cost = [state.training_seconds, state.counts.get("generated_tokens", 0)]
        with state.measure("eval"):
            self.logger.work = "evaluation"
            test = self.prompts.split("test")
            scores, rollouts = self.answer(test, rows)
            row = self._metrics("", test, scores)
            for set_name, prompt_set in zip(settings.sets, self.prompts.sets):
                row |= self._metrics(f"{set_name}/", prompt_set, self.answer(prompt_set, rows)[0])
            self.logger.work = "answers"
            if name is not None:
                evaluation = {
                    "step": state.step,
                    "name": name,
                    "correct": by_prompt(scores.accuracy, settings.samples),
                    "samples": self._samples(test, rollouts),
                }
                append_row(self.logger.folder / EVALUATIONS, evaluation)
                state.results[name] = dict(row)
        state.costs.append(cost)
        state.evaluations.append([state.step, row["eval/accuracy"], row["eval/reward"]])
        self.notify("on_evaluate", state.step, row)
        return row

    def _samples(self, test: PromptSet, rollouts: Sequence[Rollout]) -> list[dict[str, str]]:
        """Return the first answer to each of the first prompts."""
        shown = rollouts[:: test.sampling.samples][:SAMPLES]
        return [{"prompt": clip(self.prompts.text("test", r)), "answer": clip(r.text)} for r in shown]

    def _metrics(self, prefix: str, prompt_set: PromptSet, scores: Scores) -> dict[str, float]:
        """Return the metrics of a test set by name: of its first prompts, and of more where more were answered."""
        limit, sampling = self.config.evaluation.eval_limit_during, prompt_set.sampling
        row = {f"eval/{prefix}{name}": value for name, value in metrics_of(scores, sampling, limit).items()}
        if limit is not None and len(scores.total) > limit * sampling.samples:
            row |= {f"eval_all/{prefix}{name}": value for name, value in metrics_of(scores, sampling).items()}
        return row

    def _forget_other_evaluations(self) -> None:
        """Drop evaluations of other prompts or with other sampling, which those of a resumed run must not meet."""
        state, test = self.prompts.state, self.prompts.split("test")
        sampling, rollout, task = test.sampling, self.config.rollout, test.task
        settings = [
            self.config.seed,
            sampling.temperature,
            sampling.samples,
            rollout.max_completion_length,
            rollout.stop,
            self.config.task.environment,
            self.config.task.max_turns,
            list(task.reward_functions),
            task.reward_weights,
            digest_examples(test.examples, test.ids),
        ]
        digest = digest_value(settings)
        evaluated = [digest, len(test.ids[: sampling.eval_limit_during])]
        if state.evaluations and state.evaluated[:2] != evaluated:
            self.prompts.note(
                "evaluations have other prompts, rewards or sampling than before: best/ and evaluation.target_accuracy "
                "regard the new ones only"
            )
            state.evaluations = []
            state.costs = []
            if state.evaluated[:1] != [digest]:
                state.results = {}
        saved_digests = state.evaluated[2] if state.evaluated else {}
        state.evaluated = [*evaluated, self._forget_other_sets(saved_digests)]

    def _forget_other_sets(self, saved: Mapping[str, str]) -> dict[str, str]:
        """Drop metrics of ``evaluation.sets`` that have other prompts now; return a digest of each set.

        Args:
            saved: the digests at the evaluation before.
        """
        names = self.config.evaluation.sets
        digests = {name: digest_examples(each.examples, each.ids) for name, each in zip(names, self.prompts.sets)}
        for name in digests:
            if saved.get(name, digests[name]) != digests[name]:
                self.prompts.note(f"evaluation.sets.{name} has other prompts than before, whose metrics are forgotten")
                for stage, results in self.prompts.state.results.items():
                    kept = {key: value for key, value in results.items() if key.split("/")[1:-1] != [name]}
                    self.prompts.state.results[stage] = kept
        return digests

    def evaluate_each(self, split: str, rows: range) -> list[float]:
        """Return for each prompt of a split 1 if its answer is right, else 0; with several samples their mean.

        If the task has no right and wrong, the raw reward takes the place of 1 and 0.
        """
        prompt_set = self.prompts.split(split)
        scores, _ = self.answer(prompt_set, slice(rows.start, rows.stop))
        return by_prompt(scores.filter_scores or scores.accuracy, prompt_set.sampling.samples)

    def answer(self, prompt_set: PromptSet, rows: slice) -> tuple[Scores, list[Rollout]]:
        """Answer these rows of the prompts; return scores and answers, all those to one prompt side by side."""
        settings, rollout = prompt_set.sampling, self.config.rollout
        indices = range(len(prompt_set.ids))[rows]
        groups = self.prompts.groups_of(prompt_set, indices, settings.samples, noise_ids=indices)
        seed = keyed_seed(self.config.seed, "evaluate", prompt_set.name)
        sampling = SamplingParams(settings.temperature, seed=seed, stop=tuple(rollout.stop))
        rollouts = self.engine.generate(groups, sampling)
        if self.engine.lengths:
            self.engine.lengths.observe(groups, rollouts)
        return self.scorer.score_raw(prompt_set, groups, rollouts), rollouts
