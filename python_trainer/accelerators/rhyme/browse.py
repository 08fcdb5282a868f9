"""Looks into a retrospective database: ``python -m python_trainer history URL``."""

import argparse
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.matching import Curve, curve_of, pad
from python_trainer.accelerators.rhyme.reaching import parse_url
from python_trainer.accelerators.rhyme.records import StoredRun
from python_trainer.accelerators.rhyme.sketch import histogram
from python_trainer.errors import UserError
from rlkernels import Trajectories, rhyme_similarity

MOST_STAGES = 240  # in the picture; of more runs the newest are drawn


def history(
    url: str, *, run: int | None = None, picture: Path | None = None, window: int = 8, console: Console | None = None
) -> None:
    """Lists the runs, draws how their stages rhyme, and shows the best matches of one run.

    Args:
        run: id of the run whose matches are shown; None for none.
        picture: PNG to draw; None for ``rhyme.png`` beside a SQLite file, or here for PostgreSQL.
        window: steps of a stage.

    Raises:
        UserError: there is no such database or run.
    """
    console = console or Console()
    if window < 1:
        raise UserError(f"--window must be at least 1, got {window}")
    database = RetrospectiveDatabase(url, create=False)
    runs = database.runs()
    parsed = parse_url(url)
    folder = Path(parsed.database or "").parent if database.is_sqlite else Path()
    console.print(run_table(runs, folder.resolve()))
    console.print(f"{database.name}: {len(runs)} runs, {database.bytes():,} bytes stored", highlight=False)
    if run is not None and run not in {stored.id for stored in runs}:
        known = ", ".join(str(stored.id) for stored in runs) or "none"
        raise UserError(f"--run: there is no run {run} in {database.name}; there are {known}")
    curves = [curve for stored in runs if len(curve := curve_of(stored.id, database.trajectory(stored.id)))]
    if run is not None:
        for line in facts_told(next(stored for stored in runs if stored.id == run)):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        mine = [curve for curve in curves if curve.run_id == run]
        console.print(match_table(mine, [curve for curve in curves if curve.run_id != run], window))
    while len(curves) > 1 and sum(-(-len(curve) // window) for curve in curves) > MOST_STAGES:
        curves.pop(0)
    if curves:
        picture = picture or folder / "rhyme.png"
        draw_heatmap(curves, window, picture)
        console.print(f"how stages of {window} steps rhyme: {picture}", highlight=False, soft_wrap=True)


def run(args: argparse.Namespace) -> None:
    """What the command line asks for."""
    history(args.url, run=args.run, picture=args.picture, window=args.window)


def run_table(runs: list[StoredRun], home: Path) -> Table:
    """A row for each run, in 80 columns; ``home``: the folder of the database, from where folders are named."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("run", "begun", "folder", "task", "seed", "steps", "tokens", "last\naccuracy"):
        if name == "folder":
            table.add_column(name, overflow="fold")
        else:
            left = name in ("begun", "task")
            table.add_column(name, justify="left" if left else "right", no_wrap=True, max_width=20)
    for stored in runs:
        table.add_row(
            str(stored.id),
            f"{datetime.fromtimestamp(stored.created):%Y-%m-%d %H:%M}",
            escape(folder_name(stored, home)),
            escape(stored.facts.task),
            str(stored.facts.settings.get("seed", "-")),
            str(stored.steps),
            in_short(stored.generated_tokens),
            "-" if stored.last_accuracy is None else f"{stored.last_accuracy:.3f}",
        )
    return table


def folder_name(stored: StoredRun, home: Path) -> str:
    """Of the run: from the folder of the database on, if it lies there; ``-`` of one recorded before that was."""
    folder = stored.facts.settings.get("output_dir")
    if folder is None:
        return "-"
    path = Path(str(folder))
    return str(path.relative_to(home)) if path != home and path.is_relative_to(home) else path.name


def in_short(count: int) -> str:
    """``812``, ``506k``, ``1.6M``."""
    if count < 1000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"


def facts_told(stored: StoredRun) -> list[str]:
    """What the table has no room for."""
    facts = stored.facts
    last = [("last reward", stored.last_reward), ("last accuracy", stored.last_accuracy)]
    shown = "".join(f", {name} {value:.3f}" for name, value in last if value is not None)
    return [
        f"run {stored.id}: {facts.settings.get('output_dir', 'its folder was not recorded')}",
        f"  {facts.family}, {facts.parameters:,} parameters; {facts.task}; advantage {facts.algorithm}",
        f"  steps {stored.steps}, tokens {stored.generated_tokens:,}, stored answers {stored.rollouts:,}{shown}",
    ]


def stages_of(curves: list[Curve], window: int) -> tuple[Trajectories, list[tuple[int, int, int]]]:
    """Runs cut into stages of ``window`` steps -> the stages, and (run, first step, last step) of each."""
    cuts = [(curve, first) for curve in curves for first in range(0, len(curve), window)]
    rewards = [curve.rewards[first : first + window] for curve, first in cuts]
    states = torch.stack([curve.counts[first : first + window].sum(0) for curve, first in cuts])
    lengths = torch.tensor([len(row) for row in rewards])
    places = [
        (curve.run_id, int(curve.steps[first]), int(curve.steps[first + len(row) - 1]))
        for (curve, first), row in zip(cuts, rewards)
    ]
    return Trajectories(pad(rewards), histogram(states), lengths), places


def match_table(mine: list[Curve], others: list[Curve], window: int) -> Table:
    """For every stage of a run the stage of another run that rhymes with it best."""
    table = Table("steps", "best match", "steps there", "C_rhyme")
    if mine and others:
        here, own = stages_of(mine, window)
        there, places = stages_of(others, window)
        score, index = rhyme_similarity(here, there, state_metric="hellinger").max(1)
        for (_, first, last), value, best in zip(own, score.tolist(), index.tolist()):
            run, start, end = places[best]
            table.add_row(f"{first} - {last}", f"run {run}", f"{start} - {end}", f"{value:.3f}")
    return table


def draw_heatmap(curves: list[Curve], window: int, path: Path) -> None:
    """C_rhyme of all stages with each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages, places = stages_of(curves, window)
    score = rhyme_similarity(stages, stages, state_metric="hellinger")
    figure, axes = pyplot.subplots(figsize=(7, 6), layout="constrained")
    image = axes.imshow(score.numpy(), vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    figure.colorbar(image, label="C_rhyme", shrink=0.85)
    first = {run: min(i for i, place in enumerate(places) if place[0] == run) for run, _, _ in places}
    ends = [*list(first.values())[1:], len(places)]
    centres = [(start + end - 1) / 2 for start, end in zip(first.values(), ends)]
    labels = [f"run {run}" for run in first]
    axes.set_xticks(centres, labels, rotation=90 if len(labels) > 6 else 0)
    axes.set_yticks(centres, labels)
    axes.tick_params(length=0)
    for start in list(first.values())[1:]:
        axes.axhline(start - 0.5, color="white", linewidth=1)
        axes.axvline(start - 0.5, color="white", linewidth=1)
    axes.set_title(f"stages of {window} steps, each run from its first to its last", fontsize=10)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UserError(f"the picture {path} cannot be written: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)
