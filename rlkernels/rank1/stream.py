"""Rank-1 updates between two checkpoints on disk, one pair of tensors in memory at a time."""

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
    """What :func:`stream_top1` found for one matrix."""

    name: str
    shape: tuple[int, int]
    update: Rank1Update


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

    The two may be sharded differently and differ in dtype. Of a folder, those files count that ``from_pretrained`` of
    Transformers would read. One pair of tensors is in memory at a time, but all of a step of a weight history. Tied
    weights, stored under one name, are looked at once.

    Args:
        base_dir, checkpoint_dir: folders, or steps of a weight history (RUN/weights/step-000010.delta).
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
    base, checkpoint = open_checkpoint(base_dir), open_checkpoint(checkpoint_dir)
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
