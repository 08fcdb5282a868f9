"""Every interval on the pages, and every figure of README's table, is recomputed from rows in the repository."""

import csv
import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import fmean
from typing import Any

import pytest
from support import ROOT

from bench.studies.harness import Interval, paired, reached
from bench.studies.ranks import share_of_gain
from bench.studies.report import RESULTS, at_level, geometric, log_ratios, pair_of, read_rows, tables, to_plains_end

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTION = re.compile("## See what it is worth.*?\n## ", re.DOTALL)
INTERVAL = re.compile(r"(?<!in |to )\[[-+]?[\d.]+, [-+]?[\d.]+\]")


def arm_rows(name: str, arm: str) -> list[dict[str, Any]]:
    """Return the rows of an arm, of all seeds; ``name``: of the file, and behind a slash of one of its studies."""
    file, _, study = name.partition("/")
    rows = [row for row in read_rows(RESULTS / f"{file}.jsonl") if row["arm"] == arm and study in ("", row["study"])]
    assert rows, f"{name} has no rows of {arm}"
    return rows


def pairs_of(study: str, arm: str, plain: str = "plain") -> list[tuple[Any, Any]]:
    return paired(arm_rows(study, arm), arm_rows(study, plain))


def to_end(arm: str) -> list[str]:
    """Return tokens and seconds to plain's end on lattice_paths."""
    return [to_plains_end(pairs_of("earlier_runs", arm), column) for column in (0, 1)]


def with_earlier_run(arm: str) -> list[str]:
    """Return tokens and seconds to plain's end on lattice_paths, with those of the earlier run."""
    ratios = []
    for column, key in enumerate(("earlier tokens", "earlier seconds")):
        logs = []
        for row, plain in pairs_of("earlier_runs", arm):
            path, last = row["evaluations"], plain["evaluations"][-1]
            to_level = reached([*path, path[-1]], last[3])
            assert to_level, "the run of a seed does not get there"
            cost = to_level[column] + row[key]
            logs.append(math.log(cost / last[1 + column]))
        ratios.append(geometric(logs))
    return ratios


def points(arm: str) -> str:
    """Return the accuracy at the end minus plain's, on lattice_paths."""
    differences = [100 * (row["accuracy"] - plain["accuracy"]) for row, plain in pairs_of("earlier_runs", arm)]
    return bracketed(differences, "{:.1f}", "points higher ")


def bracketed(values: Sequence[float], form: str, unit: str = "") -> str:
    """Format a mean and its interval: ``74.2 % [70.1, 78.3]``."""
    interval = Interval.of(values)
    assert interval.low is not None, "one seed has no interval"
    return f"{form.format(interval.mean)} {unit}[{form.format(interval.low)}, {form.format(interval.high)}]"


@cache
def alpha_accuracies() -> list[dict[str, float]]:
    """Return accuracies of each seed after 24 of 60 steps, at the end, and with other weights."""
    return [seed["accuracy"] for seed in json.loads((RESULTS / "alpha.json").read_text())["dapo"].values()]


def share_gained(weights: str) -> str:
    shares = [100 * (seed[weights] - seed["base"]) / (seed["full"] - seed["base"]) for seed in alpha_accuracies()]
    return bracketed(shares, "{:.1f}", "% ")


def accuracy_kept(weights: str) -> str:
    return bracketed([100 * seed[weights] / seed["full"] for seed in alpha_accuracies()], "{:.1f}", "% ")


def suffixes(plain: str) -> list[str]:
    """Return tokens and seconds to 0.60 of RPO by plain, and the difference at the end."""
    variants = json.loads((RESULTS / "rpo.json").read_text())["variants"]
    with_rpo, without_rpo = variants[f"{plain}+rpo"], variants[plain]
    keys = ("tokens_to_0.6", "seconds_to_0.6")
    ratios = []
    for key in keys:
        pairs = zip(with_rpo[key], without_rpo[key], strict=True)
        ratios.append(geometric([math.log(a / b) for a, b in pairs]))
    differences = [100 * (a - b) for a, b in zip(with_rpo["accuracy"], without_rpo["accuracy"], strict=True)]
    return [*ratios, bracketed(differences, "{:.1f}")]


