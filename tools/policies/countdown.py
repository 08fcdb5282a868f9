"""Makes the base policy of the task countdown: ``python -m tools.policies.countdown --output DIR``.

Supervised learning on prompts that the task never shows: single attempts first, then whole answers. In some answers
every attempt aims, its last steps or its last operator chosen by the target; in the others attempts are random. After
5 to 12 attempts an answer gives up and says its last one, which teaches to stop at a hit. Then only those that aim go
on for long, the others give up after 2 to 5. At first most answers aim, which teaches how; in the end 30 % do. So the
policy knows how to calculate, how to aim and how to go on, but mostly does neither: reinforcement learning can bring it
out. A whole number is a token. On one thread and processor the result depends on nothing but the seed; it takes about
45 minutes. `--size small` has a quarter of the weights.
"""

import random
from dataclasses import dataclass, field
from itertools import permutations, product

from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from python_trainer.tasks.countdown import (
    HIGHEST,
    OPERATORS,
    Chain,
    chain,
    draw_numbers,
    for_pretraining,
    prompt_of,
)
from tools.policies.arithmetic import EOS, PAD, SHAPES, START, Corpus, Stretch, policy_of, save, train
from tools.policies.maker import begin

Patience = dict[int, tuple[int, int]]  # how many numbers -> fewest and most attempts before giving up
STEADY: Patience = {3: (8, 12), 4: (6, 10), 5: (5, 8)}
LONG: Patience = {3: (10, 12), 4: (9, 11), 5: (7, 8)}
SHORT: Patience = {3: (2, 5), 4: (2, 5), 5: (2, 4)}
EVENLY = {3: 0.3, 4: 0.35, 5: 0.35}  # how many numbers -> share of the answers
SYMBOLS = [*map(str, range(HIGHEST + 1)), *"+-*=,\n>:A() "]
VOCABULARY = {symbol: number for number, symbol in enumerate([*SYMBOLS, PAD, START, EOS])}


@dataclass(frozen=True, kw_only=True)
class Phase(Stretch):
    """A stretch with answers of one kind."""

    batch: int  # examples a step
    near: float  # share of answers that aim
    likely: float = 0.0  # share of targets at which a random chain ends; the others are any that can be reached
    most: int = 12  # attempts in an answer
    counts: dict[int, float] = field(default_factory=dict)  # how many numbers -> share of the answers
    aimed: int = 2  # last steps of an attempt that are chosen by the target; 1: its last operator
    patience: Patience = field(default_factory=lambda: STEADY)
    aimed_patience: Patience = field(default_factory=lambda: STEADY)  # of answers that aim
    stream: int  # of random numbers
    rounded: bool = False  # the weights go through bfloat16 before it


PHASES = [
    Phase("one attempt", 800, 4e-3, 0.0, warmup=30, batch=192, near=0.5, most=1, counts={3: 0.6, 4: 0.3, 5: 0.1},
          stream=1),
    Phase("answers", 500, 4e-3, 0.3, warmup=30, batch=48, near=0.6, counts={3: 0.4, 4: 0.35, 5: 0.25}, stream=2),
    Phase("answers that hit more often", 450, 3e-3, 0.0, warmup=30, batch=48, near=0.5, likely=0.6,
          counts=EVENLY, stream=12),
    Phase("answers, few of which aim", 300, 2.5e-3, 1.0, warmup=30, batch=48, near=0.3, likely=0.6,
          counts=EVENLY, stream=13),
    Phase("those that aim go on for long", 350, 3e-3, 0.2, warmup=30, batch=48, near=0.8, likely=0.6, aimed=1,
          counts=EVENLY, patience=SHORT, aimed_patience=LONG, stream=22, rounded=True),
    Phase("the same, few of which aim", 250, 2.5e-3, 1.0, warmup=30, batch=48, near=0.3, likely=0.6, aimed=1,
          counts=EVENLY, patience=SHORT, aimed_patience=LONG, stream=23),
]  # fmt: skip


