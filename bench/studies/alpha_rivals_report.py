"""Tables of the study ``alpha_rivals``."""

from pathlib import Path
from statistics import fmean

from bench._markdown import table_lines
from bench._runner import cpu_model
from bench.studies.alpha_report import Found, Row, outcome
from python_trainer.run_directory import read_metrics

RATES = ("3e-5", "6e-5", "9e-5", "2e-4")
LOW, TUNED = RATES[0], RATES[-1]  # the first is that of the study alpha
STEPS, LONGER = 24, 48
ON_THE_WAY = 1024  # test prompts
AVERAGES = ("mean of the last 8", "moving average, 0.8 a step")
RANKS = (None, 1, 4, 16)  # None: the whole update
STRETCHES = (2.5, 1.75)
LATTICE = "lattice_paths"
PARTS = ("rates", "ranks", "gates", LATTICE)
GATES: dict[str, float | None] = {  # -> standard errors by which a batch's reward has to be above that of the last ones
    "a free gate": None,
    "judged on a batch, not below by an error": -1.0,
    "judged on a batch, above by an error": 1.0,
}


def plain_rate(rate: str) -> str:
    """Folder of the plain runs at this learning rate."""
    return f"rate-{rate}"


def rank_name(rank: int | None) -> str:
    return "whole update" if rank is None else f"rank {rank}"


def accuracies(found: Found, name: str) -> list[str]:
    """By seed, and their mean."""
    have = {found.seeds[i]: found.answers[i][name].mean() for i in found.has(name)}
    return [", ".join(f"{seed}: {accuracy:.3f}" for seed, accuracy in have.items()), f"{fmean(have.values()):.3f}"]


def rates(folder: Path) -> list[str]:
    rows = []
    for rate in RATES:
        found = Found(folder / plain_rate(rate))
        names = {f"{STEPS} steps": f"at {rate}"} | {f"{STEPS} steps, {kind}": f"... {kind}" for kind in AVERAGES}
        if rate == LOW:
            names[f"whole update, {STRETCHES[0]} times"] = f"... the whole update stretched {STRETCHES[0]} times"
        for name, words in names.items():
            if found.has(name):
                seconds = [n[f"{STEPS} steps_cost"]["cpu_s"] for n in found.numbers] if words.startswith("at") else []
                rows.append([words, *accuracies(found, name), ", ".join(f"{s:.0f}" for s in seconds)])
    head = [f"{STEPS} steps", "accuracy by seed", "mean", "CPU s without evaluations"]
    return table_lines(head, rows)


def ranks(folder: Path) -> list[str]:
    found, rows = Found(folder / plain_rate(LOW)), []
    before, best = f"{STEPS} steps", f"whole update, {STRETCHES[0]} times"
    for factor in STRETCHES:
        for rank in (*RANKS[1:], None):
            name = f"{rank_name(rank)}, {factor} times"
            if seeds := found.has(name, before, best):
                held = fmean(found.numbers[i][f"norm, {rank_name(rank)}"] for i in seeds)
                low, own, high = (found.stack(x, seeds).mean() for x in (before, name, best))
                share = f"{100 * (own - low) / (high - low):.0f} %" if high != low else "-"
                rows.append([name, f"{100 * held:.0f} %", *accuracies(found, name), share])
    head = [
        "stretched",
        "of an update's norm, mean over projections",
        "accuracy by seed",
        "mean",
        "share of the gain of the first stretch",
    ]
    return table_lines(head, rows)


def steps_of(numbers: Row) -> float:
    """CPU seconds of a run without evaluations and gate."""
    costs = [value for key, value in numbers.items() if key.endswith("_cost")]
    return sum(cost["cpu_s"] - cost["gate_cpu_s"] for cost in costs)


