"""The base policies that come with the package: a folder each, by whose name ``model.path`` takes them."""

from pathlib import Path

from python_trainer.errors import UserError

SHIPPED = Path(__file__).parents[1] / "tasks" / "policies"


def shipped_policies() -> list[str]:
    """Their names."""
    return sorted(folder.name for folder in SHIPPED.iterdir() if (folder / "config.json").is_file())


def policy_folder(path: str) -> Path:
    """The folder, or GGUF file, that ``model.path`` means.

    Raises:
        UserError: there is none.
    """
    shipped = shipped_policies()
    folder = SHIPPED / path if path in shipped else Path(path)
    if not folder.is_dir() and not (folder.suffix == ".gguf" and folder.is_file()):
        raise UserError(
            f"model.path: there is no folder {folder}; give a folder in Hugging Face format, or one of "
            f"{', '.join(shipped)}"
        )
    return folder
