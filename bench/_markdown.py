"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table_lines(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A heading, the rule below it and a line for each row."""
    lines = [" | ".join(map(str, cells)) for cells in (head, *rows)]
    return [f"| {lines[0]} |", "|" + "---|" * len(head), *(f"| {line} |" for line in lines[1:])]
