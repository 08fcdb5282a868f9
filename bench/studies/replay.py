"""What stages of earlier runs could have told a run, replayed from what both have recorded; nothing is trained.

    make train
    for seed in 0 1; do python -m python_trainer train --config configs/countdown.yaml \\
        --output-dir runs/train/countdown-$seed --set seed=$seed; done
    python -m bench.studies replay

Each run of the database is replayed step by step beside the others, and asks two things of them:

- *How will these prompts be answered?* (Earlier runs of its task.) Every answer is predicted from what the run has seen
  of its prompt, fading over 60 steps, and from what the earlier run saw around one of its steps, fading over 24, of
  which it tries several choices. What an answer there is worth beside an own one is learned on the way: 0 where it did
  not help. Nats an answer, less is better.
- *How far will accuracy be?* (Runs of any task; matching across tasks can tell no more than that, as prompts and
  answers differ.) The mean over the 8 steps that end so many steps on, predicted from the last 8 alone, from their
  line over 24 steps, and from what the earlier run gained behind the stage that rhymes best. How far the last two are
  believed is learned on the way. Root mean squared error in points, less is better.

The stage that rhymes is the one with the highest C_rhyme to the last 8 steps (`python_trainer.accelerators.rhyme`),
rewards being accuracies. Prints its tables as Markdown.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from bench._markdown import table_lines
from python_trainer.accelerators.curriculum.difficulty import visits
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.matching import Curve, curve_of, rhyming_stages
from python_trainer.accelerators.rhyme.records import StepRecord, StoredRun
from python_trainer.accelerators.rhyme.settings import RhymeSettings
from python_trainer.errors import UserError

OWN_MEMORY, EARLIER_MEMORY = 60, 24  # steps after which what was seen fades to 1/e
PRIOR = 2.0  # answers that the run's mean accuracy counts for
WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # of an answer of the earlier run, beside an own one
WINDOW, TREND = 8, 24  # steps
SPANS = {"steps 1-12": (0, 12), "13-36": (12, 36), "37-96": (36, 96), "97-": (96, 1 << 30), "all": (0, 1 << 30)}
AHEAD = 8, 16, 40

Places = Callable[[int], int | None]  # a step of the run that is replayed -> of the earlier one; None: all of them


@dataclass
class Recorded:
    """What a run has recorded of T steps, from its first on."""

    run: StoredRun
    curve: Curve
    accuracy: Tensor  # [T]
    groups: list[dict[str, tuple[int, float]]]  # of each step the prompts' keys, with their answers and right ones

    def name(self) -> str:
        return f"{self.run.facts.task}, run {self.run.id} (seed {self.run.facts.settings.get('seed', '-')})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("database", nargs="?", default="runs/train/history.db",
                        help="of the runs, a path or a URL (default: %(default)s, of make train)")  # fmt: skip


def recorded(run: StoredRun, trajectory: Sequence[StepRecord]) -> Recorded:
    """As the database has it; the curve is of accuracies, which all tasks have on one scale."""
    curve = curve_of(run.id, [replace(record, reward=record.accuracy) for record in trajectory])
    groups = [{key: (n, right) for key, n, right in visits(record.outcomes)} for record in trajectory]
    return Recorded(run, curve, curve.rewards.double(), groups)


def seen(groups: Sequence[Mapping[str, tuple[int, float]]], prompts: Sequence[str]) -> Tensor:
    """Right answers and answers, [2, T, P] float64."""
    places = {key: place for place, key in enumerate(prompts)}
    counts = torch.zeros(2, len(groups), len(prompts), dtype=torch.float64)
    for step, group in enumerate(groups):
        for key, (answers, right) in group.items():
            if key in places:
                counts[:, step, places[key]] += torch.tensor([right, answers], dtype=torch.float64)
    return counts


def faded(distance: Tensor, memory: float) -> Tensor:
    return torch.exp(-distance.abs().double() / memory)


def nats(counts: Tensor, own: Tensor, earlier: Tensor, mean: Tensor) -> Tensor:
    """Of all answers in a step, with each weight of the earlier run, [W].

    Args:
        counts: right ones and all of each prompt in this step, [2, P].
        own: and before it in this run, faded, [2, P].
        earlier: in the earlier run, faded, [2, P].
        mean: accuracy that is expected where nothing was seen, a number.
    """
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)[:, None]
    right, answers = (own[i] + weights * earlier[i] for i in (0, 1))  # [W, P]
    chance = ((right + PRIOR * mean) / (answers + PRIOR)).clamp(1e-3, 1 - 1e-3)
    return -(counts[0] * chance.log() + (counts[1] - counts[0]) * (1 - chance).log()).sum(1)


def outcome_losses(run: Recorded, earlier: Recorded, places: Places) -> tuple[Tensor, Tensor]:
    """Nats that answers cost, and answers, of each step, [T] both.

    The weight of the earlier run is that which would have been best in the steps before; at first an answer there is
    worth one here.
    """
    prompts = list(dict.fromkeys(key for group in run.groups for key in group))
    counts, theirs = seen(run.groups, prompts), seen(earlier.groups, prompts)
    steps, there = torch.arange(counts.shape[1]), torch.arange(theirs.shape[1])
    losses, so_far = torch.zeros(len(steps), dtype=torch.float64), torch.zeros(len(WEIGHTS), dtype=torch.float64)
    for step in steps.tolist():
        own = (faded(step - steps[:step], OWN_MEMORY)[:, None] * counts[:, :step]).sum(1)
        place = places(step)
        fading = torch.ones(len(there)) if place is None else faded(place - there, EARLIER_MEMORY)
        found = (fading.double()[:, None] * theirs).sum(1)
        last = run.accuracy[max(0, step - WINDOW) : step]
        each = nats(counts[:, step], own, found, last.mean() if len(last) else torch.tensor(0.5))
        losses[step] = each[int(so_far.argmin()) if step else WEIGHTS.index(1.0)]
        so_far += each
    return losses, counts[1].sum(1)


def rhymes(run: Recorded, earlier: Recorded) -> list[int]:
    """Of each step of a run the last step of the earlier stage that rhymes best with what came before it."""
    settings = RhymeSettings()
    found = []
    for step in range(len(run.curve)):
        stages = rhyming_stages(
            run.curve.first(step).last(WINDOW), [earlier.curve], window=WINDOW, fraction=1.0,
            reward_weight=settings.reward_weight, reward_scale=settings.reward_scale,
        ) if step else []  # fmt: skip
        found.append(int((earlier.curve.steps == stages[0].end).nonzero()[0, 0]) if stages else 0)
    return found


def as_accurate(run: Recorded, earlier: Recorded) -> list[int]:
    """The same, of the stage whose mean accuracy is nearest."""
    means = earlier.accuracy.unfold(0, WINDOW, 1).mean(1)
    found = [0]
    for step in range(1, len(run.curve)):
        nearest = (means - run.accuracy[max(0, step - WINDOW) : step].mean()).abs().argmin()
        found.append(int(nearest) + WINDOW - 1)
    return found


def outcome_table(run: Recorded, earlier: Recorded, rhyming: Sequence[int]) -> list[str]:
    """Nats an answer by where the earlier run is looked at; ``rhyming``: of :func:`rhymes`."""
    alike, last = as_accurate(run, earlier), len(earlier.curve) - 1
    unseen = replace(earlier, groups=[{} for _ in earlier.groups])
    choices: dict[str, tuple[Recorded, Places]] = {
        "not at all": (unseen, lambda step: 0),
        "all of it alike": (earlier, lambda step: None),
        "its start": (earlier, lambda step: 0),
        "the same step": (earlier, lambda step: min(step, last)),
        "where its accuracy was this one's": (earlier, lambda step: alike[step]),
        "the stage with the highest C_rhyme": (earlier, lambda step: rhyming[step]),
    }
    rows = []
    for words, (source, places) in choices.items():
        losses, answers = outcome_losses(run, source, places)
        parts = [slice(*span) for span in SPANS.values()]
        sums = [(losses[part].sum(), answers[part].sum()) for part in parts]
        rows.append([words, *(f"{loss / count:.3f}" if count else "-" for loss, count in sums)])
    return table_lines(["earlier run looked at", *SPANS], rows)


def looks(run: Recorded, ahead: int) -> range:
    """How many steps were seen, each time that accuracy ``ahead`` of them is predicted, N of them."""
    return range(WINDOW, len(run.accuracy) - ahead + 1)


def recent(accuracy: Tensor, steps: int) -> float:
    """The mean accuracy of the last of so many steps, or of the run where it has no more."""
    end = min(steps, len(accuracy))
    return accuracy[max(0, end - WINDOW) : end].mean().item()


def gained(run: Recorded, ahead: int) -> Tensor:
    """By how much accuracy had risen so many steps on, [N]."""
    return torch.tensor([recent(run.accuracy, n + ahead) - recent(run.accuracy, n) for n in looks(run, ahead)])


def not_at_all(run: Recorded, ahead: int) -> Tensor:
    """That it stays as it is, [N]."""
    return torch.zeros(len(looks(run, ahead)))


def by_their_line(run: Recorded, ahead: int) -> Tensor:
    """By how much it rises along the line through the last steps, [N]."""
    found = []
    for n in looks(run, ahead):
        known = run.accuracy[max(0, n - TREND) : n]
        x = torch.arange(len(known), dtype=torch.float64) - (len(known) - 1) / 2
        found.append((ahead * (x @ known) / (x @ x)).item())
    return torch.tensor(found)


def by_the_stage(run: Recorded, earlier: Recorded, rhyming: Sequence[int], ahead: int) -> Tensor:
    """By how much it rose in the earlier run behind the stage that rhymes, [N]."""
    ends = [rhyming[n] + 1 for n in looks(run, ahead)]
    return torch.tensor([recent(earlier.accuracy, end + ahead) - recent(earlier.accuracy, end) for end in ends])


def error(predicted: Tensor, gained: Tensor, ahead: int) -> float:
    """Root mean squared error in points, believing a prediction as far as was best for those that came true before."""
    errors = []
    for i, (guess, truth) in enumerate(zip(predicted.tolist(), gained.tolist())):
        before = slice(0, max(0, i - ahead + 1))
        x, y = predicted[before], gained[before]
        share = ((x @ y) / (x @ x)).clamp(0, 1).item() if x.any() else 1.0
        errors.append((share * guess - truth) ** 2)
    return 100 * fmean(errors) ** 0.5


def gain_row(run: Recorded, words: str, predicted: Callable[[int], Tensor]) -> list[str]:
    """Errors of what is predicted so many steps ahead."""
    return [run.name(), words, *(f"{error(predicted(ahead), gained(run, ahead), ahead):.1f}" for ahead in AHEAD)]


def run(args: argparse.Namespace) -> None:
    database = RetrospectiveDatabase(args.database, create=False)
    runs = [recorded(each, database.trajectory(each.id)) for each in database.runs()]
    runs = [each for each in runs if len(each.curve) >= WINDOW + max(AHEAD)]
    if len(runs) < 2:
        raise UserError(f"{database.name} has {len(runs)} runs of {WINDOW + max(AHEAD)} steps or more; it takes two")
    rows = []
    for number, each in enumerate(runs):
        rows.append(gain_row(each, "the last 8 steps", partial(not_at_all, each)))
        rows.append(gain_row(each, "their line over 24", partial(by_their_line, each)))
        for place, other in enumerate(runs):
            if other is each:
                continue
            rhyming = rhymes(each, other)
            if place < number and other.run.facts.task == each.run.facts.task:
                print(f"\n{each.name()}, beside run {other.run.id}: nats an answer\n")
                print("\n".join(outcome_table(each, other, rhyming)), flush=True)
            words = f"the stage that rhymes in {other.name()}"
            rows.append(gain_row(each, words, partial(by_the_stage, each, other, rhyming)))
    print("\nError of accuracy, in points, so many steps ahead\n")
    print("\n".join(table_lines(["run", "predicted from", *(str(ahead) for ahead in AHEAD)], rows)), flush=True)
