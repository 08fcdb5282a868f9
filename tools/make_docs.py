"""The documentation as one site: all pages, the list of settings, and the API from the docstrings.

``make docs`` writes site/index.html and more. A link that leads nowhere ends it with an error.
"""

import importlib
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "build" / "pages"  # what mkdocs reads: mkdocs.yml names it
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
       "SECURITY.md": "security.md"}  # fmt: skip
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# modules of the trainer that your own loop can use
TRAINER = ("trainer", "config", "run.callbacks", "data", "environment", "loop.learner", "algorithms.advantages",
           "algorithms.losses", "model.policy", "rollout.engine", "tasks.base", "tasks.settings", "accelerators.base",
           "accelerators.settings")  # fmt: skip


def public_modules() -> list[str]:
    """List the modules whose public names are documented: their ``__all__``."""
    import rlkernels
    from rlkernels import integrations

    packages = [f"rlkernels.{module.name}" for module in pkgutil.iter_modules(rlkernels.__path__) if module.ispkg]
    plugins = [f"rlkernels.integrations.{module.name}" for module in pkgutil.iter_modules(integrations.__path__)]
    return ["rlkernels", *(name for name in packages if name != "rlkernels.integrations"), *plugins]


def importable(names: Iterable[str]) -> list[str]:
    """Leave out the integrations whose library is not installed, and name them."""
    imported = []
    for name in names:
        try:
            importlib.import_module(name)
            imported.append(name)
        except ImportError as error:
            print(f"left out: {name} ({error})")
    return imported


def published(path: Path) -> str | None:
    """Return where a file of the repository stands in the site; None: it is not part of it."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    if name in TOP:
        return TOP[name]
    return name.removeprefix("docs/") if name.startswith("docs/") else None


def rewrite_links(text: str, page: Path) -> str:
    """Point the links of a page into the site; a link to a source file becomes its text.

    Raises:
        FileNotFoundError: a link leads to no file.
    """

    def rewrite(link: re.Match[str]) -> str:
        mark, words, target, anchor = link.groups()
        file = Path(os.path.normpath(page.parent / target))
        if not file.exists():
            raise FileNotFoundError(f"{page.relative_to(ROOT)} links to {target}")
        place = published(file)
        return words if place is None else f"{mark}[{words}]({place}{anchor or ''})"

    parts = re.split(rf"({FENCE.pattern})", text, flags=FENCE.flags)
    return "".join(part if part.startswith("```") else LINK.sub(rewrite, part) for part in parts)


def write_pages() -> None:
    """Copy all pages with their pictures to the folder that mkdocs reads."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCES)
    for page in [*(ROOT / name for name in TOP), *(ROOT / "docs").glob("*.md")]:
        place = published(page)
        assert place is not None
        (SOURCES / place).write_text(rewrite_links(page.read_text(encoding="utf-8"), page), encoding="utf-8")


def write_settings() -> None:
    """Write the list of settings, a table a section."""
    from python_trainer.config import describe_settings

    lines, section = ["# Settings", "", "`python -m python_trainer train --help-settings` prints this list."], None
    for key, kind, default, text in describe_settings():
        key_section, _, _ = key.rpartition(".")
        if key_section != section:
            section = key_section
            lines += ["", f"## {section or 'A run'}", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
        cells = (f"`{key}`", f"`{kind}`", f"`{default}`", " ".join(text.split()))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    (SOURCES / "settings.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_api() -> None:
    """Write a page of references for each public module, and their list."""
    folder = SOURCES / "api"
    folder.mkdir()
    rows = ["# API", ""]
    names = [name for name in importable(public_modules()) if name != "rlkernels"]
    for name in [*names, *(f"python_trainer.{part}" for part in TRAINER)]:
        module = importlib.import_module(name)
        entries = [f"{name}.{entry}" for entry in getattr(module, "__all__", ())] or [name]
        text = "\n\n".join(f"::: {entry}" for entry in entries)
        about = (module.__doc__ or "").strip().split("\n")[0].replace("``", "`")
        intro = "" if entries == [name] else f"{about}\n\n"
        (folder / f"{name}.md").write_text(f"# {name}\n\n{intro}{text}\n", encoding="utf-8")
        rows.append(f"- [{name}]({name}.md): {about}")
    (folder / "index.md").write_text("\n".join(rows) + "\n", encoding="utf-8")


def on_page_content(html: str, **_: object) -> str:
    """Make plain names of Sphinx's roles in docstrings; mkdocs calls it as a hook."""
    html = re.sub(r":(?:func|class|meth|mod|attr|data):(?=<code>)", "", html)
    return re.sub(r"<code>~(?:\w+\.)*(\w+)</code>", r"<code>\1</code>", html)


def main(folder: Path) -> int:
    from mkdocs.__main__ import cli

    write_pages()
    write_settings()
    write_api()
    options = ["--strict", "--quiet", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(folder.absolute())]
    cli(["build", *options], standalone_mode=False)
    print(f"{len(list(folder.rglob('*.html')))} pages: {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
