"""Tables and pictures of the study ``alpha``: Markdown, JSON and PNG."""

import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy
from safetensors.numpy import load_file

from bench._markdown import table_lines
from python_trainer.report.intervals import Interval, paired_difference, share_of_gain

Row = dict[str, Any]


class Found:
    """All parts of one algorithm: numbers and answers by seed."""

    def __init__(self, folder: Path):
        self.name = folder.name
        self.numbers: list[Row] = []
        self.answers: list[dict[str, numpy.ndarray]] = []
        self.seeds: list[str] = []
        for part in sorted(folder.glob("seed-*")):
            if (part / "answers.safetensors").exists():
                self.seeds.append(part.name.removeprefix("seed-"))
                self.numbers.append(json.loads((part / "results.json").read_text()))
                self.answers.append(dict(load_file(part / "answers.safetensors")))

    def has(self, *names: str) -> list[int]:
        """Seeds that have all of these answers, by index."""
        return [i for i, answers in enumerate(self.answers) if all(name in answers for name in names)]

    def stack(self, name: str, seeds: list[int]) -> numpy.ndarray:
        return numpy.stack([self.answers[i][name] for i in seeds]).astype(float)

    def gain(self, name: str) -> Interval | None:
        seeds = self.has(name, "full", "base")
        if not seeds:
            return None
        return share_of_gain(*(self.stack(n, seeds) for n in (name, "full", "base")))

    def change(self, name: str, other: str) -> Interval | None:
        seeds = self.has(name, other)
        return paired_difference(self.stack(name, seeds), self.stack(other, seeds)) if seeds else None

    def accuracies(self, name: str) -> str:
        return ", ".join(f"{answers[name].mean():.4f}" if name in answers else "-" for answers in self.answers)


def percent(interval: Interval | None) -> str:
    if interval is None or interval.value != interval.value:
        return "-"
    return f"{100 * interval.value:.1f} % [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def outcome(event: Row | None) -> str:
    """What became of one attempt, in words."""
    if event is None:
        return "-"
    if "refused" in event:
        return f"refused: {event['refused']}"
    last = event["tries"][-1]
    word = f"accepted at {last['factor']:g}" if event["accepted"] else f"rejected {len(event['tries'])} times"
    return f"{word} (gate {last['before']:.3f} -> {last['after']:.3f})"


def predictors(found: Found) -> list[str]:
    return [
        key.removeprefix("attempt ")
        for key in (found.numbers[0] if found.numbers else {})
        if key.startswith("attempt ")
    ]


def headline(found: Found, cut: int, steps: int) -> list[str]:
    rows = []
    names = [("start", "base"), (f"after {cut} of {steps} steps", "cut")]
    names += [(f"{name}, {kind}", f"{kind} {name}") for kind in ("gated", "ungated") for name in predictors(found)]
    more = [str(numbers.get("same cost steps", "-")) for numbers in found.numbers]
    names.append((f"plain training for the time of an attempt (steps: {', '.join(more)})", "same cost"))
    names.append((f"{steps} steps with jumps on the way", "with jumps"))
    for label, name in [*names, (f"after {steps} steps", "full")]:
        if not found.has(name):
            continue
        after_cut = found.change(name, "cut") if name not in ("base", "cut") else None
        to_full = found.change(name, "full") if name not in ("base", "full") else None
        rows.append(
            [label, found.accuracies(name), percent(found.gain(name)), str(after_cut or "-"), str(to_full or "-")]
        )
    head = [
        "weights",
        f"accuracy, seeds {', '.join(found.seeds)}",
        "share of the gain",
        f"minus {cut} steps",
        "minus full",
    ]
    return table_lines(head, rows)


def decisions(found: Found) -> list[str]:
    rows = []
    for name in predictors(found):
        for seed, numbers, answers in zip(found.seeds, found.numbers, found.answers):
            event = numbers.get(f"attempt {name}")
            if event is not None:
                change = paired_difference(answers[f"ungated {name}"], answers["cut"])
                rows.append([name, seed, outcome(event), str(change)])
    return table_lines(["predictor", "seed", "decision", "test accuracy without refusals and gate, minus before"], rows)


