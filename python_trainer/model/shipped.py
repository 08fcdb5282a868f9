"""The base policies that come with the package: a folder each, by whose name ``model.path`` takes them."""

from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "tasks" / "policies"


def shipped_policies() -> list[str]:
    """Their names."""
    return sorted(folder.name for folder in SHIPPED.iterdir() if (folder / "config.json").is_file())


def policy_folder(path: str) -> Path:
    """The folder that ``model.path`` means."""
    return SHIPPED / path if path in shipped_policies() else Path(path)
