"""SmolLM2-135M learns to write sentences under a constraint: examples/sentences.py, without supervised steps.

*keys*: one short sentence with three given words. *near*: one sentence whose number of words is within one of the given
one. An evaluation is one answer to each test prompt.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.studies.harness import OTHER_WEIGHTS, Arm, Study, fewer_prompts
from bench.studies.ranks import SNAPSHOTS, Change, ends, other_weights, shape_of_path, trainer_with

EXAMPLES = Path(__file__).parents[2] / "examples"
LEARNING_RATE = 2e-5
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


def study(constraint: str, *, steps: int, eval_steps: int, levels: Sequence[float]) -> Study:
    """Make the study of one constraint."""
    return Study(
        name=constraint,
        config=str(EXAMPLES / "sentences.yaml"),
        common=[
            f"task.constraint={constraint}", "model.path={work}/smollm2", f"max_steps={steps}",
            f"evaluation.eval_steps={eval_steps}",
        ],
        arms=[
            Arm("plain", [SNAPSHOTS], rate=LEARNING_RATE),
            *(replace(arm, rate=LEARNING_RATE) for arm in fewer_prompts(16, divisors=(4,), settings=[SNAPSHOTS])),
            Arm("twice the rate", rate=2 * LEARNING_RATE),
        ],
        levels=levels,
        prepare=prepare,
        measure=measure,
    )  # fmt: skip


STUDIES = [
    study("keys", steps=50, eval_steps=10, levels=(0.5, 0.8)),
    study("near", steps=100, eval_steps=20, levels=(0.3, 0.5)),
]
