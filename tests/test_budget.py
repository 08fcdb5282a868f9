"""The size of the project. Whoever goes over a budget removes something first; CONTRIBUTING.md says why."""

import subprocess
from pathlib import Path

import pytest

from python_trainer.config import describe_settings

ROOT = Path(__file__).parents[1]
# Lower that of rlkernels with every cut: the aim is 11,000.
LINES = {"python_trainer": 12_500, "rlkernels": 11_671, "csrc": 8_300, "bench": 9_000, "tests": 25_000}
SETTINGS = 110
WORDS = 20_000  # of README, CONTRIBUTING and docs
GENERATED = {"architectures.md"}  # tables of docs that a command writes
ENVIRONMENT = 1  # variables that users set for the trainer: WANDB_PROJECT
CODE = (".py", ".cpp", ".h", ".cu")


def tracked(folder: str) -> list[Path]:
    """Files of a folder that git tracks; all of them where there is no repository."""
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        return [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("folder", LINES)
def test_lines_of_code(folder):
    paths = [path for path in tracked(folder) if path.suffix in CODE]
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert counts, f"no code found in {folder}"
    largest = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
    found = ", ".join(f"{path.relative_to(ROOT)} {counts[path]}" for path in largest)
    assert sum(counts.values()) <= LINES[folder], f"{folder} has {sum(counts.values())} lines; the largest: {found}"


def test_number_of_settings():
    """Settings of all sections, with every entry of those that hold a mapping, and environment variables."""
    names = [key for key, *_ in describe_settings()]
    assert len(names) == len(set(names)) > 50
    assert len(names) + ENVIRONMENT <= SETTINGS, f"{len(names)} settings"


def test_words_of_the_pages():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    counts = {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages if page.name not in GENERATED}
    assert sum(counts.values()) <= WORDS, f"{sum(counts.values())} words: {counts}"
