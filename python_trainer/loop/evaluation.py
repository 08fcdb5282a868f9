"""Score the rollouts of a step by the task's rewards, and a policy by its answers to the test sets."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

import torch

from python_trainer.algorithms.advantages import overlong_penalties
from python_trainer.config import Config, EvaluationConfig
from python_trainer.data import Example, Group, Messages, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.keyed import keyed_seed
from python_trainer.loop.prompts import Prompts, PromptSet
from python_trainer.rollout.engine import Engine, SamplingParams
from python_trainer.run.logger import SAMPLES, Logger, clip
from python_trainer.run_directory import EVALUATIONS, append_row
from python_trainer.tasks.base import Task
from python_trainer.tasks.rewards import Scores, score


class Scorer:
    """Scores the answers of a run.

    Args:
        prompts: of the task that is trained on. ``judged`` of their run state turns False once the rewards show that
            the task has no right and wrong.
    """

    def __init__(self, config: Config, prompts: Prompts, ranks: RankGroup):
        self.config = config
        self.prompts = prompts
        self.ranks = ranks
        self._failure_noted = False

    def score(self, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> None:
        """Fill in text, rewards and accuracy of every rollout; rollouts come in the order of their groups."""
        scores = self.score_raw(self.prompts.task, groups, rollouts)
        rewards = self.shape(scores.total, [rollout.response_ids for rollout in rollouts])
        for i, rollout in enumerate(rollouts):
            rollout.reward = rewards[i]
            rollout.accuracy = scores.accuracy[i]
            rollout.filter_score = None if scores.filter_scores is None else scores.filter_scores[i]
            rollout.rewards = {name: values[i] for name, values in scores.rewards.items()}

    def score_stored(self, examples: Sequence[Example], texts: Sequence[str], ids: Sequence[Sequence[int]]) -> Scores:
        """Return the scores of stored answers to training prompts, with ``total`` as the advantages see it."""
        scores = self._score_on_ranks(self.prompts.task, examples, texts, ids)
        return replace(scores, total=self.shape(scores.total, ids))

    def shape(self, rewards: Sequence[float], responses: Sequence[Sequence[int]]) -> list[float]:
        """Subtract from each reward the penalty of its answer's length (``algorithm.overlong_cache``)."""
        cache = self.config.algorithm.overlong_cache
        if cache is None:
            return list(rewards)
        lengths = torch.tensor([len(ids) for ids in responses])
        limit = self.config.rollout.max_completion_length
        penalties = overlong_penalties(lengths, max_length=limit, cache=cache)
        return [r + p for r, p in zip(rewards, penalties.tolist(), strict=True)]

    def score_raw(self, task: Task, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> Scores:
        """Return the scores of rollouts by the task alone, and fill in their texts, groups and prompts."""
        numbered = [(number, group) for number, group in enumerate(groups) for _ in range(group.num_generations)]
        for rollout, (number, group) in zip(rollouts, numbered, strict=True):
            rollout.text = self.prompts.policy.decode(rollout.response_ids)
            rollout.group = number
            rollout.prompt_index = group.prompt_index
        failed = next((r.episode for r in rollouts if r.episode and r.episode.failure), None)
        if failed and not self._failure_noted:
            self._failure_noted = True
            self.prompts.note(
                f"the environment {self.config.task.environment} failed in turn {failed.turns} of an answer, which "
                f"ends there: {failed.failure}; environment/failures counts such answers"
            )
        examples = [rollout.with_environment_reward(group.example) for rollout, (_, group) in zip(rollouts, numbered)]
        completions = [rollout.completion for rollout in rollouts]
        return self._score_on_ranks(task, examples, completions, [rollout.response_ids for rollout in rollouts])

    def _score_on_ranks(
        self,
        task: Task,
        examples: Sequence[Example],
        completions: Sequence[str | Messages],
        ids: Sequence[Sequence[int]],
    ) -> Scores:
        """Return scores; each rank scores a part of the answers.

        Once a batch shows that the task has no right and wrong, print a note and set ``filter_scores``.
        """
        ranks, state = self.ranks, self.prompts.state
        bounds = [_group_start(examples, rank * len(examples) // ranks.size) for rank in range(ranks.size + 1)]
        part = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
        rank_scores: list[Scores] = []  # one, or none of no answers
        with ranks.fail_together():
            if examples[part]:
                timeout = self.config.task.reward_seconds
                rank_scores.append(score(task, examples[part], completions[part], ids[part], timeout=timeout))
        parts = list(chain.from_iterable(ranks.gather(rank_scores)))
        binary = all(scores.filter_scores is None for scores in parts)
        if task is self.prompts.task:
            if state.judged and not binary:
                state.judged = False
                self.prompts.note(
                    "an answer got a reward that is neither 0 nor 1: no answer is right or wrong, dynamic sampling and "
                    "accelerators compare rewards, and eval/accuracy is the share above 0.5; a reward function that "
                    "gives 0 or 1 may come first in task.reward (weight 0 leaves the reward as it is)"
                )
            binary = state.judged
        rewards = {name: [x for scores in parts for x in scores.rewards[name]] for name in task.reward_functions}
        total = [x for scores in parts for x in scores.total]
        accuracy = [x for scores in parts for x in scores.accuracy]
        return Scores(rewards, total, accuracy, None if binary else total)


def _group_start(examples: Sequence[Example], index: int) -> int:
    """Return the first answer from ``index`` on to another example: one rank judges all answers to an example."""
    while 0 < index < len(examples) and examples[index].prompt is examples[index - 1].prompt:
        index += 1
    return index


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
    """Evaluates a policy on the test split of its task and on more test sets, always with the same noise.

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
            scores, rollouts = self._answer(test, rows)
            row = self._metrics("", test, scores)
            for set_name, prompt_set in zip(settings.sets, self.prompts.sets):
                row |= self._metrics(f"{set_name}/", prompt_set, self.answer(prompt_set, rows))
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
        texts = [self.prompts.text_of(test.examples[rollout.prompt_index]) for rollout in shown]
        return [{"prompt": clip(text), "answer": clip(rollout.text)} for text, rollout in zip(texts, shown)]

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
        sampling, rollout = test.sampling, self.config.rollout
        settings = [
            self.config.seed,
            sampling.temperature,
            sampling.samples,
            rollout.max_completion_length,
            rollout.stop,
        ]
        questions = json.dumps([test.ids, *settings, list(test.task.reward_functions)])
        digest = hashlib.blake2b(questions.encode(), digest_size=16).hexdigest()
        evaluated = [digest, len(test.ids[: sampling.eval_limit_during])]
        if state.evaluations and state.evaluated != evaluated:
            self.prompts.note(
                "evaluations have other prompts, rewards or sampling than before: best/ and evaluation.target_accuracy "
                "regard the new ones only"
            )
            state.evaluations = []
            state.costs = []
            if state.evaluated[:1] != [digest]:
                state.results = {}
        state.evaluated = evaluated

    def evaluate_each(self, split: str, rows: range) -> list[float]:
        """Return for each prompt of a split 1 if its answer is right, else 0; with several samples their mean.

        If the task has no right and wrong, the raw reward takes the place of 1 and 0.
        """
        prompt_set = self.prompts.split(split)
        scores = self.answer(prompt_set, slice(rows.start, rows.stop))
        values = scores.accuracy if scores.filter_scores is None else scores.filter_scores
        return by_prompt(values, prompt_set.sampling.samples)

    def answer(self, prompt_set: PromptSet, rows: slice) -> Scores:
        """Return the scores of answers to these rows of the prompts; all answers to one prompt are side by side."""
        return self._answer(prompt_set, rows)[0]

    def _answer(self, prompt_set: PromptSet, rows: slice) -> tuple[Scores, list[Rollout]]:
        """Return the scores, as of :meth:`answer`, with the answers."""
        settings, rollout = prompt_set.sampling, self.config.rollout
        groups = [
            Group(
                prompt_set.ids[i],
                num_generations=settings.samples,
                max_new_tokens=rollout.max_completion_length,
                sample_id=i * settings.samples,
                example=prompt_set.examples[i],
                prompt_index=i,
            )
            for i in range(len(prompt_set.ids))[rows]
        ]
        seed = keyed_seed(self.config.seed, "evaluate", prompt_set.name)
        sampling = SamplingParams(settings.temperature, seed=seed, stop=tuple(rollout.stop))
        rollouts = self.engine.generate(groups, sampling)
        if self.engine.lengths:
            self.engine.lengths.observe(groups, rollouts)
        return self.scorer.score_raw(prompt_set.task, groups, rollouts), rollouts
