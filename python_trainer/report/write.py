"""What a run leaves for people: the table on the terminal, pictures, and one page with all of it."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from python_trainer.registry import load
from python_trainer.report.curve import COLOURS, SECONDS, TOKENS, paint_accuracy
from python_trainer.report.page import write_page
from python_trainer.report.runs import Run, accelerators_of, by_variant, find_runs, target_of
from python_trainer.report.tables import idle_accelerators, make_table, samples_table, summary_columns
from python_trainer.report.verdict import caveats, verdicts


def report(folders: Sequence[Path], console: Console | None = None) -> None:
    """Prints the table of all runs in these folders, draws ``accuracy.png`` in the first, and ``report.html`` in all.

    Of a single run also a few answers. Accelerators add pictures where there is something to draw. The page shows all
    of it, side by side.
    """
    console = console or Console()
    runs = find_runs(folders)
    columns = summary_columns(runs)
    samples = samples_table(runs[0]) if len(runs) == 1 else None
    if samples is not None:
        console.print(samples)
    console.print(make_table(columns))
    for line in [*idle_accelerators(runs), *(f"note: {text}" for text in caveats(runs)), *verdicts(runs)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    picture = folders[0] / "accuracy.png"
    draw(runs, picture)
    console.print(f"accuracy over seconds and tokens: {picture}", highlight=False, soft_wrap=True)
    pictures = draw_of_accelerators(runs, folders[0])
    for words, picture in pictures.items():
        console.print(f"{words}: {picture}", highlight=False, soft_wrap=True)
    pages = [folder / "report.html" for folder in dict.fromkeys(folders)]
    write_page(runs, columns, pages, pictures=pictures, target=target_of(runs))
    for page in pages:
        console.print(f"all of it in a browser: {page}", highlight=False, soft_wrap=True)


def draw_of_accelerators(runs: Sequence[Run], home: Path) -> dict[str, Path]:
    """Draws the pictures that accelerators have of these runs -> words, file."""
    from cycler import cycler
    from matplotlib import rc_context

    folders = {name: [run.folder for run in mine] for name, mine in by_variant(runs).items()}
    drawn = {}
    with rc_context({"axes.prop_cycle": cycler(color=COLOURS)}):  # C0 is the first variant's colour everywhere
        for kind in accelerators_of(run.folder for run in runs):
            for picture in kind.pictures:
                path = home / picture.file
                if load(picture.draw)(folders, path):
                    drawn[picture.words] = path
    return drawn


def draw(runs: Sequence[Run], path: Path) -> None:
    """Accuracy over seconds and over tokens, one colour per variant, one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(10, 4.5), layout="constrained", sharey=True)
    for axes, x in zip(both, (SECONDS, TOKENS)):
        paint_accuracy(axes, runs, x, target_of(runs))
    if both[0].get_legend_handles_labels()[0]:
        figure.legend(*both[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
