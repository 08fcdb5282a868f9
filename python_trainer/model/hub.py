"""Find models and data sets: shipped with the package, in a folder, or on the Hugging Face Hub."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from python_trainer.errors import UserError, first_line

SHIPPED = Path(__file__).parents[1] / "tasks" / "policies"
FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.safetensors")  # of a repository, what a policy needs


def hub_model(path: str) -> tuple[str, str | None] | None:
    """Return name and revision of ``owner/name`` or ``owner/name@revision`` of the Hub; None: another form."""
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", path)
    return None if match is None else (match[1], match[2])


def snapshot(
    name: str, revision: str | None, *, kind: Literal["model", "dataset"], setting: str, files: Sequence[str] | None
) -> Path:
    """Download a repository unless it is cached; return its folder in the cache.

    Raises:
        UserError: there is no such repository, or it is not cached and the Hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            repo_type=kind,
            revision=revision,
            allow_patterns=None if files is None else list(files),
            # copies of the weights in other formats
            ignore_patterns=["*/*", "consolidated*"] if kind == "model" else None,
        )
    except Exception as error:  # of the client, its transport and proxies
        at = f" at revision {revision}" if revision else ""
        raise UserError(
            f"{setting}: {name}{at} is no folder here, and neither the Hub nor its cache gives it: {first_line(error)} "
            "(a private or gated repository needs `hf auth login`)"
        ) from error
    return Path(folder)


def shipped_policies() -> list[str]:
    """Return the names of the base policies that come with the package, a folder each."""
    return sorted(folder.name for folder in SHIPPED.iterdir() if (folder / "config.json").is_file())


def policy_folder(path: str, files: Sequence[str] = FILES) -> Path:
    """Return the folder that ``model.path`` names; download a model of the Hub.

    Raises:
        UserError: there is none.
    """
    folder = SHIPPED / path if path in shipped_policies() else Path(path)
    if folder.is_dir():
        return folder
    if (hub := hub_model(path)) is not None:
        return snapshot(*hub, kind="model", setting="model.path", files=files)
    raise UserError(
        f"model.path: there is no folder {folder}; give a folder in Hugging Face format, an owner/name of the Hub, or "
        f"one of {', '.join(shipped_policies())}"
    )
