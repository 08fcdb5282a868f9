"""The size of the project. Whoever goes over a budget removes something first; CONTRIBUTING.md says why."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = {"python_trainer": 13_000, "rlkernels": 11_000, "csrc": 8_300, "bench": 9_000, "tests": 25_000}
CODE = (".py", ".cpp", ".h", ".cu")


def tracked(folder: str) -> list[Path]:
    """Files of a folder that git tracks; all of them where there is no repository."""
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        return [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("folder", LINES)
def test_lines_of_code(folder):
    counts = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in tracked(folder) if path.suffix in CODE
    }
    assert counts, f"no code found in {folder}"
    largest = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
    found = ", ".join(f"{path.relative_to(ROOT)} {counts[path]}" for path in largest)
    assert sum(counts.values()) <= LINES[folder], f"{folder} has {sum(counts.values())} lines; the largest: {found}"
