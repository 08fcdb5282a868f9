"""What a run asked: the expected chance of the prompts of each step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from python_trainer.run_directory import read_metrics

LEVELS = ("low", "median", "high")


def asked(folder: Path) -> list[tuple[int, float, float, float]]:
    """Of a run: step, lowest tenth, median and highest tenth of the chance expected of its prompts."""
    return [
        (int(row["step"]), *(row[f"curriculum/asked_{level}"] for level in LEVELS))  # type: ignore[misc]
        for row in read_metrics(folder)
        if "curriculum/asked_median" in row
    ]


def draw_chosen(variants: Mapping[str, Sequence[Path]], path: Path) -> bool:
    """The first run of each variant, a line for the median and a band for the middle 80 %; False: nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, folders in sorted(variants.items()):
        if rows := asked(folders[0]):
            steps, low, median, high = zip(*rows)
            (line,) = axes.plot(steps, median, label=name)
            axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    drawn = bool(axes.get_legend_handles_labels()[0])
    if drawn:
        axes.set(xlabel="step", ylabel="expected chance of a right answer", ylim=(0, 1))
        axes.grid(alpha=0.3)
        figure.legend(loc="outside upper center", ncols=6, frameon=False)
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return drawn
