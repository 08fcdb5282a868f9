"""The size of the project. Raise a budget in a commit that says for what; CONTRIBUTING.md says what earns a place."""

import ast
import subprocess
from pathlib import Path

import pytest

from python_trainer.config import describe_settings

ROOT = Path(__file__).parents[1]
NODES = {"python_trainer": 122_800, "rlkernels": 147_400, "bench": 84_700, "tests": 365_200}  # of Python's syntax tree
LINES = {"csrc": 9_000}
SETTINGS = 116
WORDS = 21_600  # of README, CONTRIBUTING and docs
GENERATED = {"architectures.md"}  # tables of docs that a command writes
ENVIRONMENT = 1  # variables that users set for the trainer: WANDB_PROJECT


def count_nodes(text: str) -> int:
    """Count syntax nodes, which no typography changes; docstrings are one node each, comments none."""
    return sum(1 for _ in ast.walk(ast.parse(text)))


def tracked(folder: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return files of a folder with one of the suffixes: those that git tracks, or all where there is no repository."""
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        paths = list((ROOT / folder).rglob("*"))
    else:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and path.suffix in suffixes]


def check_total(folder: str, counts: dict[Path, int], budget: int) -> None:
    assert counts, f"no code found in {folder}"
    largest = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
    listing = ", ".join(f"{path.relative_to(ROOT)} {counts[path]}" for path in largest)
    assert sum(counts.values()) <= budget, f"{folder} has {sum(counts.values())}, the budget is {budget}: {listing}"


@pytest.mark.parametrize("folder", NODES)
def test_syntax_nodes(folder):
    paths = tracked(folder, (".py",))
    check_total(folder, {path: count_nodes(path.read_text(encoding="utf-8")) for path in paths}, NODES[folder])


@pytest.mark.parametrize("folder", LINES)
def test_lines_of_code(folder):
    paths = tracked(folder, (".cpp", ".h", ".cu", ".py"))
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    check_total(folder, counts, LINES[folder])


def test_nodes_are_what_is_counted_not_typography():
    spread = "def f(\n    a,\n    b,\n):\n    # a sum\n    total = a + b\n\n    return total\n"
    assert count_nodes(spread) == count_nodes("def f(a, b):\n    total = a + b; return total")
    assert count_nodes(spread) < count_nodes("def f(a, b):\n    total = a + b + 1\n    return total")


def test_number_of_settings():
    """Settings of all sections, with every entry of those that hold a mapping, and environment variables."""
    names = [key for key, *_ in describe_settings()]
    assert len(names) == len(set(names)) > 50
    assert len(names) + ENVIRONMENT <= SETTINGS, f"{len(names)} settings"


def test_words_of_the_pages():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    counts = {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages if page.name not in GENERATED}
    assert sum(counts.values()) <= WORDS, f"{sum(counts.values())} words: {counts}"
