"""Models in a GGUF file: all weights are unpacked, and saved again as those of any other folder."""

from pathlib import Path
from typing import Any


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that is meant: the path itself, or the only one in a folder that holds no other model."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    found = list(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    return found[0] if len(found) == 1 else None


def gguf_options(file: Path) -> dict[str, Any]:
    """What ``from_pretrained`` of a model takes, next to the folder of ``file``.

    Raises:
        ImportError: Transformers is too old to unpack one.
    """
    from transformers import GgufConfig

    return {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True)}
