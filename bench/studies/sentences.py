"""SmolLM2-135M learns to write sentences under a constraint: examples/sentences.py, without supervised steps.

*keys*: one short sentence with three given words. *near*: one sentence whose number of words is within one of the given
one. An evaluation is one answer to each test prompt. Weights are bfloat16, with float32 copies in the optimizer.

*earlier run*: plain, 30 steps of another seed. *rhyme* begins with its database. *its right answers, then plain* trains
on them as `rhyme` does, and uses no history after that.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench._turns import Turns
from bench.studies import harness, rhyme
from bench.studies.harness import OTHER_WEIGHTS, Arm, Study, fewer_prompts
from bench.studies.ranks import SNAPSHOTS, Change, ends, other_weights, shape_of_path, trainer_with
from bench.studies.rhyme import DATABASE, RHYME
from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.rhyme.accelerator import HistoryUse, Rhyme
from python_trainer.data import Rollout

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = str(EXAMPLES / "sentences.yaml")
LEARNING_RATE = 2e-5
EARLIER = "earlier run"
EARLIER_DATABASE = f"{DATABASE}={{earlier}}.db"
PATTERN_PROMPTS = 128  # training prompts whose answers are searched for a pattern
ARTICLES = ("a", "an", "the")
sys.path.append(str(EXAMPLES))  # has the task
words_of = importlib.import_module("sentences").words_of


def prepare(work: Path) -> None:
    """Check that the model is there."""
    if not (work / "smollm2" / "config.json").exists():
        raise SystemExit(f"{work} lacks smollm2: python tools/smollm2.py {work / 'smollm2'}")


def commonest_pattern(answers: Sequence[str], prompt_words: Sequence[Sequence[str]]) -> float:
    """Return the share of the commonest answer, after removing the words of its prompt and articles."""
    patterns = []
    for text, words in zip(answers, prompt_words, strict=True):
        removed = {*words, *ARTICLES}
        patterns.append(tuple(word for word in words_of(text) if word not in removed))
    [(_, count)] = Counter(patterns).most_common(1)
    return count / len(patterns)


def measure_pattern(run: Path, change: Change) -> float:
    """Return the share of the commonest pattern in a run's answers to training prompts, with other weights."""
    with trainer_with(run, change) as trainer:
        answers = trainer.answer_once(range(PATTERN_PROMPTS), 0)
        columns = [trainer.prompts.task.train[answer.prompt_index].columns for answer in answers]
    prompt_words = [column.get("words") or [column["subject"]] for column in columns]
    return commonest_pattern([answer.text for answer in answers], prompt_words)


def measure(run: Path) -> dict[str, Any]:
    """Return the shape of a plain run's update, the accuracy with other weights, and the shares of patterns."""
    if not (run / "snapshots").exists():
        return {}
    patterns = {f"commonest pattern at the {name}": measure_pattern(run, change) for name, change in ends(run)}
    return patterns | shape_of_path(run) | {OTHER_WEIGHTS: other_weights(run)}


class RightAnswersFirst(Rhyme):
    """Train on right answers of a better earlier run, and use no history after that."""

    def before_step(self, context: StepContext) -> list[list[Rollout]]:
        batches = super().before_step(context)
        self.use = HistoryUse.UNUSED
        return batches


def train_right_answers_first(turns: Turns, config: str, overrides: Sequence[str], folder: Path) -> None:
    """Train a run of `rhyme` that uses its database before the first steps alone."""
    trainer = harness.trainer_of(turns, config, rhyme.with_database(overrides, folder), folder)
    (accelerator,) = trainer.accelerators
    trainer.accelerators = [RightAnswersFirst(accelerator.settings)]
    trainer.run()


def after_earlier(name: str, *settings: str, train: Callable[..., None] = harness.train) -> Arm:
    """Make an arm that begins with what the earlier run has left."""
    return Arm(name, settings, after=EARLIER, rate=LEARNING_RATE, train=train)


def common(constraint: str, *, steps: int, eval_steps: int) -> list[str]:
    """Return the settings of all runs on one constraint."""
    return [
        f"task.constraint={constraint}", "model.path={work}/smollm2", "model.dtype=bfloat16", f"max_steps={steps}",
        f"evaluation.eval_steps={eval_steps}",
    ]  # fmt: skip


def study(constraint: str, *, steps: int, eval_steps: int, levels: Sequence[float]) -> Study:
    """Make the study of one constraint."""
    return Study(
        name=constraint,
        config=CONFIG,
        common=common(constraint, steps=steps, eval_steps=eval_steps),
        arms=[
            Arm("plain", [SNAPSHOTS], rate=LEARNING_RATE),
            *(replace(arm, rate=LEARNING_RATE) for arm in fewer_prompts(16, divisors=(4,), settings=[SNAPSHOTS])),
            Arm("twice the rate", rate=2 * LEARNING_RATE),
            after_earlier("rhyme", *RHYME, EARLIER_DATABASE, train=rhyme.train),
            after_earlier("its right answers, then plain", *RHYME, EARLIER_DATABASE, train=train_right_answers_first),
            after_earlier("its weights, 20 more steps", "model.path={earlier}/model", "max_steps=20"),
        ],
        levels=levels,
        earlier=[Arm(EARLIER, ["max_steps=30"], rate=LEARNING_RATE, train=rhyme.train)],
        prepare=prepare,
        columns={"rehearsed": "rhyme/rehearsed_answers"},
        measure=measure,
    )  # fmt: skip


STUDIES = [
    study("keys", steps=50, eval_steps=10, levels=(0.5, 0.8)),
    study("near", steps=100, eval_steps=20, levels=(0.3, 0.5)),
]
