"""Argument checks that the functions of this package share."""

import torch

from rlkernels import _check

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DETACH = "the result has none; pass {name}.detach()"


def aligned_types(
    x: torch.Tensor, y: torch.Tensor, x_lengths: torch.Tensor | None = None, y_lengths: torch.Tensor | None = None,
    **_: object,
) -> None:  # fmt: skip
    """Raise unless x and y are both of two or of three dimensions, of a floating dtype, on one device with lengths."""
    _check.tensor("x", x, ndim=(2, 3), dtype=FLOATS)
    _check.tensor("y", y, ndim=(2, 3), dtype=FLOATS, device=x.device)
    if x.ndim != y.ndim:
        raise ValueError(f"y must have as many dimensions as x, got shapes {tuple(x.shape)} and {tuple(y.shape)}")
    length_types(x.device, x_lengths=x_lengths, y_lengths=y_lengths)


def same_features(x: torch.Tensor, y: torch.Tensor) -> None:
    """Raise unless series x and y have equally many features, one at least."""
    if x.ndim == 3:
        features = x.shape[2]
        if y.shape[2] != features:
            _check.shape("y", y, (None, None, features))
        if features == 0:
            raise ValueError(f"x must have at least one feature, got shape {tuple(x.shape)}")


def histograms(name: str, value: torch.Tensor) -> None:
    """Raise ValueError for a negative entry."""
    if _check.has_values(value) and bool((value < 0).any()):
        raise ValueError(f"{name} must hold histograms >= 0, got {float(value.nan_to_num(0).min())}")


def length_types(device: torch.device, **lengths: torch.Tensor | None) -> None:
    """Raise unless each is None or integers of one dimension on the device."""
    for name, value in lengths.items():
        if value is not None:
            _check.tensor(name, value, ndim=1, dtype=(torch.int64, torch.int32), device=device)


def lengths(name: str, value: torch.Tensor | None, x: torch.Tensor, *, in_kernel: bool = False) -> torch.Tensor | None:
    """Return lengths as int64; raise unless they are None or [N] between 0 and L for x [N, L, ...].

    ``in_kernel``: a compiled kernel checks the range, so that nothing waits for the values here.
    """
    if value is None:
        return None
    size, longest, *_ = x.shape
    _check.shape(name, value, (size,))
    if not in_kernel and size and _check.has_values(value) and not torch.compiler.is_compiling():
        low, high = map(int, torch.aminmax(value.cpu()))  # on a GPU one wait, and no launch
        if low < 0 or high > longest:
            raise ValueError(f"{name} must lie between 0 and {longest}, got values from {low} to {high}")
    return value.long().contiguous()


def band(value: int | None) -> int | None:
    """Return a Sakoe-Chiba radius, an integer >= 0 or None; those beyond every trajectory become 2**31."""
    if value is None or (type(value) is int and 0 <= value <= 2**31):
        return value
    return min(_check.integer("band", value, 0), 2**31)
