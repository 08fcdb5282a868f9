"""Where the weights are that ``model.path`` names: shipped with the package, in a folder, or on the Hub."""

from collections.abc import Sequence
from pathlib import Path

from python_trainer.errors import UserError
from python_trainer.hub import is_hub_id, snapshot

SHIPPED = Path(__file__).parents[1] / "tasks" / "policies"
FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.safetensors")  # of a repository, what a policy needs


def shipped_policies() -> list[str]:
    """Names of the base policies that come with the package, a folder each."""
    return sorted(folder.name for folder in SHIPPED.iterdir() if (folder / "config.json").is_file())


def policy_folder(path: str, revision: str | None = None, files: Sequence[str] = FILES) -> Path:
    """The folder, or GGUF file, that ``model.path`` means, fetched where it is an id of the Hub.

    Args:
        files: patterns of what is fetched.

    Raises:
        UserError: there is none, or a revision of what has none.
    """
    folder = SHIPPED / path if path in shipped_policies() else Path(path)
    if folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file()):
        if revision is not None:
            raise UserError(f"model.revision is for a model of the Hub, but model.path {path} is a folder here")
        return folder
    if is_hub_id(path):
        return snapshot(path, revision, kind="model", setting="model.path", files=files)
    raise UserError(
        f"model.path: there is no folder {folder}; give a folder in Hugging Face format, an owner/name of the Hub, or "
        f"one of {', '.join(shipped_policies())}"
    )
