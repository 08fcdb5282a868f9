"""Make the base policies of the task ``sums``: ``python -m tools.policies.sums --size medium --output DIR``.

Supervised learning on fresh sums, none of which is a prompt of the shipped task (seed 0), in three phases: short sums;
sums of all lengths; and sums of all lengths where in some answers one random step is wrong (a unit or a ten too many
or too few) and later steps build on it. Greedy decoding stays right, and sampled answers are right a little under half
of the time. ``small`` ends there and ships with the package.

``medium`` learns on with sums of all lengths in which every step may be wrong, with a chance that belongs to the step
(:func:`slip_chance`). So its errors compound. It ships with the package as ``sums``. On one thread and processor the
result depends on nothing but the seed.

``large`` is made on a GPU (``--device cuda``), for answers of 500 tokens; it does not ship. Its phases end after so
many seconds at the latest. At the end its accuracy is measured, and while too many or too few of its sampled answers
are right, it learns on with another share of slips. ``tiny`` goes the same way in seconds, for tests.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from python_trainer.data import Example
from python_trainer.tasks.sums import (
    SIZES,
    TERMS,
    Variant,
    draw_examples,
    draw_terms,
    final_answer,
    prompt_of,
    solution,
)
from tools.policies.training import CHUNK_TOKENS, EOS_ID, PAD_ID, Corpus, Stretch, new_policy, save, train

BATCH = {"medium": 64, "small": 64, "large": 256, "tiny": 4}  # examples a step
SLIPS = (-10, -1, 1, 10)
RIGHT = (0.35, 0.65)  # share of its sampled answers that are to be right, where a policy is measured
FACTS = "pretrain.json"  # beside the weights of a policy that was measured: steps, seconds, accuracies
CHANCE = 0.06  # of a slip in a step beyond 99 where nothing is carried
CARRY = 3.0  # times as likely with a carry
# Short sums have few tokens: as often as in the task they would hardly be heard.
TAUGHT = {count: weight * (4.0 if count <= 4 else 1.0) for count, weight in TERMS["all"].items()}


LONG = {n: 1.0 for n in range(20, 25)}  # numbers of terms


@dataclass(frozen=True)
class Part:
    """A share of the training examples."""

    share: float
    terms: dict[int, float]  # number of terms -> weight
    slip_share: float  # share of its answers with one wrong step, in the phase with slips


SHORT = [Part(1.0, TERMS["short"], 0.68)]
ALL = [
    Part(0.83, TERMS["short"], 0.68),
    Part(0.06, {n: 1.0 for n in range(11, 20)}, 0.55),  # joins the short and the long variant
    Part(0.11, LONG, 0.45),
]
UP_TO_LONGEST = [
    Part(0.60, TERMS["short"], 0.5),
    Part(0.10, {n: 1.0 for n in range(11, 20)}, 0.5),
    Part(0.10, LONG, 0.5),
    Part(0.08, {n: 1.0 for n in range(25, 40)}, 0.5),
    Part(0.12, TERMS["longest"], 0.5),
]


@dataclass(frozen=True, kw_only=True)
class Phase(Stretch):
    """A stretch on sums."""

    mixture: list[Part]
    slips: bool  # whether some answers have a wrong step


@dataclass(frozen=True)
class Aim:
    """What a policy is measured on, and how often it learns on until as many answers are right as should be."""

    variant: Variant
    prompts: int  # of the test split that are answered for it
    rounds: int = 2  # of learning on, at most


PHASES = {
    "medium": [
        Phase("short sums", 500, 4e-3, 0.0, mixture=SHORT, slips=False),
        Phase("all lengths", 400, 4e-3, 0.5, mixture=ALL, slips=False),
        Phase("slips", 200, 2e-3, 1.0, mixture=ALL, slips=True),
    ],
    "small": [
        Phase("short sums", 800, 6e-3, 0.0, mixture=SHORT, slips=False),
        Phase("all lengths", 600, 6e-3, 0.6, mixture=ALL, slips=False),
        Phase("slips", 400, 3e-3, 1.0, mixture=ALL, slips=True),
    ],
    "large": [
        Phase("short sums", 300, 2e-3, 0.0, 45, mixture=SHORT, slips=False),
        Phase("all lengths", 800, 2e-3, 0.5, 150, mixture=UP_TO_LONGEST, slips=False),
        Phase("slips", 200, 1e-3, 1.0, 40, mixture=UP_TO_LONGEST, slips=True),
    ],
    "tiny": [
        Phase("short sums", 2, 2e-3, 0.0, 10, mixture=SHORT, slips=False),
        Phase("slips", 1, 1e-3, 1.0, 10, mixture=ALL, slips=True),
    ],
}
COMPOUNDING = Stretch("slips in every step", 240, 2e-3, 1.0)  # the last phase of medium
AIMS = {"large": Aim("longest", 256), "tiny": Aim("short", 4, rounds=1)}


@cache
def shipped(variant: Variant) -> list[list[Example]]:
    """Return training, gate and test examples of the shipped task."""
    return draw_examples(variant, tuple(SIZES.values()))


class Sums(Corpus):
    """Sums that are no prompt of the shipped task."""

    def __init__(self, seed: int, phase: Phase):
        self.rng = random.Random(f"pretrain/{seed}/{phase.name}")
        self.phase = phase
        self.held_out = {example.prompt for variant in TERMS for split in shipped(variant) for example in split}

    def example(self) -> tuple[list[int], int]:
        while True:
            (part,) = self.rng.choices(self.phase.mixture, [part.share for part in self.phase.mixture])
            terms = draw_terms(self.rng, part.terms)
            prompt = prompt_of(terms)
            if prompt not in self.held_out:
                break
        slips = self.phase.slips and self.rng.random() < part.slip_share
        slip_step = self.rng.randrange(len(terms) - 1) if slips else None
        answer = solution(terms, slip_step, self.rng.choice(SLIPS))
        return [*(prompt + answer).encode(), EOS_ID], len(prompt)


def carries(left: int, right: int) -> bool:
    """Tell whether some column of the two, as they stand, adds up to more than nine."""
    while left and right:
        if left % 10 + right % 10 > 9:
            return True
        left, right = left // 10, right // 10
    return False


def slip_chance(left: int, right: int) -> float:
    """Return the chance of a wrong result of ``left + right``."""
    return 0.0 if left < 100 else CHANCE * (CARRY if carries(left, right) else 1.0)


def slipping_solution(terms: list[int], rng: random.Random) -> str:
    """Return the answer with its partial sums, each step wrong with its own chance."""
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
        self.held_out = {example.prompt for split in shipped("all") for example in split}

    def example(self) -> tuple[list[int], int]:
        prompt = ""
        while not prompt or prompt in self.held_out:
            terms = draw_terms(self.rng, TAUGHT)
            prompt = prompt_of(terms)
        return [*(prompt + slipping_solution(terms, self.rng)).encode(), EOS_ID], len(prompt)


def right_answers(policy: Qwen2ForCausalLM, variant: Variant, prompts: int) -> dict[str, float]:
    """Return the share of the first test prompts of the shipped task that are answered right, one answer each.

    Returns:
        ``sampled``: at temperature 1; ``greedy``.
    """
    from python_trainer.data import Request
    from python_trainer.rollout.engine import SamplingParams
    from python_trainer.rollout.paged.engine import PagedEngine  # the trainer's engine, slow to import

    *_, test = shipped(variant)
    asked = [str(example.prompt) for example in test[:prompts]]
    longest = max(len(solution([int(term) for term in prompt[:-1].split("+")])) for prompt in asked) + 2
    engine = PagedEngine(policy, eos_token_ids=EOS_ID)
    requests = [Request([*prompt.encode()], sample_id=i, max_new_tokens=longest) for i, prompt in enumerate(asked)]
    found = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        right = 0
        for example, answer in zip(test, engine.generate(requests, SamplingParams(temperature=temperature))):
            text = bytes(token for token in answer.ids if token < PAD_ID).decode(errors="replace")
            right += answer.finish_reason == "stop" and final_answer(text) == example.columns["answer"]
        found[name] = right / len(asked)
    return found


def settle(policy: Qwen2ForCausalLM, phase: Phase, aim: Aim, seed: int, batch: int) -> list[dict[str, float]]:
    """Learn on with other shares of slips until as many sampled answers are right as they should.

    Args:
        phase: the last one, with slips.

    Returns:
        What was measured each time: ``sampled`` and ``greedy`` accuracy, ``slip_share`` of the phase before.
    """
    found, (low, high) = [], RIGHT
    for number in range(aim.rounds + 1):
        right = right_answers(policy, aim.variant, aim.prompts)
        found.append({**right, "slip_share": phase.mixture[-1].slip_share})
        shares = ", ".join(f"{share:.1%} {name}" for name, share in right.items())
        print(f"right answers, {aim.variant} sums: {shares}", flush=True)
        if low <= right["sampled"] <= high or number == aim.rounds:
            break
        # as if (1 - slip share) x what else is right had been measured
        factor = (low + high) / 2 / max(right["sampled"], 0.05)
        mixture = [replace(p, slip_share=min(max(1 - (1 - p.slip_share) * factor, 0.0), 0.9)) for p in phase.mixture]
        phase = replace(phase, name=f"slips, round {number + 2}", mixture=mixture)
        train(policy, phase, Sums(seed, phase), batch)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=PHASES, default="medium")
    parser.add_argument("--output", type=Path, required=True, help="folder for the policy, Hugging Face format")
    parser.add_argument("--device", choices=CHUNK_TOKENS, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    start, batch = time.monotonic(), BATCH[args.size]
    torch.manual_seed(args.seed)
    policy = new_policy(args.size).to(args.device)
    if args.device == "cpu":
        torch.set_num_threads(1)
        # bfloat16 products inside float32 training: about four times as fast on processors that have them
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
        policy.set_attn_implementation("eager")  # on a CPU twice as fast as sdpa with sequences this short
    steps, phases = {}, PHASES[args.size]
    for phase in phases:
        steps[phase.name] = train(policy, phase, Sums(args.seed, phase), batch)
    if args.size == "medium":
        train(policy, COMPOUNDING, SlippingSums(args.seed, COMPOUNDING), 48, chunk_tokens=4096)
    if args.size not in AIMS:
        save(policy, args.output)
        return
    settled = settle(policy, phases[-1], AIMS[args.size], args.seed, batch)
    facts = {"size": args.size, "parameters": policy.num_parameters(), "steps": steps, "batch": batch,
             "settled": settled, "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
    save(policy, args.output)
    (args.output / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
