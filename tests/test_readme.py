"""The README's code runs, and what it points to exists."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/install.md"))
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md", "bench/gpu/README.md")),
]


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("README.md", 1),
        ("docs/kernels.md", 9),
        ("docs/python_api.md", 1),
        ("docs/alpha.md", 1),
    ],
)
def test_python_examples_run(page, count):
    """Of a page in docs the first ones: others download models, or have a test of their own."""
    text = (ROOT / page).read_text()
    blocks = [textwrap.dedent(b) for b in re.findall(r"^ *```python\n(.*?)```", text, re.S | re.M)]
    assert len(blocks) >= count
    names: dict = {}
    for block in blocks[:count]:
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{page.name} links to {target}#{anchor}"


def anchors(text: str) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^)make ([a-z]+)", TEXT, re.M)):
        assert re.search(rf"^[a-z ]*\b{target}\b[a-z ]*:", makefile, re.M), target
