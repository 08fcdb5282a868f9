"""The precision of matrix products: what a run sets for the process, and float32 whatever the process has set."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

LOW = (torch.bfloat16, torch.float16)


def set_matmul_precision(precision: str) -> None:
    """Set for the whole process how float32 matrix products round their inputs; see ``ModelConfig``."""
    # typed as any: torch's stubs do not know this setting
    mkldnn: Any = torch.backends.mkldnn
    mkldnn.matmul.fp32_precision = "bf16" if precision == "medium" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "medium" else "ieee"


@contextmanager
def stated_precision(device: torch.device) -> Iterator[None]:
    """Compute in the types of the tensors: without autocast, with whole float32 products and the usual default type."""
    backends: list[Any] = [torch.backends.mkldnn, torch.backends.cuda]
    precisions = [backend.matmul.fp32_precision for backend in backends]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    for backend in backends:
        backend.matmul.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)
        for backend, precision in zip(backends, precisions):
            inherited = precision == torch.backends.fp32_precision  # type: ignore[attr-defined]
            backend.matmul.fp32_precision = "none" if inherited else precision


class Float32(TorchFunctionMode):
    """Compute in float32 what a model computes in bfloat16 or float16.

    Every call of torch gets float32 copies of such tensors, and float32 where such a type is named. So a weight is
    copied for the time of one call, and results are float32.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", None) == "__get__":  # of an attribute, for which a copy would be wasted
            return _in_float32(func(*args))
        if func in (torch.Tensor.bfloat16, torch.Tensor.half):
            func = torch.Tensor.float
        args, kwargs = tree_map(_in_float32, (args, kwargs or {}))
        return func(*args, **kwargs)


def _in_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in LOW else value
    return torch.float32 if isinstance(value, torch.dtype) and value in LOW else value
