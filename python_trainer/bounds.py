"""How much an accelerator can make of a task at most, derived from a sample of its answers: docs/probe.md."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNKNOWN = "nothing is right or wrong in this task, and the bound is made of p"
NEVER = "no prompt comes back within these steps"


@dataclass(frozen=True)
class Bound:
    """``at_most`` as many times as fast; None: nothing that was seen bounds it."""

    name: str
    at_most: float | None
    why: str


def suffix_gain(p: float) -> float:
    """Signal per token of answers that go on from uniform cuts of right ones, whole answers having 1.

    With errors spread evenly over an answer, the share x that is left to do is done right with chance p^x. Signal is
    x p^x (1 - p^x), of which a token costs 1 / x; both are integrated over x.
    """
    if not 0 < p < 1:
        return 1.0

    def moment(base: float) -> float:  # the integral of x base^x from 0 to 1
        log = math.log(base)
        return (base * (log - 1) + 1) / log**2

    return 2 * (moment(p) - moment(p * p)) / (p * (1 - p))


def sample_gain(p: Sequence[float]) -> float:
    """:func:`suffix_gain` of a set of prompts: each counts as much as it teaches, p (1 - p)."""
    weights = [x * (1 - x) for x in p]
    return sum(w * suffix_gain(x) for w, x in zip(weights, p)) / sum(weights) if any(weights) else 1.0


def all_bounds(found: Mapping[str, Any], *, answers_of_step: int, rare_share: float = 0.0) -> list[Bound]:
    """One for each accelerator, for each thing that `curriculum` does, and for dynamic sampling.

    Args:
        found: of :func:`python_trainer.probe.describe`: p, judged, spread, all_wrong, seconds and epochs.
        answers_of_step: prompts of a step times answers to each.
        rare_share: of groups that are all wrong, below which `curriculum` leaves a run alone.
    """
    spread, seconds = found["spread"], found["seconds"]
    repeats = 1 - 1 / max(found["epochs"], 1.0)
    whole, answering = sum(seconds.values()), seconds["generation"] + seconds["rewards"]
    if spread:
        bounds = [
            Bound(
                "selection",
                whole / max(whole - answering * (1 - spread), 1e-9),
                f"{1 - spread:.0%} of groups teach nothing, and generation and rewards take {answering / whole:.0%} of "
                "a step: that is what choosing prompts can save",
            ),
            Bound("dynamic_sampling", 1.0, f"saves no time: full steps need {1 / spread:.2f} times the answers"),
        ]
    else:
        bounds = [Bound(name, None, "no group taught anything") for name in ("selection", "dynamic_sampling")]
    gate = f"a decision of its gate takes up to 512 held-out answers, those of {512 / answers_of_step:.1f} steps"
    return [
        *bounds,
        *right_answer_bounds(found, rare_share),
        *history_bounds(found, repeats),
        Bound("alpha", None, f"nothing bounds it; {gate}"),
    ]


def failed_bound(name: str, found: Mapping[str, Any], share: float, why: str) -> Bound:
    """Of what makes up for this share of the groups that are all wrong."""
    wrong, spread = found["all_wrong"], found["spread"]
    return Bound(name, 1 + share * wrong / spread if spread else None, f"{wrong:.0%} of groups are all wrong{why}")


def right_answer_bounds(found: Mapping[str, Any], rare_share: float) -> list[Bound]:
    """Of right answers that are trained on again: those of this run, and those of a run that is in a database."""
    if not found["judged"]:
        why = "nothing is right or wrong in this task, and only right answers are taken"
        return [Bound(name, 1.0, why) for name in ("stored_answers", "earlier_answers")]
    earlier = (
        "of a run that is in a database: nothing here bounds it; it saved most where right answers are rare, and "
        f"{found['all_wrong']:.0%} of groups are all wrong"
    )
    stored = failed_bound("stored_answers", found, 1.0, ", where a right answer of before is something to learn from")
    if found["all_wrong"] < rare_share:
        few = (
            f"{found['all_wrong']:.0%} of groups are all wrong: below accelerators.curriculum.rare_share {rare_share:g}"
        )
        stored = Bound("stored_answers", 1.0, f"{few} nothing is trained on again")
    return [stored, Bound("earlier_answers", None, earlier)]


def history_bounds(found: Mapping[str, Any], repeats: float) -> list[Bound]:
    """Of those that need an earlier answer; ``repeats``: share of the visits to prompts that were asked before."""
    return [rhyme_bound(found, repeats), rpo_bound(found, repeats), drafts_bound(found["seconds"], repeats)]


def rhyme_bound(found: Mapping[str, Any], repeats: float) -> Bound:
    if not repeats:
        return Bound("rhyme", 1.0, f"{NEVER}; only a database of earlier runs could help, which nothing here bounds")
    if not found["judged"]:
        return Bound("rhyme", None, UNKNOWN)
    why = f" and {repeats:.0%} of visits are repeats, where a stored right answer can give them a spread"
    return failed_bound("rhyme", found, repeats, why)


def rpo_bound(found: Mapping[str, Any], repeats: float) -> Bound:
    """Without ``fill`` and ``cache_path``, which give the first visit an answer to go on from too."""
    gain = max(sample_gain(found["p"]), 1.0)
    if not repeats:
        filled = f"it is at most {gain:.2f} then" if found["judged"] else "nothing here bounds it then"
        why = f"{NEVER}; accelerators.rpo.fill or cache_path gives first visits an answer to go on from: {filled}"
        return Bound("rpo", 1.0, why)
    if not found["judged"]:
        return Bound("rpo", None, UNKNOWN)
    why = (
        f"a token of uniform cuts teaches {sample_gain(found['p']):.2f} times what one of whole answers does at these "
        f"p, and {repeats:.0%} of visits are repeats"
    )
    return Bound("rpo", 1 + repeats * (gain - 1), why)


def drafts_bound(seconds: Mapping[str, float], repeats: float) -> Bound:
    """Of drafts from earlier answers to the same prompt."""
    whole, generation = sum(seconds.values()), seconds["generation"]
    if not repeats:
        why = f"{NEVER}; what other prompts and the answer itself let it draft, often little, is not counted"
        return Bound("drafts", 1.0, why)
    why = f"generation takes {generation / whole:.0%} of a step, and {repeats:.0%} of visits are repeats"
    return Bound("drafts", whole / max(whole - generation * repeats, 1e-9), why)
