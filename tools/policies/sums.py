"""Makes the base policy of the task ``sums``: ``python -m tools.policies.sums --output DIR``.

The shipped policy ``main``, taught on with fresh sums of all lengths in which every step may be wrong, by a unit or a
ten, with a chance that belongs to the step (:func:`slip_chance`); later steps build on it. So its errors compound.
On one thread and processor the result depends on nothing but the seed.
"""

import random

import torch
from transformers import Qwen2ForCausalLM

from python_trainer.model.shipped import policy_folder
from python_trainer.tasks.arithmetic import draw_terms, prompt_of
from python_trainer.tasks.sums import TERMS, SumsSettings
from tools.policies.arithmetic import EOS_ID, SLIPS, Corpus, Stretch, save, train
from tools.policies.maker import begin, prompts_of

CHANCE = 0.06  # of a slip in a step beyond 99 where nothing is carried
CARRY = 3.0  # times as likely with a carry
# Short sums have few tokens: as often as in the task they would hardly be heard.
TAUGHT = {count: weight * (4.0 if count <= 4 else 1.0) for count, weight in TERMS.items()}
PHASE = Stretch("slips in every step", 240, 2e-3, 1.0)


def carries(left: int, right: int) -> bool:
    """Whether some column of the two, as they stand, adds up to more than nine."""
    while left and right:
        if left % 10 + right % 10 > 9:
            return True
        left, right = left // 10, right // 10
    return False


def slip_chance(left: int, right: int) -> float:
    """Chance of a wrong result of ``left + right``."""
    return 0.0 if left < 100 else CHANCE * (CARRY if carries(left, right) else 1.0)


def slipping_solution(terms: list[int], rng: random.Random) -> str:
    """The answer with its partial sums, each step wrong with its own chance."""
    partial, lines = terms[0], []
    for term in terms[1:]:
        slip = rng.choice(SLIPS) if rng.random() < slip_chance(partial, term) else 0
        lines.append(f"{partial}+{term}={partial + term + slip}")
        partial += term + slip
    return "\n".join([*lines, f"A:{partial}"])


class SlippingSums(Corpus):
    """Endless sums that are no prompt of the shipped task, with slips in every step."""

    def __init__(self, seed: int, phase: Stretch):
        self.rng = random.Random(f"sums/{seed}/{phase.name}")
        self.held_out = prompts_of(SumsSettings().load())

    def example(self) -> tuple[list[int], int]:
        prompt = ""
        while not prompt or prompt in self.held_out:
            terms = draw_terms(self.rng, TAUGHT)
            prompt = prompt_of(terms)
        return [*(prompt + slipping_solution(terms, self.rng)).encode(), EOS_ID], len(prompt)


def main(argv: list[str] | None = None) -> None:
    args = begin(__doc__, argv)
    policy = Qwen2ForCausalLM.from_pretrained(policy_folder("main"), dtype=torch.float32)
    train(policy, PHASE, SlippingSums(args.seed, PHASE), batch=48, chunk_tokens=4096)
    save(policy, args.output)


if __name__ == "__main__":
    main()
