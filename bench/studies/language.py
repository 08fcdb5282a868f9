"""A real language model, SmolLM2-135M, on problems of words and on sums.

*gsm8k*: GSM8K's problems of one to three steps, after supervised steps on half. Right answers are rare, and have 60 to
200 tokens. Training uses the other half; an evaluation samples four answers to every test problem. *sampled answers
first*: the first policy samples four answers to every training prompt, charged, and trains on the right ones before
the first step.

*sums*: sums of 2 to 10 terms, after supervised steps on solved ones. Six of ten answers are right, so plain training
gains within half an hour on a CPU.

Weights are bfloat16, with float32 copies in the optimizer. The weights of the plain run show how much of its gain the
leading ranks of its update keep, how straight its path is, and the accuracy of a prediction after 40 % of the steps.
"""

import gc
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench._turns import Turns
from bench.studies import harness, rhyme
from bench.studies.harness import ACCURACY, OTHER_WEIGHTS, Arm, Study, evaluations, fewer_prompts
from bench.studies.ranks import HISTORY, other_weights, shape_of_path
from bench.studies.rhyme import DATABASE, RHYME
from python_trainer import load_config
from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.rhyme.accelerator import REHEARSAL_BATCH, REHEARSALS
from python_trainer.accelerators.rhyme.replay import in_batches
from python_trainer.accelerators.rhyme.sampling import MAX_IMPORTANCE_WEIGHT
from python_trainer.command_line.sft import Sft
from python_trainer.data import Rollout, by_group
from python_trainer.run.directory import read_metrics
from python_trainer.tasks.sums import TERMS, draw_terms, prompt_of, solution

CONFIG = "configs/gsm8k_smollm2.yaml"
EPOCHS = 4  # of the supervised steps: they bring the accuracy near 0.1
LEARNING_RATE = 1e-5
SAMPLED_ANSWERS = 4  # to every prompt before the first step, in the arms that begin with them
MODEL = ["model.dtype=bfloat16", "optimizer.micro_batch_tokens=4096"]
HALVES = "{work}/short_train.jsonl:train[:50%]", "{work}/short_train.jsonl:train[50%:]"
TEST = ["task.test_path={work}/short_test.jsonl", "task.test_size=null"]
GSM8K_FILES = ("short_train.jsonl", "short_test.jsonl")
SUMS = "configs/sums.yaml"
SUMS_RATE = 5e-5
SOLVED_SUMS = 1024  # in the supervised steps


def prepare(work: Path) -> None:
    """Take the supervised steps on GSM8K, unless they are done."""
    if missing := [name for name in GSM8K_FILES if not (work / name).exists()]:
        raise SystemExit(f"{work} lacks {', '.join(missing)}: the command jq at the head of {CONFIG} makes them")
    settings = [f"task.train_path={HALVES[0]}", *TEST, f"sft.epochs={EPOCHS}", "save.save_steps=100"]
    take_supervised_steps(work, "smollm2-sft", CONFIG, settings)


def prepare_sums(work: Path) -> None:
    """Write solved sums, which no seed of the task has, and take the supervised steps, unless they are done."""
    rng = random.Random("solved sums")
    path = work / "sums.jsonl"
    drawn = [draw_terms(rng, TERMS["short"]) for _ in range(SOLVED_SUMS)]
    path.write_text("".join(json.dumps({"prompt": prompt_of(t), "answer": solution(t)}) + "\n" for t in drawn))
    splits = [f"task.train_path={path}:train[64:]", f"task.test_path={path}:train[:64]"]
    settings = ["task.name=jsonl", "task.reward=math", *splits, "sft.epochs=2", "sft.batch_tokens=1024"]
    take_supervised_steps(work, "smollm2-sums", SUMS, settings)


def take_supervised_steps(work: Path, name: str, config: str, settings: Sequence[str]) -> None:
    """Train the model of the Hub on reference answers into ``work/name``, unless that exists."""
    if not (work / "smollm2" / "config.json").exists():
        raise SystemExit(f"{work} lacks smollm2: put the Hub's HuggingFaceTB/SmolLM2-135M-Instruct there")
    if (work / name / "model").exists():
        return
    model = ["model.path={work}/smollm2", "optimizer.learning_rate=1e-4", "save.save_total_limit=1", *MODEL]
    settings = [text.replace("{work}", str(work)) for text in [*settings, *model]]
    Sft(load_config(config, settings), work / name, resume=True).run()
    gc.collect()
    torch.cuda.empty_cache()  # for the runs