def sooner(arm: str, text: str = "") -> list[str]:
    """Return mean seconds to 0.85, and how many times as long TRL takes."""
    pairs = pairs_of("trl", "TRL", arm)
    ratios = Interval.of(log_ratios([pair_of(pair, 0.85) for pair in pairs], 1))
    mean, *ends = (f"{math.exp(log_ratio):.1f}" for log_ratio in (ratios.mean, ratios.low, ratios.high))
    return [f"{fmean(at_level(arm_rows('trl', arm), 0.85, 1)):.1f}", f"{mean} {text}[{', '.join(ends)}]"]


QUARTER = "a quarter of the prompts"
AFTER = "rhyme after the smaller run"
CUTS, PRESET = "rpo, cuts of 0.3", "rpo as in the paper, cuts of 0.3"


def with_weights(name: str, arm: str = "plain", study: str = "sentences/keys") -> list[str]:
    """Return the accuracy of the runs of a study with other weights, by seed, and the share of the gain."""
    rows = arm_rows(study, arm)
    seeds = [row["more"]["other weights"] for row in sorted(rows, key=lambda row: row["seed"])]
    shares = [100 * share_of_gain(weights, name) for weights in seeds]
    return [*(f"{weights[name][0]:.3f}" for weights in seeds), bracketed(shares, "{:z.0f}", "% ")]


def points_above(pairs: Sequence[tuple[Any, Any]]) -> str:
    """Return the accuracy of an arm at the end minus plain's, in points."""
    return bracketed([100 * (row["accuracy"] - plain["accuracy"]) for row, plain in pairs], "{:.1f}")


def each(figures: Callable[[str], list[str]], cases: dict[str, str]) -> dict[str, Callable[[], list[str]]]:
    """Return claims: how a line begins -> the figures of its arm, study or weights."""
    return {start: partial(figures, case) for start, case in cases.items()}


def by_position(arm: str) -> list[str]:
    """Return an arm's points above plain's with errors late, anywhere and early."""
    return [points_above(pairs_of(f"rpo_positions/errors {part}", arm)) for part in ("late", "anywhere", "early")]


def tokens_to(level: float, part: str, arm: str) -> str:
    """Return an arm's tokens to a level with errors in a part of the answers, as a share of plain's."""
    pairs = pairs_of(f"rpo_positions/errors {part}", arm)
    return geometric(log_ratios([pair_of(pair, level) for pair in pairs], 0))


def late_tokens(arm: str) -> list[str]:
    """Return an arm's tokens to 0.8 with errors late, as a share of plain's."""
    return [tokens_to(0.8, "late", arm)]


def by_rank(study: str) -> list[str]:
    """Return the shares of plain's gain that the leading ranks of its update keep."""
    return [with_weights(name, study=study)[-1] for name in ("rank 1, norm kept", "rank 4", "rank 16")]


def whole_run(study: str, arm: str, baseline: str = "plain") -> list[str]:
    """Return the accuracy of an arm at the end, its points above the baseline, and tokens and seconds of the run."""
    rows = arm_rows(study, arm)
    costs = [f"{fmean(row[key] for row in rows):,.0f}" for key in ("tokens", "seconds")]
    points = [] if arm == baseline else [points_above(pairs_of(study, arm, baseline))]
    return [f"{fmean(row['accuracy'] for row in rows):.3f}", *points, *costs]


def with_history(arm: str, *algorithms: str) -> list[str]:
    """Return the end of an arm of 80 steps on lattice_paths, its points above plain's, and its seconds.

    The seconds include the earlier run's.
    """
    figures = []
    for algorithm in algorithms or ("grpo", "ppo"):
        study = f"rhyme/{algorithm}"
        seconds = fmean(row["seconds"] + row.get("earlier seconds", 0) for row in arm_rows(study, arm))
        figures += [*whole_run(study, arm)[:-2], f"{seconds:.0f} s"]
    return figures


