"""Blocks of the pages run, links lead somewhere, and the settings and make targets that they name exist."""

import re
import shlex
import subprocess
import sys

import pytest
from pages import PAGES, ROOT, read_blocks, run_page

from python_trainer.commands import make_parser
from python_trainer.config import describe_settings, load_config

SLOW = {"quickstart.md", "algorithms.md", "accelerators.md", "integrations.md", "scale.md", "CONTRIBUTING.md"}
LINKED = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "SECURITY.md", "bench/README.md", "bench/gpu/README.md"))]
SECTION = re.compile(r"`((?:task|model|rollout|algorithm|optimizer|critic|evaluation|save|sft|accelerators)(?:\.\w+)+)")


def parametrize(pages):
    """One case a page; those that train, above ten seconds, are slow."""
    marks = {page: [pytest.mark.slow] if page.name in SLOW else [] for page in pages}
    return pytest.mark.parametrize("page", [pytest.param(p, id=p.name, marks=marks[p]) for p in pages])


@parametrize([page for page in PAGES if any(block.kind in ("python", "console") for block in read_blocks(page))])
def test_blocks_run(page, tmp_path, monkeypatch, capsys):
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    assert run_page(page, capsys)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_files_on_the_pages_pass_the_linter(tmp_path):
    """With the pages' own blank lines; names that an example never uses are its business."""
    for page in PAGES:
        for block in read_blocks(page):
            if block.kind == "python" and block.file:
                (tmp_path / page.stem).mkdir(exist_ok=True)
                (tmp_path / page.stem / block.file).write_text(block.text)
    ours = 'lint.isort.known-first-party = ["python_trainer", "rlkernels"]'
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"),
               "--config", ours, str(tmp_path)]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{page.name} links to {target}#{anchor}"


def anchors(text: str) -> set[str]:
    """Returns what the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_and_targets_exist(page):
    text = page.read_text()
    known = [key for key, *_ in describe_settings()]
    sections = {key.rpartition(".")[0] for key in known}
    for key in SECTION.findall(text):
        assert key in known or key in sections or key.endswith(".py"), f"{page.name} names {key}"
    makefile = (ROOT / "Makefile").read_text()
    code = re.findall(r"`([^`\n]+)`", text) + [block.text for block in read_blocks(page)]
    for target in set(re.findall(r"^(?:\$ )?make ([a-z-]+)", "\n".join(code), re.M)):
        assert re.search(rf"^[a-z -]*\b{target}\b[a-z -]*:", makefile, re.M), f"{page.name} names make {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_not_run_are_right(page, monkeypatch):
    """Those with a shipped configuration are parsed, and their settings checked."""
    monkeypatch.chdir(ROOT)
    for block in read_blocks(page):
        text = re.sub(r"\\\n\s*", "", block.text)
        for command in re.findall(r"-m (python_trainer .*)$", text, re.M) if block.kind == "sh" else ():
            arguments = make_parser().parse_args(shlex.split(command, comments=True)[1:])
            shipped = getattr(arguments, "config", None)
            if shipped and ((ROOT / shipped).exists() or (ROOT / "configs" / f"{shipped}.yaml").exists()):
                load_config(shipped, arguments.overrides)


def test_files_that_contributing_names_exist():
    named = set(re.findall(r"`([a-z_/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert len(named) >= 20
    for name in named - {"reference.py", "triton_kernels.py"}:  # of each folder of ops
        assert any((ROOT / folder / name).is_file() for folder in ("", "python_trainer", "tests/python_trainer")), name
