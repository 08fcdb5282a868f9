"""What a cut is worth: how often a group that continues an answer has right and wrong ends."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from python_trainer.run_directory import read_metrics


def informative_by_cut(folder: Path) -> dict[int, tuple[float, float]]:
    """Of a run: upper end of the cut in % -> (groups, those whose accuracies differ), over all steps."""
    counts: dict[int, tuple[float, float]] = {}
    for row in read_metrics(folder):
        for key, groups in row.items():
            if key.startswith("rpo/groups_cut_"):
                upper = int(key.removeprefix("rpo/groups_cut_"))
                before = counts.get(upper, (0.0, 0.0))
                counts[upper] = (before[0] + groups, before[1] + row[f"rpo/informative_cut_{upper}"])
    return counts


def draw_informative(variants: Mapping[str, Sequence[Path]], path: Path) -> bool:
    """Share of informative groups against the cut, one line per variant with 95 % intervals; False: nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, folders in sorted(variants.items()):
        total: dict[int, list[float]] = {}
        for folder in folders:
            for upper, pair in informative_by_cut(folder).items():
                total[upper] = [a + b for a, b in zip(total.get(upper, [0.0, 0.0]), pair)]
        if total:
            uppers = sorted(total)
            share = [total[upper][1] / total[upper][0] for upper in uppers]
            error = [1.96 * (p * (1 - p) / total[upper][0]) ** 0.5 for p, upper in zip(share, uppers)]
            axes.errorbar(uppers, share, error, marker=".", capsize=2, label=name)
    drawn = bool(axes.get_legend_handles_labels()[0])
    if drawn:
        axes.set(
            xlabel="tokens cut from the remembered answer, up to (%); 100: whole answers too",
            ylabel="groups with right and wrong answers",
            ylim=(0, 1),
            xlim=(0, 103),
        )
        axes.grid(alpha=0.3)
        figure.legend(loc="outside upper center", ncols=6, frameon=False)
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return drawn
