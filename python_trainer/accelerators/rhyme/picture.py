"""What stored answers did in a run, step by step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from python_trainer.run_directory import read_metrics

CURVES = {  # metric -> (label, style)
    "rhyme/best_match": ("best C_rhyme with a stage of history", "-"),
    "rhyme/stored_share": ("stored answers among those trained on", "-"),
    "rhyme/failed_groups": ("groups in which every fresh answer failed", ":"),
    "rhyme/rescued_groups": ("... and that got a stored one", "-"),
}


def draw_history(variants: Mapping[str, Sequence[Path]], path: Path) -> bool:
    """Match, share of stored answers, failed and rescued groups over the steps of all runs.

    One thin line per run. False: none of them used stored answers, nothing is drawn.
    """
    folders = [folder for variant in variants.values() for folder in variant]
    tables = [[row for row in read_metrics(folder) if "rhyme/stored_share" in row] for folder in folders]
    tables = [rows for rows in tables if any(row["rhyme/stored_share"] for row in rows)]
    if not tables:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for colour, (key, (label, style)) in enumerate(CURVES.items()):
        for number, rows in enumerate(tables):
            steps, values = [row["step"] for row in rows], [row[key] for row in rows]
            axes.plot(steps, values, style, color=f"C{colour}", linewidth=1.2, label="" if number else label)
    axes.set(xlabel="step", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="center right", fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