def overhead(algorithm: str) -> list[str]:
    """Return the mean share of the time that ``rhyme`` takes, alone and with a database."""
    arms = [arm_rows(f"rhyme/{algorithm}", arm) for arm in ("rhyme", AFTER)]
    return [f"{100 * fmean(row['more']['share of rhyme'] for row in rows):.0f} %" for rows in arms]


def chosen_by(arm: str) -> list[str]:
    """Return the end of an arm that chooses stored answers in another way, and its points above `rhyme`'s."""
    return whole_run("rhyme/grpo", arm, AFTER)[:2]


def of_stages() -> list[str]:
    """Return the ends with 5, 20 and 100 % of the stages, and the points of the other two above 20 %."""
    arms = "after it, 5 % of stages", AFTER, "after it, 100 % of stages"
    ends = [f"{fmean(row['accuracy'] for row in arm_rows('rhyme/grpo', arm)):.3f}" for arm in arms]
    return [*ends, *(points_above(pairs_of("rhyme/grpo", arm, AFTER)) for arm in arms[::2])]


def early_gain(arm: str) -> list[str]:
    """Return an arm's share of plain's gain after 80 of 200 steps, and its end, at the low and the tuned rate."""
    figures = []
    for study in ("low rate", "tuned rate"):
        rows = arm_rows(f"alpha_200/{study}", arm)
        figures.append(bracketed([100 * row["more"]["gain at 40 %"] for row in rows], "{:.0f}", "% "))
        figures.append(f"{fmean(row['accuracy'] for row in rows):.3f}")
    return figures


def straightness(study: str) -> list[str]:
    """Return R^2 of lines over plain's 200 steps, and that of the lowest module."""
    rows = arm_rows(f"alpha_200/{study}", "plain")
    return [bracketed([row["more"][key] for row in rows], "{:.2f}") for key in ("R^2 of a line", "lowest R^2")]


def beside_plain(arm: str) -> list[str]:
    """Return the end of an arm on sentences, its points above plain's, and the cost to 0.5 as shares of plain's."""
    pairs = pairs_of("sentences/keys", arm)
    points = points_above(pairs)
    costs = [geometric(log_ratios([pair_of(pair, 0.5) for pair in pairs], column)) for column in (0, 1)]
    return [f"{fmean(row['accuracy'] for row, _ in pairs):.3f}", points, *costs]


def after_earlier_run(arm: str) -> list[str]:
    """Return accuracy, tokens and seconds on sentences, the latter two alone and with the earlier run."""
    rows = arm_rows("sentences/keys", arm)
    figures = [f"{fmean(row['accuracy'] for row in rows):.3f}"]
    for key in ("tokens", "seconds"):
        cost, earlier_cost = (fmean(row.get(name, 0) for row in rows) for name in (key, f"earlier {key}"))
        figures += [f"{cost:,.0f}", f"{cost + earlier_cost:,.0f}"]
    return figures


def update(provider: str) -> str:
    """Return seconds and memory of an update of TRL with 8 answers in a micro-batch."""
    with (ROOT / "bench" / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["op"], row["provider"]) == ("trl_update", provider)]
    *_, row = (row for row in rows if row["shape"] == "prompt 256, answers 64 to 128, group of 8, 8 a micro-batch")
    return f"{float(row['median_s']):.2f} s, {float(row['peak_bytes']) / 1e9:.2f}"