def costs(found: Found, cut: int, steps: int) -> list[str]:
    rows = []
    for seed, numbers in zip(found.seeds, found.numbers):
        if "cut_cost" not in numbers or "full_cost" not in numbers:
            continue
        first, rest = numbers["cut_cost"], numbers["full_cost"]
        whole = first["cpu_s"] + rest["cpu_s"] - first["track_cpu_s"] - rest["track_cpu_s"]  # plain: no tracking
        for name in predictors(found):
            event = numbers.get(f"attempt {name}")
            if event is not None:
                ours = first["cpu_s"] + event["cpu_s"]
                spent = [f"{s:.1f}" for s in (first["cpu_s"], first["track_cpu_s"], event["cpu_s"], whole)]
                rows.append([seed, name, *spent, f"{whole / ours:.2f}x"])
    head = ["seed", "predictor", f"{cut} steps with tracking, s", "of it tracking, s", "attempt with gate, s",
            f"{steps} plain steps, s", "cheaper"]  # fmt: skip
    return table_lines(head, rows)


def jumps(found: Found) -> list[str]:
    """What the accelerator did in a whole run, and what that cost."""
    rows = []
    for seed, numbers in zip(found.seeds, found.numbers):
        if "with jumps_cost" not in numbers:
            continue
        ours, first, rest = (numbers[name] for name in ("with jumps_cost", "cut_cost", "full_cost"))
        plain = first["cpu_s"] + rest["cpu_s"] - rest["track_cpu_s"] - first["track_cpu_s"]
        events = "; ".join(f"step {event['step']}: {outcome(event)}" for event in ours["attempts"])
        spent = [f"{s:.1f}" for s in (ours["cpu_s"], ours["track_cpu_s"], ours["gate_cpu_s"], plain)]
        rows.append([seed, events, *spent])
    head = ["seed", "attempts", "all, s", "of it tracking, s", "of it gate, s", "plain, s"]
    return table_lines(head, rows)


RANKS = ("rank 1, scale a, rest trained", "rank 1, scale 1, rest trained", "rank 4, scale 1, rest trained",
         "rank 16, scale 1, rest trained", "rank 1, scale a, rest base", "modules whole, rest base")  # fmt: skip


def ranks(found: Found) -> list[str]:
    rows = [
        [name, found.accuracies(name), percent(found.gain(name)), str(found.change(name, "full") or "-")]
        for name in RANKS
        if found.has(name)
    ]
    return table_lines(["update", f"accuracy, seeds {', '.join(found.seeds)}", "share of the gain", "minus full"], rows)


def shapes(all_found: list[Found]) -> list[str]:
    rows = []
    for found in all_found:
        for seed, numbers, answers in zip(found.seeds, found.numbers, found.answers):
            if "modules" in numbers and seed == found.seeds[0]:
                modules = list(numbers["modules"].values())
                spread = [
                    f"{median(m[key] for m in modules):.3f} ({min(m[key] for m in modules):.3f})"
                    for key in ("share", "gap", "r2", "cosine_at_half")
                ]
                prompts = min(len(answers[n]) for n in (RANKS[0], "full", "base"))
                known = {n: answers[n][:prompts] for n in (RANKS[0], "full", "base")}
                ends = [f"{known[name].mean():.4f}" for name in ("base", "full")]
                gain = share_of_gain(*known.values())
                rows.append([found.name, f"{prompts:,}", *ends, percent(gain), *spread])
    head = ["algorithm", "test prompts", "start", "full", "share of the gain at rank 1, scale a", "sigma1 / norm",
            "gap", "R^2", "cosine to half-way"]  # fmt: skip
    return table_lines(head, rows)


