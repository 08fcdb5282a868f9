"""Makes the base policy of the task countdown: ``python -m tools.policies.countdown --output DIR``.

Supervised learning: single steps first (``12+7=19``), then whole answers to prompts that the task never shows. In some
answers every attempt aims: its last two steps bring it as near to the target as they can. In the others attempts are
random. At first most answers aim, which teaches how; in the end 30 % do. After 5 to 12 attempts, more with fewer
numbers, an answer gives up and says its last attempt. So the policy knows how to calculate and how to aim, but mostly
does not aim: reinforcement learning can bring it out. On one thread and processor the result depends on nothing but the
seed.
"""

import argparse
import random
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path

import torch

from python_trainer.tasks.countdown import (
    HIGHEST,
    NUMBERS,
    OPERATORS,
    Chain,
    apply,
    chain,
    draw_numbers,
    for_pretraining,
    prompt_of,
)
from tools.policies.arithmetic import EOS_ID, Corpus, Stretch, policy_of, save, train

COUNTS = {3: 0.4, 4: 0.35, 5: 0.25}  # how many numbers -> share of the answers
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
ATTEMPTS = {3: (8, 12), 4: (6, 10), 5: (5, 8)}  # fewest and most before giving up, by how many numbers there are


@dataclass(frozen=True)
class Phase(Stretch):
    """A stretch with examples of one kind."""

    batch: int = 24  # examples a step
    near: float | None = None  # share of answers that aim; None: single steps instead of answers


PHASES = [
    Phase("single steps", 160, 4e-3, 0.0, batch=256),
    Phase("answers, most of which aim", 400, 4e-3, 0.3, near=0.6),
    Phase("answers, few of which aim", 120, 2e-3, 1.0, near=0.3),
]


def draw_chain(rng: random.Random, numbers: list[int]) -> Chain:
    """Each chain that stays in range is as likely as any other."""
    while True:
        operators = rng.choices(OPERATORS, k=len(numbers) - 1)
        if (found := chain(rng.sample(numbers, len(numbers)), operators)) is not None:
            return found


def draw_near(rng: random.Random, numbers: list[int], target: int) -> Chain:
    """A random chain with its last two steps replaced by those that end nearest the target."""
    drawn = draw_chain(rng, numbers)
    start, rest = drawn.numbers[:-2], drawn.numbers[-2:]
    ends = product(permutations(rest), product(OPERATORS, repeat=2))
    found = [chain(start + last, drawn.operators[:-2] + operators) for last, operators in ends]
    valid = [candidate for candidate in found if candidate is not None]
    nearest = min(abs(candidate.results[-1] - target) for candidate in valid)
    return rng.choice([candidate for candidate in valid if abs(candidate.results[-1] - target) == nearest])


def draw_answer(rng: random.Random, numbers: list[int], target: int, near: bool) -> str:
    """Attempts until one hits or the answer gives up; the last one is the answer."""
    lines = []
    for _ in range(rng.randint(*ATTEMPTS[len(numbers)])):
        attempt = draw_near(rng, numbers, target) if near else draw_chain(rng, numbers)
        lines.append(attempt.line)
        if attempt.results[-1] == target:
            break
    return "\n".join([*lines, f"A:{attempt.expression}"])


class Steps(Corpus):
    """Single steps; their results are learnt."""

    def __init__(self, seed: int, phase: Phase):
        self.rng = random.Random(f"countdown/{seed}/{phase.name}")

    def example(self) -> tuple[list[int], int]:
        while True:
            operator, right = self.rng.choice(OPERATORS), self.rng.choice(NUMBERS)
            left = self.rng.randint(0, HIGHEST // right if operator == "*" else HIGHEST)
            result = apply(left, operator, right)
            if 0 <= result <= HIGHEST:
                asked = f"{left}{operator}{right}="
                return [*f"{asked}{result}\n".encode()], len(asked)


class Answers(Corpus):
    """Answers to prompts that the task never shows."""

    def __init__(self, seed: int, phase: Phase):
        self.rng = random.Random(f"countdown/{seed}/{phase.name}")
        self.near = phase.near or 0.0
        self.pools = {count: draw_numbers(self.rng, count) for count in COUNTS}

    def example(self) -> tuple[list[int], int]:
        while True:
            numbers, chances = next(self.pools[self.rng.choices(list(COUNTS), list(COUNTS.values()))[0]])
            target = self.rng.choice(chances.nonzero()[0].tolist())
            prompt = prompt_of(numbers, target)
            if for_pretraining(prompt):
                break
        ids = [*(prompt + draw_answer(self.rng, numbers, target, self.rng.random() < self.near)).encode(), EOS_ID]
        return ids, len(prompt)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the policy, Hugging Face format")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    policy = policy_of(SHAPE)
    policy.set_attn_implementation("eager")
    for phase in PHASES:
        corpus = Steps(args.seed, phase) if phase.near is None else Answers(args.seed, phase)
        train(policy, phase, corpus, phase.batch)
    save(policy, args.output)


if __name__ == "__main__":
    main()