def gates(folder: Path, kinds: dict[str, Path], end: str) -> list[str]:
    """Runs with attempts beside plain ones, seed by seed."""
    every = {name: Found(path) for name, path in kinds.items()}
    rows = []
    for seed in sorted({seed for found in every.values() for seed in found.seeds}):
        for name, found in every.items():
            if seed not in found.seeds or end not in found.answers[found.seeds.index(seed)]:
                continue
            number = found.seeds.index(seed)
            numbers, answers = found.numbers[number], found.answers[number]
            run = kinds[name] / f"seed-{seed}" / "run"
            seen = {row["step"]: row["eval/accuracy"] for row in read_metrics(run) if "eval/accuracy" in row}
            if (middle := answers.get(f"{STEPS} steps")) is not None:
                seen[STEPS] = middle[:ON_THE_WAY].mean()  # this run had an end there
            way = ", ".join(f"{step}: {accuracy:.3f}" for step, accuracy in sorted(seen.items())[1:-1])
            told = [f"step {event['step']}: {outcome(event)}" for event in numbers[f"{end}_cost"]["attempts"]]
            if GATES.get(name) is not None:
                told = [text.replace("(gate", "(batch") for text in told]
            tokens = numbers[f"{end}_cost"]["counts"]["generated_tokens"]
            rows.append(
                [seed, name, way, f"{answers[end].mean():.3f}", f"{steps_of(numbers):.0f}", f"{tokens:,}", brief(told)]
            )
    head = ["seed", "run", "accuracy after step", "at the end", "CPU s without evaluations and gate",
            "generated tokens without them", "attempts"]  # fmt: skip
    return table_lines(head, rows)


def brief(told: list[str]) -> str:
    """Attempts in words; of refusals for one reason in a row only the first, with their number."""
    kept: list[tuple[str, str, int]] = []
    for text in told:
        words = text.partition(": ")[2]
        if kept and kept[-1][1] == words and words.startswith("refused"):
            kept[-1] = (kept[-1][0], words, kept[-1][2] + 1)
        else:
            kept.append((text, words, 1))
    return "; ".join(text if times == 1 else f"{text} ({times} times)" for text, _, times in kept) or "-"


def longer(folder: Path) -> list[str]:
    """Averages at the end of the longer plain runs."""
    found = Found(folder / plain_rate(TUNED))
    names = [f"{LONGER} steps", *(f"{LONGER} steps, {kind}" for kind in AVERAGES)]
    return table_lines(["weights", "accuracy by seed", "mean"],
                       [[name, *accuracies(found, name)] for name in names if found.has(name)])  # fmt: skip


def write(folder: Path, results: Path) -> None:
    """``alpha_rivals.md``, from everything that is finished under ``folder``."""
    parts = [numbers for path in sorted(folder.iterdir()) for numbers in Found(path).numbers]
    commits = sorted({commit for numbers in parts for commit in numbers["commit"].split()})
    kinds = {"plain": folder / plain_rate(TUNED)} | {name: folder / name for name in GATES}
    lattice = {name: folder / f"{LATTICE}, {name}" for name in ("plain", *GATES)}
    text = [
        "# Rivals of extrapolated weights: results\n",
        "Written by `python -m bench.studies alpha_rivals`; docs/alpha.md explains it.\n",
        f"{cpu_model()}, one thread, commit {', '.join(commits)}. 4,096 test prompts, one sampled answer each; on the "
        f"way {ON_THE_WAY:,}. Seconds are compared within a run only where other programs share the machine.\n",
        *section("Rates and averages", rates(folder)),
        *section(f"The update at {LOW} after {STEPS} steps, stretched: no gate, the rest as trained", ranks(folder)),
        *section(f"{LONGER} steps at {TUNED}", gates(folder, kinds, f"{LONGER} steps")),
        *section(f"Averages of the weights after {LONGER} plain steps at {TUNED}", longer(folder)),
        *section(LATTICE, gates(folder, lattice, "end")),
    ]
    results.mkdir(parents=True, exist_ok=True)
    (results / "alpha_rivals.md").write_text("\n".join(text))


def section(title: str, table: list[str]) -> list[str]:
    """Lines of a section, none where the table has no row."""
    return [f"## {title}\n", *table, ""] if len(table) > 2 else []