def draw(all_found: list[Found], path: Path) -> None:
    """Left: accuracy along the scale of the rank-1 update. Right: R^2 of every module's trajectory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names: list[str] = []
    for number, found in enumerate(all_found):
        scans = [(n["scan"], a) for n, a in zip(found.numbers, found.answers) if "scan" in n]
        if scans:
            scan, answers = scans[0]
            left.plot(scan["factors"], scan["accuracy"], marker=".", color=f"C{number}", label=found.name)
            left.axhline(answers["full"][: scan["prompts"]].mean(), color=f"C{number}", linewidth=0.8, linestyle=":")
        modules = next((n["modules"] for n in found.numbers if "modules" in n), None)
        if modules:
            values = [m["r2"] for m in modules.values()]
            spread = numpy.linspace(-0.25, 0.25, len(values))
            right.plot(len(names) + spread, values, ".", color=f"C{number}")
            names.append(found.name)
    left.set(
        xlabel="scale of the rank-1 update, times a = |D| / sigma1", ylabel="test accuracy, sampled", xlim=(0, 2.05)
    )
    left.legend(title="dotted: the whole update", loc="lower center")
    right.set(ylabel="R^2 of x_t over steps, one dot per module", xticks=range(len(names)), ylim=(None, 1.005))
    right.set_xticklabels(names, rotation=20)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_headline(found: Found, cut: int, steps: int, path: Path) -> None:
    """Accuracy of every seed: start, 40 %, predictors, full."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [("start", "base"), (f"{cut} steps", "cut")]
    names += [(f"{p}\n{kind}", f"{kind} {p}") for p in predictors(found) for kind in ("gated", "ungated")]
    names += [("plain, same time\nas an attempt", "same cost"), (f"{steps} steps,\njumps", "with jumps")]
    names = [pair for pair in [*names, (f"{steps} steps", "full")] if found.has(pair[1])]
    figure, axes = pyplot.subplots(figsize=(11, 4.2), layout="constrained")
    for i, (_, name) in enumerate(names):
        values = [answers[name].mean() for answers in found.answers if name in answers]
        axes.plot([i] * len(values), values, "o", color="C1" if "ungated" in name else "C0", alpha=0.8)
    for name in ("cut", "full"):
        axes.axhline(fmean(a[name].mean() for a in found.answers if name in a), color="0.6", linewidth=0.8)
    axes.set(ylabel="test accuracy, sampled; one dot per seed", xticks=range(len(names)))
    axes.set_xticklabels(
        [label.replace("pls as in the paper", "pls (paper)") for label, _ in names], rotation=30, ha="right", fontsize=8
    )
    axes.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write(folder: Path, results: Path, cut: int, steps: int) -> None:
    """``alpha.md``, ``alpha.json`` and the pictures, from everything that is finished under ``folder``."""
    all_found = [f for f in map(Found, sorted(p for p in folder.iterdir() if p.is_dir())) if f.answers]
    mains = [f for f in all_found if any("cut" in a for a in f.answers)]
    results.mkdir(parents=True, exist_ok=True)
    text = [
        "# Extrapolated weights: results\n",
        "Written by `python -m bench.studies alpha`; docs/alpha.md explains it.\n",
    ]
    for found in mains:
        commits = sorted({n["commit"] for n in found.numbers})
        prompts = len(found.answers[0]["base"])
        text += [
            f"Algorithm {found.name}, {prompts:,} test prompts, one sampled answer each, commit {', '.join(commits)}. "
            "Intervals: 95 %, paired bootstrap over prompts, seeds averaged.\n",
            f"## {cut} steps, a prediction, {steps} steps\n", *headline(found, cut, steps), "",
            "## What the gate did\n", *decisions(found), "",
            "## What it costs\n", "Seconds of processor time, one thread, without tests.\n",
            *costs(found, cut, steps), "",
            "## A whole run with jumps\n", "Tests left out.\n", *jumps(found), "",
            "## The update at low rank\n", *ranks(found), "",
        ]  # fmt: skip
        draw_headline(found, cut, steps, results / "alpha_accuracy.png")
    text += ["## Algorithms\n", "Median over modules, the lowest in brackets; first seed.\n", *shapes(all_found), ""]
    (results / "alpha.md").write_text("\n".join(text))
    numbers = {f.name: {s: n | {"accuracy": {k: float(v.mean()) for k, v in a.items()}}
                        for s, n, a in zip(f.seeds, f.numbers, f.answers)} for f in all_found}  # fmt: skip
    for parts in numbers.values():
        for part in parts.values():
            part.pop("curve", None)
    (results / "alpha.json").write_text(json.dumps(numbers, indent=1) + "\n")
    if any("scan" in n for f in all_found for n in f.numbers):
        draw(all_found, results / "alpha_shape.png")
