"""Rank-1 updates between two checkpoints on disk, one pair of tensors in memory at a time."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rlkernels.rank1.ops import top1_delta
from rlkernels.rank1.projections import is_projection, matrix_names, view_of
from rlkernels.rank1.update import Rank1Update
from rlkernels.weights.checkpoints import Folder, open_checkpoint


@dataclass(frozen=True)
class ModuleUpdate:
    """The result of :func:`stream_top1` for one matrix."""

    name: str
    shape: tuple[int, int]
    update: Rank1Update


def _matrices(base: Folder, checkpoint: Folder, wanted: Callable[[str], bool]) -> dict[str, list[str]]:
    """Return the names of its matrices for each wanted tensor of the two folders that has matrices."""
    matrices = {}
    for name in sorted(set(base) | set(checkpoint)):
        if not wanted(name):
            continue
        if name not in checkpoint or name not in base:
            # tied weights are stored under one of their names only, so both folders may lack the others
            incomplete = checkpoint if name not in checkpoint else base
            raise ValueError(f"tensor {name!r} is missing in {incomplete.path}")
        shape = base.shapes[name]
        if shape != checkpoint.shapes[name]:
            raise ValueError(
                f"tensor {name!r} has shape {shape} in {base.path} and {checkpoint.shapes[name]} in {checkpoint.path}"
            )
        if names := matrix_names(name, shape):
            matrices[name] = names
    return matrices


def stream_top1(base_dir: str | Path, checkpoint_dir: str | Path, *, wanted: Callable[[str], bool] = is_projection,
                starts: dict[str, torch.Tensor] | None = None, tol: float = 1e-2, max_passes: int = 12, seed: int = 0,
                device: str | torch.device = "cpu", backend: str = "auto") -> Iterator[ModuleUpdate]:  # fmt: skip
    """Yield the leading singular triplet of the change of every matrix between two checkpoints.

    Matrices are the tensors with two dimensions, and each matrix of a stack [experts, m, n], by the name ``NAME[3]``.

    The two may be sharded differently and differ in dtype. Only the files of a folder that ``from_pretrained`` of
    Transformers would read count. One pair of tensors is in memory at a time; of a weight history a whole step is. Tied
    weights, stored under one name, are read once.

    Args:
        base_dir, checkpoint_dir: folders, or steps of a weight history (RUN/weights/step-000010.delta).
        wanted: whether to read a tensor, by its name; by default projections, see :mod:`rlkernels.rank1.projections`.
        starts: name -> warm start, such as the ``v`` of an earlier checkpoint.
        tol, max_passes, seed, backend: as for :func:`rlkernels.top1_delta`.
        device: where to compute.

    Yields:
        :class:`ModuleUpdate`, in the order of the tensors' names.

    Raises:
        ValueError: a folder without safetensors of a model, or with an adapter; a truncated or missing file; a tensor
            that one side lacks, differs in shape, or holds NaN or infinity. The message names the file or tensor.
        TypeError: a tensor that is not bfloat16, float16 or float32.
    """
    base = open_checkpoint(base_dir)
    checkpoint = open_checkpoint(checkpoint_dir)
    matrices = _matrices(base, checkpoint, wanted)
    starts = starts or {}
    streamed = set(itertools.chain.from_iterable(matrices.values()))
    if unknown := sorted(set(starts) - streamed):
        raise ValueError(f"starts must be keyed by names of streamed matrices, got {unknown[0]!r}")
    for name, names in matrices.items():
        weight_tensor = checkpoint[name]
        base_tensor = base[name]
        for matrix in names:
            pair = (view_of(matrix, tensor).to(device) for tensor in (weight_tensor, base_tensor))
            try:
                update = top1_delta(*pair, start=starts.get(matrix), tol=tol, max_passes=max_passes, seed=seed,
                                    backend=backend)  # fmt: skip
            except (TypeError, ValueError) as error:
                raise type(error)(f"tensor {matrix!r}: {error}") from None
            yield ModuleUpdate(matrix, (len(update.u), len(update.v)), update)
        del weight_tensor, base_tensor  # unmap before the next pair is read
