"""SmolLM2-135M learns to write sentences under a constraint: examples/sentences.py, without supervised steps.

*keys*: one short sentence with three given words. *near*: one sentence whose number of words is within one of the given
one; *count*: exactly that many words. *form*: five lines, the last one with two given words. An evaluation is one
answer to each test prompt. Weights are bfloat16, with float32 copies in the optimizer. *count* has 128 prompts, which
return every eight steps, *form* 64, which return every four; both have twice the rate.

*alpha as in the paper* and *alpha, gated* predict once, after 20 of the 50 steps of *keys*, and train on to the end.

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
RPO = ["accelerators.enabled=[rpo]"]
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
    """Return the share of the commonest pattern at the end; of plain runs also the shape and effect of their update."""
    patterns = {f"commonest pattern at the {name}": measure_pattern(run, change) for name, change in ends(run)}
    if not (run / "snapshots").exists():
        return patterns
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


def common(constraint: str, *settings: str, steps: int, eval_steps: int) -> list[str]:
    """Return the settings of all runs on one constraint."""
    return [
        f"task.constraint={constraint}", "model.path={work}/smollm2", "model.dtype=bfloat16", f"max_steps={steps}",
        f"evaluation.eval_steps={eval_steps}", *settings,
    ]  # fmt: skip


def with_rate(arms: Sequence[Arm], rate: float, name: str = "") -> list[Arm]:
    """Give arms a learning rate, and names that end with this one."""
    return [replace(arm, rate=rate, name=arm.name + name) for arm in arms]


(QUARTER,) = fewer_prompts(16, divisors=(4,))
PLAIN_AND_QUARTER = [Arm("plain"), QUARTER]
SUFFIXES = Arm("rpo", [*RPO, "accelerators.rpo.cut_share=0.4", "accelerators.rpo.fill=4"])
# As in AlphaRL, a prediction after 40 % of the 50 steps of `keys`; these runs then train on.
PREDICTED = ["accelerators.enabled=[alpha]", "accelerators.alpha.first_step=20"]
ALPHA = [
    Arm("alpha as in the paper", [*PREDICTED, "accelerators.alpha.preset=paper"]),
    Arm(
        "alpha, gated",
        [*PREDICTED, "accelerators.alpha.every=0", "accelerators.alpha.horizon=2.5", "task.gate_size=512"],
    ),
]
TWICE_AS_LONG = Arm(f"{QUARTER.name}, twice the steps", [*QUARTER.settings, "max_steps=32"])  # as `form` has 16
SNAPSHOTTED = [replace(arm, settings=[SNAPSHOTS, *arm.settings]) for arm in PLAIN_AND_QUARTER]
STUDIES = [
    Study(
        name="keys",
        config=CONFIG,
        common=common("keys", steps=50, eval_steps=10),
        arms=[
            *with_rate(SNAPSHOTTED, LEARNING_RATE),
            *with_rate(PLAIN_AND_QUARTER, 2 * LEARNING_RATE, ", twice the rate"),
            *with_rate(PLAIN_AND_QUARTER, 4 * LEARNING_RATE, ", four times the rate"),
            *with_rate(PLAIN_AND_QUARTER, 8 * LEARNING_RATE, ", eight times the rate"),
            *with_rate(ALPHA, LEARNING_RATE),
            after_earlier("rhyme", *RHYME, EARLIER_DATABASE, train=rhyme.train),
            after_earlier("its right answers, then plain", *RHYME, EARLIER_DATABASE, train=train_right_answers_first),
            after_earlier("its weights, 20 more steps", "model.path={earlier}/model", "max_steps=20"),
        ],
        levels=(0.5, 0.8),
        earlier=[Arm(EARLIER, ["max_steps=30"], rate=LEARNING_RATE, train=rhyme.train)],
        prepare=prepare,
        columns={"rehearsed": "rhyme/rehearsed_answers", "jumped": "alpha/accepted"},
        measure=measure,
    ),
    Study(
        name="near",
        config=CONFIG,
        common=common("near", steps=100, eval_steps=20),
        arms=with_rate(SNAPSHOTTED, LEARNING_RATE),
        levels=(0.3, 0.5),
        prepare=prepare,
        measure=measure,
    ),
    Study(
        name="count",
        config=CONFIG,
        common=common("count", "task.train_size=128", steps=32, eval_steps=8),
        arms=with_rate(
            [
                *PLAIN_AND_QUARTER,
                Arm("8 prompts of 16 answers", ["rollout.prompts_per_step=8", "rollout.num_generations=16"]),
                Arm("dynamic sampling", ["rollout.dynamic_sampling=true"]),
                Arm("rhyme", RHYME, train=rhyme.train),
            ],
            2 * LEARNING_RATE,
        )
        + with_rate(PLAIN_AND_QUARTER, 4 * LEARNING_RATE, ", twice the rate"),
        levels=(0.05, 0.1),
        prepare=prepare,
    ),
    Study(
        name="form",
        config=CONFIG,
        common=common("form", "task.train_size=64", "rollout.max_completion_length=80", steps=16, eval_steps=4),
        arms=with_rate(
            [
                Arm("plain"),
                *fewer_prompts(16),
                TWICE_AS_LONG,
                SUFFIXES,
                Arm("rpo as in the paper", [*RPO, "accelerators.rpo.preset=paper", "accelerators.rpo.cut_tokens=20"]),
            ],
            2 * LEARNING_RATE,
        )
        + with_rate([Arm("plain"), TWICE_AS_LONG, SUFFIXES], 4 * LEARNING_RATE, ", twice the rate"),
        levels=(0.3, 0.5),
        prepare=prepare,
    ),
]  # fmt: skip
