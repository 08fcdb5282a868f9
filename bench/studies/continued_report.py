"""Tables of ``python -m bench.studies continued``."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from bench._markdown import table_lines

SAME_NUMBERS, BY_CHANCE, FRESH = "same numbers", "min(1, p_new / p_old)", "fresh answers"
RULES = (SAME_NUMBERS, BY_CHANCE)

Record = Mapping[str, Any]
TableLine = tuple[str, Callable[[Record], str]]  # its name, and the cell of a run


def report(records: Sequence[Record]) -> str:
    """Markdown: a column for each measured run, a line for each pair of trained ones."""
    lines = [
        "# Answers continued",
        "",
        "By `python -m bench.studies continued`; records in continued.jsonl. CPU seconds of one thread.",
        *sorted({f"{row['cpu']}, torch {row['torch']}, commit {row['commit']}." for row in records}),
    ]
    records = sorted(records, key=lambda row: (row["task"], row["seed"], row["steps"]))
    if runs := [row for row in records if row["part"] == "measure"]:
        lines += ["", "## Measured", "", *measured_lines(runs)]
    pairs = [
        (plain, row)
        for row, plain in product(records, records)
        if (plain["part"], row["part"]) == ("plain", "continued")
        and all(plain[name] == row[name] for name in ("task", "seed", "steps"))
    ]
    if pairs:
        lines += ["", "## Trained: plain, continued with the same numbers", "", *trained_lines(pairs)]
    return "\n".join(lines) + "\n"


def name_of(row: Record) -> str:
    """``sums, 7, 30``."""
    return f"{row['task']}, {row['seed']}, {row['steps']}"


def measured_lines(runs: Sequence[Record]) -> list[str]:
    """Of the steps to whose prompts there were answers."""

    def each(name: str, cell: Callable[..., str], kinds: Sequence[str] = RULES) -> list[TableLine]:
        return [(f"{name}: {kind}", partial(cell, kind=kind)) for kind in kinds]

    def share(what: str) -> Callable[..., str]:
        return lambda row, kind: f"{row[f'{what}, {kind}'] / row[what]:.2f}"

    def spread(was: str) -> Callable[..., str]:
        def words(row: Record, kind: str) -> str:
            now, of = row[f"groups {was} spread, {kind}"]
            return f"{now / max(of, 1):.0%} of {of}"

        return words

    def faster(check: bool) -> Callable[..., str]:
        def words(row: Record, kind: str) -> str:
            other = row["step_s"] - row["rollout_s"]
            return f"{row['step_s'] / (other + row[f'continuing_s, {kind}'] + check * row['check_s']):.2f}"

        return words

    def gain(row: Record, kind: str) -> str:
        mean, error = row[f"right, {kind}"]
        return f"{100 * mean:.1f} ({100 * error:.1f})"

    table: list[TableLine] = [
        *each("tokens kept", share("tokens")),
        *each("answers kept whole", share("answers")),
        ("rollouts, s", lambda row: f"{row['rollout_s']:.1f}"),
        ("... of these steps", lambda row: f"{row['rollout_s'] / row['step_s']:.0%}"),
        ("the check by a forward pass, s", lambda row: f"{row['check_s']:.1f}"),
        *each("continuing, s", lambda row, kind: f"{row[f'continuing_s, {kind}']:.1f}"),
        *each("these steps, times faster", faster(check=True)),
        *each("... the check for nothing", faster(check=False)),
        *each("groups without a spread that get one", spread("without"), [FRESH, *RULES]),
        *each("groups with a spread that keep one", spread("with"), [FRESH, *RULES]),
        *each("right, less fresh, points (standard error)", gain),
    ]
    head = ["task, seed, steps", *map(name_of, runs)]
    return table_lines(head, [[name, *map(cell, runs)] for name, cell in table])


def trained_lines(pairs: Sequence[tuple[Record, Record]]) -> list[str]:
    """Each a run of plain training and one of answers continued."""
    head = ["task, seed, steps", "rollouts, s", "forward passes", "tokens taken over", "accuracy, mean of evaluations",
            "at the end"]  # fmt: skip
    rows = []
    for both in pairs:
        row = both[1]
        share = row["taken_over"] / row["tokens"]
        rows.append([
            name_of(row),
            ", ".join(f"{x['rollout_s'] + x['accelerator_s']:.1f}" for x in both),
            ", ".join(f"{x['forward_passes']:,.0f}" for x in both),
            f"{row['taken_over']:,.0f} of {row['tokens']:,.0f} ({share:.0%})",
            ", ".join(f"{x['accuracy']:.3f}" for x in both),
            ", ".join(f"{x['final']:.3f}" for x in both),
        ])  # fmt: skip
    return table_lines(head, rows)
