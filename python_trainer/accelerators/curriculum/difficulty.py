"""How hard prompts were to earlier runs when those began, relative to what they could do."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from python_trainer.accelerators.curriculum.field import Field
from python_trainer.errors import UserError

MOST = 4096  # groups of a run that are looked at, its first: less than a tenth of a second
OWN = 2.5  # how far prompts may lie apart, in logits

StepOutcomes = Mapping[str, Tensor]  # of a step, see StepRecord


def difficulties(
    trajectories: Sequence[Sequence[StepOutcomes]], prompt_keys: Sequence[str], memory: float
) -> Tensor | None:
    """By how many logits each prompt was easier than others at the start of these runs, [P]; near 0 where unknown.

    It is what a run believes of its own prompts (:mod:`.field`), walked through backwards: the later a prompt was
    asked, the less that says of how hard it was at the start. The ability of a run is left out, so that it does not
    matter whether it was more able than the present one.

    Args:
        trajectories: of each run its steps.
        prompt_keys: as of :func:`python_trainer.accelerators.rhyme.records.prompt_key`, P of them.
        memory: steps after which what a prompt alone has shown is forgotten to 1/e.

    Returns:
        None: none of the prompts was asked.

    Raises:
        UserError: outcomes are not what a run records.
    """
    places = {key: place for place, key in enumerate(dict.fromkeys(prompt_keys))}
    fields = [at_the_start(trajectory, places, memory) for trajectory in trajectories]
    if not any(field.seen.any() for field in fields):
        return None
    weighted, precision = torch.zeros(2, len(places), dtype=torch.float64)
    precision += 1 / OWN**2
    for easier, variance in (field.own_moments() for field in fields):
        weighted += easier / variance
        precision += 1 / variance - 1 / OWN**2
    return (weighted / precision)[[places[key] for key in prompt_keys]]


def at_the_start(trajectory: Sequence[StepOutcomes], places: Mapping[str, int], memory: float) -> Field:
    """What one run tells of prompts, whose keys have these places."""
    field = Field(torch.ones(len(places), 1, dtype=torch.float64), spread=2.0, own=OWN, walk=0.1, memory=memory)
    first, left = list[StepOutcomes](), MOST
    for outcomes in trajectory:
        if left > 0:
            first.append(outcomes)
            left -= len(outcomes.get("answers", ()))
    for step, outcomes in enumerate(reversed(first), 1):
        field.advance(step)
        for key, answers, right in visits(outcomes):
            if key in places:
                field.observe_right(places[key], right, answers)
    return field


def visits(outcomes: StepOutcomes) -> Iterator[tuple[str, int, float]]:
    """Of each group the key of its prompt, how many answers there were, and how many right ones."""
    if not outcomes:
        return
    try:
        keys = [bytes(key).hex() for key in outcomes["prompts"].tolist()]
        rows = list(zip(keys, outcomes["answers"].tolist(), outcomes["right"].tolist(), strict=True))
        if not all(0 <= right <= answers for _, answers, right in rows):
            raise ValueError("more right answers than answers")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"outcomes in the retrospective database are damaged ({error})") from error
    yield from rows