def number_tokenizer() -> Qwen2Tokenizer:
    """Tokens are the numbers 0 to 99 and single characters."""
    as_bytes = {"\n": "\u010a", " ": "\u0120"}  # as byte-level vocabularies spell them
    tokenizer = Qwen2Tokenizer(
        vocab={as_bytes.get(symbol, symbol): number for symbol, number in VOCABULARY.items()},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # other characters have no token
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[START],
        model_max_length=1024,
    )
    # Qwen2 splits digits from each other, but added tokens are found before that
    tokenizer.add_tokens([AddedToken(str(n), normalized=False, special=False) for n in range(10, HIGHEST + 1)])
    return tokenizer


def draw_chain(rng: random.Random, numbers: list[int]) -> Chain:
    """Each chain that stays in range is as likely as any other."""
    while True:
        operators = rng.choices(OPERATORS, k=len(numbers) - 1)
        if (found := chain(rng.sample(numbers, len(numbers)), operators)) is not None:
            return found


def draw_near(rng: random.Random, numbers: list[int], target: int, steps: int) -> Chain:
    """A random chain with its last steps replaced by those that end nearest the target."""
    drawn = draw_chain(rng, numbers)
    start, rest = drawn.numbers[:-steps], drawn.numbers[-steps:]
    ends = product(permutations(rest), product(OPERATORS, repeat=steps))
    found = [chain(start + last, drawn.operators[:-steps] + operators) for last, operators in ends]
    valid = [candidate for candidate in found if candidate is not None]
    nearest = min(abs(candidate.results[-1] - target) for candidate in valid)
    return rng.choice([candidate for candidate in valid if abs(candidate.results[-1] - target) == nearest])


def draw_answer(
    rng: random.Random, numbers: list[int], target: int, attempts: tuple[int, int], aimed: int = 0, most: int = 12
) -> str:
    """Attempts until one hits or the answer gives up; the last one is the answer.

    Args:
        attempts: fewest and most.
        aimed: steps, at the end of each, that are chosen by the target; 0: none.
    """
    lines = []
    for _ in range(min(rng.randint(*attempts), most)):
        attempt = draw_near(rng, numbers, target, aimed) if aimed else draw_chain(rng, numbers)
        lines.append(attempt.line)
        if attempt.results[-1] == target:
            break
    return "\n".join([*lines, f"A:{attempt.expression}"])


class Answers(Corpus):
    """Answers to prompts that the task never shows."""

    pad_id = VOCABULARY[PAD]

    def __init__(self, seed: int, phase: Phase):
        self.rng, self.phase, self.tokenizer = random.Random(100 * seed + phase.stream), phase, number_tokenizer()
        self.pools = {count: draw_numbers(self.rng, count) for count in phase.counts}

    def example(self) -> tuple[list[int], int]:
        rng, phase, prompt = self.rng, self.phase, ""
        while not prompt or not for_pretraining(prompt):
            numbers, chances = next(self.pools[rng.choices(list(phase.counts), list(phase.counts.values()))[0]])
            if phase.likely and rng.random() < phase.likely:
                target = rng.choices(range(HIGHEST + 1), chances.tolist())[0]
            else:
                target = rng.choice(chances.nonzero()[0].tolist())
            prompt = prompt_of(numbers, target)
        near = rng.random() < phase.near
        attempts = (phase.aimed_patience if near else phase.patience)[len(numbers)]
        answer = draw_answer(rng, numbers, target, attempts, phase.aimed if near else 0, phase.most)
        asked, said = (self.tokenizer(text).input_ids for text in (prompt, answer))
        return [*asked, *said, VOCABULARY[EOS]], len(asked)


def main(argv: list[str] | None = None) -> None:
    args = begin(__doc__, argv, ("main", "small"))
    policy = policy_of(SHAPES[args.size], VOCABULARY[PAD], VOCABULARY[EOS])
    for phase in PHASES:
        if phase.rounded:
            policy.bfloat16().float()
        train(policy, phase, Answers(args.seed, phase), phase.batch, chunk_tokens=4096)
    save(policy, args.output, number_tokenizer())


if __name__ == "__main__":
    main()