class SampledFirst(Accelerator):
    """Train on right answers of the first policy before the first step, as ``rhyme`` does on those of another run."""

    name = "sampled first"
    enabled = False  # so that checkpoints do not require it

    def begin(self, run: RunContext) -> None:
        prompts = range(len(run.prompts))
        answers = [answer for attempt in range(SAMPLED_ANSWERS) for answer in run.answer(prompts, attempt)]
        self.right_answers = [answer for answer in answers if answer.right]
        run.note(f"{len(self.right_answers)} of {len(answers)} sampled answers are right")

    def before_step(self, context: StepContext) -> list[list[Rollout]]:
        if context.step > 1:
            return []
        stored = [
            replace(answer, group=answer.prompt_index, logprobs=[float("nan")] * len(answer.ids), success_rate=0.5,
                    importance_cap=MAX_IMPORTANCE_WEIGHT)
            for answer in self.right_answers
        ]  # fmt: skip
        context.telemetry["rhyme/rehearsed_answers"] = float(REHEARSALS * len(stored))
        return in_batches(list(by_group(stored).values()), REHEARSAL_BATCH, REHEARSALS, context.seed)


def train_sampled_first(turns: Turns, config: str, overrides: Sequence[str], folder: Path) -> None:
    """Train a run that starts with right answers of its first policy."""
    trainer = harness.trainer_of(turns, config, overrides, folder)
    trainer.accelerators = [*trainer.accelerators, SampledFirst(None)]
    trainer.run()


def measure(run: Path) -> dict[str, Any]:
    """Return the accuracy at the start and pass@k at the end; of a plain run also its ranks."""
    *_, last = (row for row in read_metrics(run) if ACCURACY in row)
    figures: dict[str, Any] = {"accuracy at the start": evaluations(run)[0][3]}
    figures |= {f"{key.removeprefix('eval/')} at the end": last[key] for key in last if key.startswith("eval/pass@")}
    if run.parent.name == "plain":
        figures |= shape_of_path(run) | {OTHER_WEIGHTS: other_weights(run)}
    return figures


ARMS = [
    Arm("plain", [HISTORY]),
    *fewer_prompts(16),
    Arm("twice the rate", rate=2 * LEARNING_RATE),
    Arm("dynamic sampling", ["rollout.dynamic_sampling=true"]),
    Arm("rpo", ["accelerators.enabled=[rpo]", f"accelerators.rpo.fill={SAMPLED_ANSWERS}"]),
    Arm("sampled answers first", train=train_sampled_first),
    Arm("rhyme after a plain run", [*RHYME, f"{DATABASE}={{earlier}}.db"], after="earlier plain", train=rhyme.train),
]
STUDIES = [
    Study(
        name="gsm8k",
        config=CONFIG,
        common=[
            f"task.train_path={HALVES[1]}", *TEST, "model.path={work}/smollm2-sft/model", *MODEL,
            "max_steps=100", "rollout.engine=paged", "rollout.prompts_per_step=16", "rollout.num_generations=8",
            "rollout.max_completion_length=200", f"rollout.memory_bytes={3 << 30}", "evaluation.eval_steps=20",
            "evaluation.eval_limit_during=null", "evaluation.samples=4", "save.save_steps=50",
            "save.save_total_limit=1",
        ],
        arms=[arm if arm.rate else replace(arm, rate=LEARNING_RATE) for arm in ARMS],
        levels=(0.12, 0.15),
        earlier=[Arm("earlier plain", rate=LEARNING_RATE, train=rhyme.train)],
        prepare=prepare,
        columns={"stored": "rhyme/stored_answers", "rehearsed": "rhyme/rehearsed_answers"},
        measure=measure,
    ),
    Study(
        name="sums",
        config=SUMS,
        common=[
            "task.variant=short", "task.test_size=512", "model.path={work}/smollm2-sums/model", *MODEL, "max_steps=60",
            "rollout.engine=paged", "rollout.max_completion_length=160", "evaluation.eval_limit_during=null",
            "evaluation.samples=2", "evaluation.eval_steps=20", "save.save_steps=12", "save.save_total_limit=1",
        ],
        arms=[
            Arm("plain", [HISTORY], rate=SUMS_RATE),
            *(replace(arm, rate=SUMS_RATE) for arm in fewer_prompts(16)),
            Arm("twice the rate", rate=2 * SUMS_RATE),
        ],
        levels=(0.6, 0.7, 0.8),
        prepare=prepare_sums,
        measure=measure,
    ),
]  # fmt: skip
