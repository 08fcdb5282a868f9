"""Argument checks that name the argument, its value and what is allowed."""

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

MOST = 2**31 - 1  # largest count: kernels number blocks, tokens of a draft and directions in int32


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if value not in tuple(allowed):  # a dictionary would raise for what it cannot hash
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def number(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number that a float holds: of Python, or of a kind that turns into one; no bool.

    Raise for a tensor with a gradient, which ops do not compute for their settings.
    """
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} gets no gradient, but requires one: pass a number, {name}.item()")
    try:
        if not isinstance(value, (bool, str, bytes, bytearray)):  # float() would read the text
            float(value)
            return
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float holds, got {value}") from None
    except (TypeError, ValueError, RuntimeError):  # the last two: several numbers
        pass
    raise TypeError(f"{name} must be a number, got {value!r}")


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return ``value`` as int; raise unless it is an integer (not a bool) in the range."""
    try:
        index = value if isinstance(value, int) else operator.index(value)
    except TypeError:
        index = True
    if isinstance(index, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if (low is not None and index < low) or (high is not None and index > high):
        allowed = f">= {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {allowed}, got {index}")
    return index


def seed(value: Any) -> int:
    """Return a seed of 64 bits, signed or not, as the signed integer that kernels take; raise otherwise."""
    return (integer("seed", value, -(2**63), 2**64 - 1) + 2**63) % 2**64 - 2**63


def positive(name: str, value: float, *, zero: bool = False) -> None:
    """Raise unless ``value`` is a number above 0, or at 0 where ``zero`` is allowed."""
    if type(value) is float and value > 0:
        return
    number(name, value)
    if not (value > 0 or (zero and value == 0)):  # also refuses NaN
        raise ValueError(f"{name} must be {'>= 0' if zero else '> 0'}, got {value!r}")


def in_range(name: str, value: float, low: float, high: float) -> None:
    """Raise unless ``value`` is a number and ``low <= value <= high``."""
    number(name, value)
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value!r}")


def share(name: str, value: float) -> None:
    """Raise unless ``value`` is a number and ``0 < value < 1``."""
    number(name, value)
    if not 0 < value < 1:
        raise ValueError(f"{name} must be between 0 and 1 (exclusive), got {value!r}")


def tensor(name: str, value: object, *, ndim: int | tuple[int, ...] | None = None,
           dtype: torch.dtype | Collection[torch.dtype] | None = None, floating: bool = False,
           device: torch.device | None = None) -> torch.Tensor:  # fmt: skip
    """Return ``value`` if it is a tensor of an allowed rank, dtype and device; raise otherwise."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    ranks = (ndim,) if isinstance(ndim, int) else ndim
    if ranks is not None and value.ndim not in ranks:
        raise ValueError(f"{name} must have {' or '.join(map(str, ranks))} dimensions, got shape {tuple(value.shape)}")
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if dtypes is not None and value.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {value.dtype}")
    if floating and not value.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")
    return value


def no_gradient(advice: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError where autograd would record an op without a gradient: nobody would notice the loss.

    ``advice`` may hold ``{name}``, the name of the tensor.
    """
    for name, value in tensors.items():
        if value is not None and torch.is_grad_enabled() and value.requires_grad:
            raise ValueError(f"{name} must not require gradients, got requires_grad=True: {advice.format(name=name)}")


def has_values(value: torch.Tensor) -> bool:
    """Return False for meta and fake tensors, which have a shape alone."""
    return not (value.is_meta or isinstance(value, FakeTensor))


def on_host(value: torch.Tensor) -> bool:
    """Return True where values can be looked at: outside of graphs and transforms; for a GPU the host would wait."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return not traced and value.is_cpu and has_values(value)


def indices(name: str, value: torch.Tensor, size: int) -> None:
    """Raise ValueError for an entry outside ``[0, size)``, if it can look (:func:`on_host`)."""
    if on_host(value) and value.numel():
        low = int(value.min())
        high = int(value.max())
        if low < 0 or high >= size:
            raise ValueError(f"{name} must be between 0 and {size - 1}, got {low if low < 0 else high}")


def shape(name: str, value: torch.Tensor, expected: Sequence[int | None]) -> None:
    """Raise unless ``value`` has this shape; None allows any size."""
    if value.shape == expected:
        return
    if len(value.shape) != len(expected) or any(e is not None and e != s for s, e in zip(value.shape, expected)):
        sizes = ", ".join("any" if e is None else str(e) for e in expected)
        raise ValueError(f"{name} must have shape [{sizes}], got {list(value.shape)}")


def own_places(name: str, value: torch.Tensor) -> None:
    """Raise ValueError for a tensor whose entries share places in memory, as in an expanded one: no op can write it."""
    if shares_places(value):
        raise ValueError(
            f"{name} must have a place in memory for every entry, got strides {value.stride()} for shape "
            f"{list(value.shape)}"
        )


def shares_places(value: torch.Tensor) -> bool:
    """Return whether two entries share a place in memory."""
    entries = value.numel()
    dims = [(stride, size) for stride, size in zip(value.stride(), value.shape) if size > 1]
    # of each dimension: the distance that those of smaller strides cover
    covered = [
        sum([(size - 1) * other for j, (other, size) in enumerate(dims) if j != i and other <= stride])
        for i, (stride, _) in enumerate(dims)
    ]
    if entries == 0 or all([stride > distance for (stride, _), distance in zip(dims, covered)]):
        return False  # as in every slice of a tensor, with its dimensions in any order
    if any([stride == 0 for stride, _ in dims]):
        return True
    last = sum([(size - 1) * stride for stride, size in dims])
    places = torch.arange(last + 1, device="cpu").as_strided(value.shape, value.stride())
    return len(places.unique()) < entries
