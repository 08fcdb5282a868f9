"""Rank-1 updates between two folders of safetensors files, one pair of tensors in memory at a time."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlkernels.rank1.ops import top1_delta
from rlkernels.rank1.projections import is_projection, matrix_names, view_of
from rlkernels.rank1.update import Rank1Update

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModuleUpdate:
    """What :func:`stream_top1` found for one matrix."""

    name: str
    shape: tuple[int, int]
    update: Rank1Update


class Folder(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint, from the files that ``from_pretrained`` of Transformers would read.

    That is the file or index that ``transformers_weights`` in config.json names, else model.safetensors, else the
    shards of model.safetensors.index.json. No other file matters. Reads headers only, until asked for a tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is not a folder")
        if (self.path / "adapter_config.json").is_file():
            raise ValueError(f"{self.path} holds an adapter (adapter_config.json): merge it into the weights first")
        if not (files := weight_files(self.path)):
            raise ValueError(f"{self.path} holds no .safetensors file of a model: neither {SINGLE} nor {INDEX}")
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        for file in files:
            opened = self._open(file)
            for name in opened.keys():  # noqa: SIM118
                self.files[name] = file
                self.shapes[name] = opened.get_slice(name).get_shape()

    @staticmethod
    def _open(file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(str(file), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is missing, truncated or not a safetensors file: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor; its memory maps the file until the last reference goes."""
        return self._open(self.files[name]).get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that ``from_pretrained`` would read, as :class:`Folder` says; none without safetensors.

    Raises:
        ValueError: config.json or the index names a file outside the folder, or cannot be read.
    """
    config = folder / "config.json"
    named = _read_json(config, "configuration").get("transformers_weights") if config.is_file() else None
    for name in (SINGLE, INDEX):
        if named is None and (folder / name).is_file():
            named = name
    if named is None:
        return []
    file = _beside(config, named)
    return indexed_files(file) if file.suffix == ".json" else [file]


def indexed_files(index: Path) -> list[Path]:
    """Return the weight files that an index names; ValueError unless all of them lie in its folder."""
    weight_map = _read_json(index, "safetensors index").get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} is not a safetensors index: it has no weight_map")
    return sorted({_beside(index, name) for name in weight_map.values()})


def _beside(file: Path, name: object) -> Path:
    """Return the path of a file that another file of its folder names."""
    if not isinstance(name, str) or Path(name).name != name or not Path(name).suffix:  # the names "" and ".." have none
        raise ValueError(f"{file} must name weight files of its own folder, got {name!r}")
    return file.with_name(name)


def _read_json(file: Path, what: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a {what}: {error!r}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a {what}: it holds no object")
    return found


def _matrices(base: Folder, checkpoint: Folder, wanted: Callable[[str], bool]) -> dict[str, list[str]]:
    """Return name -> names of its matrices, for each tensor of the two folders that has some."""
    matrices = {}
    for name in sorted(set(base) | set(checkpoint)):
        if not wanted(name):
            continue
        if name not in checkpoint or name not in base:
            # a tied weight is stored under one of its names only: what both folders lack is no loss
            where = checkpoint if name not in checkpoint else base
            raise ValueError(f"tensor {name!r} is missing in {where.path}")
        shape, other_shape = base.shapes[name], checkpoint.shapes[name]
        if shape != other_shape:
            raise ValueError(f"tensor {name!r} has shape {shape} in {base.path} and {other_shape} in {checkpoint.path}")
        if names := matrix_names(name, shape):
            matrices[name] = names
    return matrices


def stream_top1(base_dir: str | Path, checkpoint_dir: str | Path, *, wanted: Callable[[str], bool] = is_projection,
                starts: dict[str, torch.Tensor] | None = None, tol: float = 1e-2, max_passes: int = 12, seed: int = 0,
                device: str | torch.device = "cpu", backend: str = "auto") -> Iterator[ModuleUpdate]:  # fmt: skip
    """Yield the leading singular triplet of the change of every matrix between two checkpoints.

    Matrices are the tensors with two dimensions, and each matrix of a stack [experts, m, n], by the name ``NAME[3]``.

    The two may be sharded differently and differ in dtype; :class:`Folder` says which files count. One pair of tensors
    is in memory at a time. Tied weights, stored under one name, are looked at once.

    Args:
        base_dir, checkpoint_dir: folders.
        wanted: which tensors to look at, by name; by default projections, see :mod:`rlkernels.rank1.projections`.
        starts: name -> warm start, such as the ``v`` of an earlier checkpoint.
        tol, max_passes, seed, backend: as for :func:`rlkernels.top1_delta`.
        device: where to compute.

    Yields:
        :class:`ModuleUpdate`, in the order of the tensors' names.

    Raises:
        ValueError: a folder without safetensors of a model, or with an adapter; a file that is truncated or missing; a
            tensor that is missing on one side, differs in shape, or holds NaN or infinity. The message names the file
            or tensor.
        TypeError: a tensor that is not bfloat16, float16 or float32.
    """
    base, checkpoint = Folder(base_dir), Folder(checkpoint_dir)
    matrices = _matrices(base, checkpoint, wanted)
    starts = starts or {}
    if unknown := sorted(set(starts) - {matrix for names in matrices.values() for matrix in names}):
        raise ValueError(f"starts must be keyed by names of streamed matrices, got {unknown[0]!r}")
    for name, names in matrices.items():
        weight, origin = checkpoint[name], base[name]
        for matrix in names:
            pair = (view_of(matrix, tensor).to(device) for tensor in (weight, origin))
            try:
                update = top1_delta(*pair, start=starts.get(matrix), tol=tol, max_passes=max_passes, seed=seed,
                                    backend=backend)  # fmt: skip
            except (TypeError, ValueError) as error:
                raise type(error)(f"tensor {matrix!r}: {error}") from None
            yield ModuleUpdate(matrix, (len(update.u), len(update.v)), update)
        del weight, origin  # unmap before the next pair is read
