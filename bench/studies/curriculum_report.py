"""Tables and picture of ``python -m bench.studies curriculum``."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from bench._markdown import table_lines
from bench.studies.ground_report import DYNAMIC_SAMPLING, PLAIN, Record, draw, first_time, machines, pass_words
from python_trainer.files import write_text

TOKENS, SECONDS = 2, 1  # columns of a curve
SHOWN = (  # in the picture; the rest is in the table
    PLAIN, DYNAMIC_SAMPLING, "shortest first", "curriculum", "right answers kept, rare or not",
    "answers of an earlier run, then plain", "curriculum after an earlier run",
    "curriculum after a smaller policy's run", "plain, half as long, rate to 0", "curriculum, half as long, rate to 0",
)  # fmt: skip
BEST_RIVAL = {"countdown": "shortest first"}  # of the rules without history, over five seeds; else dynamic sampling
EARLIER, EARLIER_SMALLER = "the earlier run", "the earlier run of a smaller policy"


def write(records: Sequence[Record], folder: Path) -> None:
    """curriculum.md and curriculum.png, of the runs that are recorded."""
    lines = ["# Right answers kept, prompts chosen, earlier runs read", "",
             "By `python -m bench.studies curriculum`; records in curriculum.jsonl. *To plain's end*: tokens and CPU",
             "seconds to the accuracy at which plain training of the same seed ends, in two successive evaluations,",
             "as shares of what plain training needs: geometric mean over seeds and its 95 % interval. *At least*, *N",
             "of M*: so many runs got there, and those that did not are counted with all that they took, so there is",
             "no interval. *To the end of* the best rival without history: the same against that. *For half of",
             "plain's tokens*: the accuracy on 512 prompts when half of plain training's tokens were generated, or at",
             "the end of a run that generated fewer. *pass@8*: of 512 prompts (of as many runs as in parentheses).",
             "Pairs are of one make of processor, not of one day: seconds of the same run differ by up to",
             "2.5 times."]  # fmt: skip
    for task in dict.fromkeys(row["task"] for row in records):
        mine = [row for row in records if row["task"] == task]
        lines += ["", f"## {task}", "", machines(mine), "", *task_lines(mine)]
        for row in (row for row in mine if row.get("part") == "earlier"):
            cost = f"{row['generated_tokens']:,} tokens and {row['cpu_s']:.0f} CPU s"
            lines += ["", f"{row['name'].capitalize()} took {cost} and ended at {row['final']:.3f}."]
    write_text(folder / "curriculum.md", "\n".join(lines) + "\n")
    if records:
        shown = [row for row in records if row["name"] in SHOWN]
        draw(shown, folder / "curriculum.png", TOKENS, "generated tokens")


def task_lines(records: Sequence[Record]) -> list[str]:
    """A row for each name, over its seeds."""
    best = BEST_RIVAL.get(records[0]["task"], DYNAMIC_SAMPLING)
    plain, rival = ({row["seed"]: row for row in records if row["name"] == name} for name in (PLAIN, best))
    head = ["", "seeds", "accuracy at the end", "pass@8", "tokens", "CPU s", "for half of plain's tokens",
            "tokens to plain's end", "CPU s to plain's end", f"tokens to the end of {best}",
            f"CPU s to the end of {best}"]  # fmt: skip
    rows = []
    for name in dict.fromkeys(row["name"] for row in records):
        group = [row for row in records if row["name"] == name and row["cpu"] == plain.get(row["seed"], {}).get("cpu")]
        if not group:
            continue
        pairs = [(row, plain[row["seed"]]) for row in group]
        rivals = [(row, rival[row["seed"]]) for row in group if rival.get(row["seed"], {}).get("cpu") == row["cpu"]]
        seeds = ", ".join(map(str, sorted(row["seed"] for row in group)))
        rows.append([
            name, seeds, f"{fmean(row['final'] for row in group):.3f}",
            pass_words(group),
            f"{fmean(row['generated_tokens'] for row in group):,.0f}", f"{fmean(row['cpu_s'] for row in group):.0f}",
            f"{fmean(accuracy_for(row, base['curve'][-1][TOKENS] / 2) for row, base in pairs):.3f}",
            *(share_words([share(row, base, column) for row, base in pairs]) for column in (TOKENS, SECONDS)),
            *(share_words([share(row, base, column) for row, base in rivals]) for column in (TOKENS, SECONDS)),
        ])  # fmt: skip
    return table_lines(head, rows)


def accuracy_for(row: Record, tokens: float) -> float:
    """At the evaluation nearest to so many tokens."""
    return min(row["curve"], key=lambda point: abs(point[TOKENS] - tokens))[-1]


def share(row: Record, other: Record, column: int) -> tuple[float, bool]:
    """What a run needs to the end of another one, over what that needs, and whether it gets there at all.

    Of one that does not it is what the whole run took: it would have needed more.
    """
    if row is other:
        return 1.0, True
    target = other["curve"][-1][-1]
    reached, needed = first_time(row, target, column), first_time(other, target, column) or other["curve"][-1][column]
    took = row["generated_tokens"] if column == TOKENS else row["cpu_s"]  # its curve may end sooner
    return (took if reached is None else reached) / needed, reached is not None


def share_words(shares: Sequence[tuple[float, bool]]) -> str:
    """``0.52 (0.41 to 0.66)``; ``at least 0.52, 4 of 5``: the others did not get there; ``-``: there are no pairs.

    What those would have needed is not known, so there is no interval then.
    """
    if not shares:
        return "-"
    got = sum(reached for _, reached in shares)
    if not got:
        return f"none of {len(shares)}"
    logs = [math.log(value) for value, _ in shares]
    mean = fmean(logs)
    words = f"{math.exp(mean):.2f}"
    if got < len(shares):
        return f"at least {words}, {got} of {len(shares)}"
    if len(logs) > 2:
        half = STUDENT[min(len(logs) - 1, len(STUDENT))] * stdev(logs) / math.sqrt(len(logs))
        words += f" ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"
    return words


STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}  # t for 95 % by degrees of freedom
