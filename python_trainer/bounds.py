"""How much an accelerator can make of a task at most, derived from a sample of its answers: docs/probe.md."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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


def all_bounds(found: Mapping[str, Any], *, answers_of_step: int) -> list[Bound]:
    """One for each accelerator, for each thing that `curriculum` does, and for dynamic sampling.

    Args:
        found: of :func:`python_trainer.probe.describe`: p, judged, spread, all_wrong, seconds and epochs.
        answers_of_step: prompts of a step times answers to each.
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
        *right_answer_bounds(found),
        *history_bounds(found, repeats),
        Bound("alpha", None, f"nothing bounds it; {gate}"),
    ]


def failed_bound(name: str, found: Mapping[str, Any], share: float, why: str) -> Bound:
    """Of what makes up for this share of the groups that are all wrong."""
    wrong, spread = found["all_wrong"], found["spread"]
    return Bound(name, 1 + share * wrong / spread if spread else None, f"{wrong:.0%} of groups are all wrong{why}")


def right_answer_bounds(found: Mapping[str, Any]) -> list[Bound]:
    """Of right answers that are trained on again: those of this run, and those of a run that is in a database."""
    if not found["judged"]:
        why = "nothing is right or wrong in this task, and only right answers are taken"
        return [Bound(name, 1.0, why) for name in ("stored_answers", "earlier_answers")]
    earlier = (
        "of a run that is in a database: nothing here bounds it; it saved most where right answers are rare, and "
        f"{found['all_wrong']:.0%} of groups are all wrong"
    )
    return [
        failed_bound("stored_answers", found, 1.0, ", where a right answer of before is something to learn from"),
        Bound("earlier_answers", None, earlier),
    ]


def history_bounds(found: Mapping[str, Any], repeats: float) -> list[Bound]:
    """Of those that need an earlier answer; ``repeats``: share of the visits to prompts that were asked before."""
    if not repeats:
        why = "no prompt comes back within these steps; only a database of earlier runs could help"
        return [Bound(name, 1.0, why) for name in ("rhyme", "rpo", "drafts")]
    seconds, gain = found["seconds"], sample_gain(found["p"])
    whole, generation = sum(seconds.values()), seconds["generation"]
    visits = f"{repeats:.0%} of visits are repeats"
    drafts = Bound(
        "drafts",
        whole / max(whole - generation * repeats, 1e-9),
        f"generation takes {generation / whole:.0%} of a step, and {visits}",
    )
    if not found["judged"]:
        unknown = "nothing is right or wrong in this task, and the bound is made of p"
        return [Bound("rhyme", None, unknown), Bound("rpo", None, unknown), drafts]
    return [
        failed_bound("rhyme", found, repeats, f" and {visits}, where a stored right answer can give them a spread"),
        Bound(
            "rpo",
            1 + repeats * max(gain - 1, 0.0),
            f"a token of uniform cuts teaches {gain:.2f} times what one of whole answers does at these p, and {visits}",
        ),
        drafts,
    ]
