"""Helpers that several test files share."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class WaitsForNothing(TorchDispatchMode):
    """Fails on an operation whose result the host of a GPU would have to wait for: a number, or a shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default), func
        if func is aten.repeat_interleave.Tensor:
            assert (kwargs or {}).get("output_size") is not None, func
        if func in (aten.index.Tensor, aten.index_put_.default):
            by_mask = any(i is not None and i.dtype == torch.bool for i in args[1])
            assert not by_mask or (func is aten.index_put_.default and args[2].ndim == 0), func
        return func(*args, **(kwargs or {}))


def lacks(what: str) -> None:
    """Skips the running test because this machine lacks ``what``; the summary names it."""
    pytest.skip(f"this machine lacks {what}")
