"""Suffix rollouts (RPO), by where the policy's errors lie.

Sums of ten terms, answers of about 110 tokens. Three policies slip in the last third of an answer, anywhere, or in the
first third, and are otherwise alike: about half of their answers are right. The paper's setting is errors
that lie late. Filling the cache is charged. The last columns are shares of plain answers to test prompts, by where
their first error lies.
"""

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from transformers import Qwen2ForCausalLM

from bench.studies.harness import Arm, Study, fewer_prompts
from python_trainer import Trainer, load_config
from python_trainer.model.hub import policy_folder
from python_trainer.tasks.sums import prompt_of, solution
from tools.policies.sums import SLIPS
from tools.policies.training import EOS_ID, Corpus, Stretch, save, train

TERMS = 10
STEPS = TERMS - 1  # of an answer: one sum each
TRAIN_PROMPTS = 192
TEST_PROMPTS = 2048
# part of the answer in which the policy slips: from, to, chance of a step
SLIP_CHANCES = {"late": (2 / 3, 1.0, 0.19), "anywhere": (0.0, 1.0, 0.068), "early": (0.0, 1 / 3, 0.19)}
SLIP_TRAINING = Stretch("slips", 240, 2e-3, 1.0)
PARTS = {"early": (0.0, 1 / 3), "middle": (1 / 3, 2 / 3), "late": (2 / 3, 1.01)}  # where a first error lies
MEASURED_PROMPTS = 512  # test prompts for the share of first errors in each part


class SlippingSums(Corpus):
    """Endless sums of ten terms; steps in one part of the answer slip at random, and later steps build on the slips."""

    def __init__(self, part: str, held_out: set[str]):
        self.rng = random.Random(f"rpo/{part}")
        self.held_out = held_out
        self.first, self.last, self.chance = SLIP_CHANCES[part]

    def example(self) -> tuple[list[int], int]:
        prompt = ""
        while not prompt or prompt in self.held_out:
            terms = self.rng.sample(range(10, 100), TERMS)
            prompt = prompt_of(terms)
        partial = terms[0]
        lines = []
        for step, term in enumerate(terms[1:]):
            slips = self.first <= step / STEPS < self.last and self.rng.random() < self.chance
            result = partial + term + (self.rng.choice(SLIPS) if slips else 0)
            lines.append(f"{partial}+{term}={result}")
            partial = result
        answer = "\n".join([*lines, f"A:{partial}"])
        return [*(prompt + answer).encode(), EOS_ID], len(prompt)


def prepare(part: str, work: Path) -> None:
    """Write the prompts, and train the shipped policy of `sums` to slip in one part of an answer."""
    rng = random.Random("rpo")
    seen = set[str]()
    for name, num_prompts in (("train", TRAIN_PROMPTS), ("test", TEST_PROMPTS)):
        rows: list[str] = []
        while len(rows) < num_prompts:
            terms = rng.sample(range(10, 100), TERMS)
            if (prompt := prompt_of(terms)) not in seen:
                seen.add(prompt)
                rows.append(json.dumps({"prompt": prompt, "answer": sum(terms)}) + "\n")
        (work / f"{name}.jsonl").write_text("".join(rows))
    folder = work / f"slips-{part}"
    if not (folder / "tokenizer.json").exists():
        torch.manual_seed(0)
        policy = Qwen2ForCausalLM.from_pretrained(policy_folder("sums"), dtype=torch.float32)
        train(policy, SLIP_TRAINING, SlippingSums(part, seen), batch=48, chunk_tokens=4096)
        save(policy, folder)


def first_error(prompt: str, completion: str) -> float | None:
    """Return the position of the first wrong line of an answer, from 0 to 1; None: there is none."""
    terms = [int(term) for term in prompt.removesuffix("=").split("+")]
    lines = completion.split("\n")
    for number, line in enumerate(solution(terms).split("\n")):
        if number >= len(lines) or lines[number] != line:
            return number / (len(terms) - 1)
    return None


def errors_in(part: str, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return 1 for each answer whose first error lies in the part, else 0."""
    low, high = PARTS[part]
    positions = [first_error(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
    return [float(position is not None and low <= position < high) for position in positions]


def early(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    return errors_in("early", prompts, completions)


def middle(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    return errors_in("middle", prompts, completions)


def late(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    return errors_in("late", prompts, completions)


def measure(run: Path) -> dict[str, float]:
    """Return the share of the trained policy's answers with the first error in each part, with the same sampling."""
    shares = {}
    for part in PARTS:
        overrides = [f"model.path={run / 'model'}", f"task.reward=bench.studies.rpo:{part}", "accelerators.enabled=[]"]
        with TemporaryDirectory() as folder:
            trainer = Trainer(load_config(run / "config.yaml", overrides), folder, console=Console(quiet=True))
            shares[f"first error {part}"] = trainer.evaluate("test", MEASURED_PROMPTS)
    return shares


COMMON = [
    "task={name: jsonl, train_path: '{work}/train.jsonl', test_path: '{work}/test.jsonl', "
    "reward: 'python_trainer.tasks.sums:accuracy'}",
    "max_steps=40", "rollout.max_completion_length=160", "evaluation.eval_steps=5",
    "evaluation.eval_limit_during=512", "save.save_steps=10", "save.save_total_limit=1",
]  # fmt: skip
RPO = ["accelerators.enabled=[rpo]", "accelerators.rpo.fill=4"]
PAPER = [
    "accelerators.enabled=[rpo]", "accelerators.rpo.preset=paper", "accelerators.rpo.cut_tokens=33",
]  # fmt: skip
ARMS = [
    Arm("plain"),
    *fewer_prompts(16),
    Arm("rpo as in the paper, cuts of 0.3", PAPER),
    *(
        Arm(f"rpo, cuts of {cut}{name}", [*RPO, f"accelerators.rpo.cut_share={cut}", *settings])
        for cut in (0.3, 0.5)
        for name, settings in (("", []), (", no whole answers", ["accelerators.rpo.whole_share=0"]))
    ),
    Arm("rpo, cuts of the whole answer", RPO),
]
STUDIES = [
    Study(
        name=f"errors {part}",
        config="configs/sums.yaml",
        common=[*COMMON, f"model.path={{work}}/slips-{part}"],
        arms=ARMS,
        levels=(0.7, 0.8, 0.85),
        rates=(1e-4, 2e-4, 4e-4),
        tuning_steps=20,
        prepare=partial(prepare, part),
        measure=measure,
    )
    for part in SLIP_CHANCES
]