def gpu(op: str, provider: str, shape: str, digits: int, memory: bool = True) -> str:
    """Return milliseconds and memory of a call on the H200."""
    lines = (ROOT / "bench" / "gpu" / "records" / "NVIDIA-H200-30a78fa.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "row"]
    (row,) = (row for row in rows if (row["op"], row["provider"], row["shape"]) == (op, provider, shape))
    peak = f", {row['peak_bytes'] / 1e9:.1f} GB" if memory else ""
    return f"{1e3 * row['median_s']:.{digits}f} ms{peak}"


UPDATE = ("TRL, head on answers", "rlkernels, no padding", "rlkernels")
LOGPROBS, CROSS = "4096 x 151936, both ways", "cross entropy, 4096 x 896 x 151936"
DECODE, MATRIX = "decode: 256 sequences of 1024, Qwen2.5-0.5B heads", "14336 x 4096"
COMPILED = ("torch.compile", "triton")
OURS = "rhyme (curriculum)"
CLAIMS = {  # how a line of a page begins -> its figures, in their order
    "README.md": {
        "| one update in TRL": lambda: list(map(update, UPDATE)),
        "| sums to accuracy": lambda: [sooner("TRL")[0], *sooner("python_trainer", "times sooner ")],
        "| log-probabilities of 4,096": lambda: [gpu("token_logprobs", who, LOGPROBS, 1) for who in COMPILED],
        "| leading direction": lambda: [gpu("top1_delta", *case, memory=False) for case in
                                        (("torch", MATRIX, 1), ("triton", MATRIX, 2))],
        "| log-probabilities without": lambda: [gpu("linear_token_logprobs", who, CROSS, 1) for who in COMPILED],
        "| decoding": lambda: [gpu("paged_attention", *case, memory=False) for case in
                               (("torch SDPA", DECODE, 3), ("triton", DECODE, 2))],
    },
    "docs/results.md": {
        "| `rhyme` after a run of the same": lambda: [
            *to_end(f"{OURS} after an earlier run"), *with_earlier_run(f"{OURS} after an earlier run")
        ],
        "| that run's right answers": lambda: [
            *to_end("answers of an earlier run, then plain"), *with_earlier_run("answers of an earlier run, then plain")
        ],
        "| `rhyme` after a run of a smaller": lambda: [
            *to_end(f"{OURS} after a smaller policy's run"), *with_earlier_run(f"{OURS} after a smaller policy's run")
        ],
        "| dynamic sampling, seeds": lambda: to_end("dynamic sampling"),
        "Without a database": lambda: [to_end(f"{OURS}, no database")[0], points(f"{OURS}, no database")],
        "Dynamic sampling ends": lambda: [points("dynamic sampling")],
        **each(with_history, {
            "| plain, 80 steps": "plain",
            "| half of the prompts, 80 steps": "half of the prompts",
            "| `rhyme`, no database |": "rhyme",
            "| `rhyme`, database of a smaller policy |": AFTER,
        }),
        "| a quarter of the prompts, 80 steps": lambda: with_history(QUARTER, "grpo"),
        "| GRPO, `lattice_paths` | `rhyme`; with": lambda: overhead("grpo"),
        "| PPO, `lattice_paths` | `rhyme`; with": lambda: overhead("ppo"),
        "| an oracle, GRPO": lambda: chosen_by("after it, an oracle"),
        "| GRPO, `lattice_paths` | 5, 20": lambda: of_stages(),
        "| 60 steps at 3e-5 |": lambda: [
            share_gained(f"rank {rank}, rest trained") for rank in ("1, scale a", "4, scale 1", "16, scale 1")
        ],
        "| nothing more |": lambda: [share_gained("cut")],
        "| `pls`, as the paper |": lambda: [share_gained("ungated pls as in the paper")],
        "| `secant` |": lambda: [share_gained("ungated secant")],
        "Without that norm": lambda: [with_weights("rank 1", study=f"alpha_200/{rate} rate")[-1] for rate in
                                      ("low", "tuned")],
        "| 200 steps, 3e-5": lambda: straightness("low rate"),
        "| 200 steps, 2e-4": lambda: straightness("tuned rate"),
        **each(early_gain, {
            "| plain, 200 steps |": "plain",
            "| `preset: paper` |": "paper preset",
            "| rank 1, gated (one jump in six runs) |": "rank 1, gated",
            "| a quarter of the prompts, 200 steps |": QUARTER,
            "| twice the rate, 200 steps |": "twice the rate",
            "| four times the rate, 200 steps |": "four times the rate",
        }),
        "At 3e-5 four times the rate ends": lambda: whole_run("alpha_200/low rate", "four times the rate")[1:2],
        "| `full` |": lambda: [share_gained("ungated full"), accuracy_kept("ungated full")],
        "| GRPO; `rpo` |": lambda: suffixes("grpo"),
        "| DAPO; `rpo` |": lambda: suffixes("dapo"),
        "| points of `rpo`": lambda: by_position(CUTS),
        "| points of the preset": lambda: by_position(PRESET),
        "| tokens to 0.7, `rpo`": lambda: [tokens_to(0.7, part, CUTS) for part in ("late", "anywhere", "early")],
        **each(late_tokens, {
            "| `rpo` to 0.8": CUTS,
            "| the preset to 0.8": PRESET,
            f"| {QUARTER} to 0.8": QUARTER,
        }),
        "| a quarter of the prompts | 0.780": lambda: beside_plain(QUARTER),
        **each(beside_plain, {
            "| twice the rate |": "plain, twice the rate",
            "| four times the rate |": "plain, four times the rate",
            "| eight times the rate |": "plain, eight times the rate",
            "| `alpha` as in the paper": "alpha as in the paper",
            "| `alpha`, gated": "alpha, gated",
            "| a quarter of the prompts, twice the rate, seeds": f"{QUARTER}, twice the rate",
            "| a quarter of the prompts, eight times the rate |": f"{QUARTER}, eight times the rate",
            "| a quarter of the prompts, four times the rate |": f"{QUARTER}, four times the rate",
        }),
        **each(after_earlier_run, {
            "| nothing: plain |": "plain",
            "| its database: `rhyme` |": "rhyme",
            "| its right answers, then plain |": "its right answers, then plain",
            "| its weights, 20 more steps |": "its weights, 20 more steps",
        }),
        "| before |": lambda: with_weights("start")[:-1],
        "| after |": lambda: with_weights("end")[:-1],
        "| projections not trained": lambda: with_weights("rank 0"),
        "| rank 1 |": lambda: with_weights("rank 1"),
        "| rank 1, norm of the update kept": lambda: with_weights("rank 1, norm kept"),
        "| after 20 of the steps": lambda: with_weights("step 20"),
        "| then `secant` to the end": lambda: with_weights("step 20, then secant"),
        "| then `pls` in rank 1 alone": lambda: with_weights("step 20, then pls, rank 1 alone, norm kept"),
        "| with a quarter of the prompts": lambda: with_weights("rank 1, norm kept", QUARTER),
        "| near: before |": lambda: with_weights("start", study="sentences/near")[:-1],
        "| near: after |": lambda: with_weights("end", study="sentences/near")[:-1],
        **each(partial(with_weights, study="sentences/near"), {
            "| near: projections not trained": "rank 0",
            "| near: rank 1 |": "rank 1",
            "| near: rank 1, norm of the update kept": "rank 1, norm kept",
            "| near: rank 16, norm kept": "rank 16, norm kept",
            "| near: after 40 of the steps": "step 40",
            "| near: then `secant` to the end": "step 40, then secant",
            "| near: then `pls` in rank 1 alone": "step 40, then pls, rank 1 alone, norm kept",
        }),
        "| near: with a quarter of the prompts": lambda: with_weights("rank 1, norm kept", QUARTER, "sentences/near"),
        "| plain, near": lambda: whole_run("sentences/near", "plain"),
        "| a quarter of the prompts, near": lambda: whole_run("sentences/near", QUARTER),
        **each(partial(whole_run, "sentences/form"), {
            "| plain, form": "plain",
            "| half of the prompts, form": "half of the prompts",
            "| a quarter of the prompts, form": QUARTER,
            "| a quarter, twice the steps |": f"{QUARTER}, twice the steps",
            "| `rpo`, filling included": "rpo",
            "| `rpo` as in the paper, filling included": "rpo as in the paper",
        }),
        **each(partial(whole_run, "sentences/form", baseline="plain, twice the rate"), {
            "| plain, at 8e-5": "plain, twice the rate",
            "| a quarter, twice the steps, at 8e-5": f"{QUARTER}, twice the steps, twice the rate",
            "| `rpo`, at 8e-5": "rpo, twice the rate",
        }),
        **each(partial(whole_run, "sentences/count"), {
            "| plain, count": "plain",
            "| `rhyme`, its own right answers": "rhyme",
            "| 8 prompts of 16 answers": "8 prompts of 16 answers",
            "| dynamic sampling, count": "dynamic sampling",
            "| a quarter of the prompts, count": QUARTER,
            "| plain at twice the rate, count": "plain, twice the rate",
            "| a quarter of the prompts at twice the rate, count": f"{QUARTER}, twice the rate",
        }),
        **each(by_rank, {
            "| 200 steps at 3e-5": "alpha_200/low rate",
            "| 200 steps at 2e-4": "alpha_200/tuned rate",
            "| [SmolLM2-135M]": "sentences/keys",
            "| the same, number of words": "sentences/near",
        }),
        "| TRL 1.16 | 49": lambda: [sooner("TRL")[0]],
        "| this trainer | 7": lambda: sooner("python_trainer"),
        "| with half of the prompts": lambda: sooner("half of the prompts"),
        "| with all four accelerators |": lambda: sooner("python_trainer, all accelerators"),
    },
}  # fmt: skip


def check(line: str, figures: Sequence[str]) -> None:
    """Assert that a line has these figures in this order, and no further interval."""
    text = line.replace("**", "").replace("|", " ").replace("  ", " ")
    position = 0
    for figure in figures:
        assert figure in text[position:], f"the rows give {figure}, and the page says {line}"
        position = text.index(figure, position) + len(figure)
    num_stated = len(INTERVAL.findall(text))
    num_computed = sum(len(INTERVAL.findall(figure)) for figure in figures)
    assert num_stated == num_computed, f"{num_stated - num_computed} intervals are not computed in {line}"


@pytest.mark.parametrize(
    ("page", "start"),
    [(page, start) for page, claims in CLAIMS.items() for start in claims],
    ids=lambda text: text[:30],
)
def test_figures_are_those_of_the_rows(page, start):
    (line,) = (line for line in (ROOT / page).read_text().splitlines() if line.startswith(start))
    check(line, CLAIMS[page][start]())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_interval_is_computed_here(page):
    starts = tuple(CLAIMS.get(page.relative_to(ROOT).as_posix(), ()))
    for line in re.sub("```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines():
        if not line.startswith(starts):
            assert not INTERVAL.search(re.sub("`[^`]*`", "", line)), f"{page.name} has an interval: {line}"


def test_every_line_of_the_readme_with_figures_is_computed_here():
    _, _, *lines = re.findall(r"^\| .*|^\|-.*", SECTION.search((ROOT / "README.md").read_text())[0], re.MULTILINE)
    assert lines and not [line for line in lines if not line.startswith(tuple(CLAIMS["README.md"]))]


@pytest.mark.parametrize(("name", "module"), [("sentences", "sentences"), ("drafts", "drafts"), ("rhyme", "rhyme"),
                                              ("alpha_200", "alpha"), ("rpo_positions", "rpo")])  # fmt: skip
def test_the_page_of_a_study_has_the_tables_of_its_rows(name, module):
    rows = read_rows(RESULTS / f"{name}.jsonl")
    page = (RESULTS / f"{name}.md").read_text().splitlines()
    expected: list[str] = []
    for study in importlib.import_module(f"bench.studies.{module}").STUDIES:
        if study_rows := [row for row in rows if row["study"] == study.name]:
            expected += [line for line in tables(study, study_rows) if line]
    assert expected and [line for line in page if line.startswith("|")] == expected


def test_a_changed_figure_and_a_missing_row_are_found(monkeypatch):
    figures = CLAIMS["docs/results.md"]["| this trainer | 7"]
    line = "| this trainer | 7.5 | 6.6 [5.0, 8.7] |"
    check(line, figures())
    for changed_line in (line.replace("5.0", "4.9"), line.replace("6.6", "6.7"), line + " 1.0 [0.9, 1.1] |"):
        with pytest.raises(AssertionError):
            check(changed_line, figures())
    rows = read_rows(RESULTS / "trl.jsonl")
    monkeypatch.setattr("test_evidence.read_rows", lambda path: [row for row in rows if row["seed"] != 2])
    with pytest.raises(AssertionError, match="the rows give"):
        check(line, figures())
    monkeypatch.setattr("test_evidence.read_rows", lambda path: [])
    with pytest.raises(AssertionError, match="has no rows"):
        figures()
