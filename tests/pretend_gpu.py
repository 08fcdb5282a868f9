"""A GPU that is not there: tensors that say they are on ``cuda:0``, whose numbers are computed on the CPU.

What a GPU would refuse is refused: an operation on tensors of both devices, or numpy of one there. So code runs as on a
GPU as far as devices decide anything (kernels, the type of weights, where a tensor is made), and a tensor that was left
behind on the other side is found. How often the host waits for the device is counted, and what it launches there.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from support import computes, waits
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from rlkernels import backend
from rlkernels.prefix_cache import reference

GPU = torch.device("cuda", 0)
APPLY: Any = torch.nn.Module._apply
MEMORY = 24 << 30
aten = torch.ops.aten
BY_INDEX = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}  # which may lie on the host


def window_of(causal, left, right):
    """Return the window of the reference for the keys that the kernels see left and right of a query, or None."""
    assert (left is None) == (right is None) and (left is None or (causal and right == 0))
    return None if left is None else left + 1


def flash_forward(query, key, value, starts_q, starts_k, max_q, max_k, dropout, causal, debug, *, scale,
                  window_size_left=None, window_size_right=None):  # fmt: skip
    """Compute ``aten._flash_attention_forward``: 0 without keys or weights, and inf as log-sum-exp, as for NaN."""
    assert not dropout and not debug and starts_q.dtype == starts_k.dtype == torch.int32
    assert int(starts_q.diff().max()) == max_q and int(starts_k.diff().max()) == max_k
    out = torch.zeros_like(query)
    lse = query.new_full((query.shape[1], len(query)), torch.inf, dtype=torch.float32)
    for row in range(len(starts_q) - 1):
        rows, keys = (slice(int(s[row]), int(s[row + 1])) for s in (starts_q, starts_k))
        if keys.start < keys.stop:
            window = window_of(causal, window_size_left, window_size_right)
            row_out, row_lse = reference.attend(query[rows], key[keys], value[keys], scale, causal, window)
            out[rows] = row_out.to(query.dtype)
            lse[:, rows] = row_lse.T.masked_fill(~row_lse.T.isfinite(), torch.inf)
    return out, lse, torch.zeros(2), torch.zeros(()), torch.zeros(0)


def flash_backward(grad, query, key, value, out, lse, starts_q, starts_k, max_q, max_k, dropout, causal, seed, unused,
                   *, scale, window_size_left=None, window_size_right=None):  # fmt: skip
    """Compute ``aten._flash_attention_backward`` from the output and the log-sum-exp, as the kernel does."""
    assert not dropout and int(starts_q.diff().max()) == max_q and int(starts_k.diff().max()) == max_k
    grads = [torch.zeros_like(t) for t in (query, key, value)]
    for row in range(len(starts_q) - 1):
        rows, keys = (slice(int(s[row]), int(s[row + 1])) for s in (starts_q, starts_k))
        q, g, o = (t[rows].float() for t in (query, grad, out))
        k, v = (t[keys].float().repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
        weight = (torch.einsum("qhd,khd->hqk", q, k) * scale - lse[:, rows, None]).exp()
        if causal:
            window = window_of(causal, window_size_left, window_size_right)
            weight = weight.masked_fill(~reference.causal(len(q), len(k), q.device, window=window), 0)
        outer = torch.einsum("qhd,khd->hqk", g, v) - (g * o).sum(-1).T[..., None]
        score_grad = weight * outer * scale
        products = (torch.einsum("hqk,khd->qhd", score_grad, k), torch.einsum("hqk,qhd->khd", score_grad, q),
                    torch.einsum("hqk,qhd->khd", weight, g))  # fmt: skip
        for total_grad, span, product in zip(grads, (rows, keys, keys), products):
            total_grad[span] = product.unflatten(1, (total_grad.shape[1], -1)).sum(2).to(total_grad.dtype)
    return tuple(grads)


STAND_INS = {
    aten._flash_attention_forward.default: flash_forward,
    aten._flash_attention_backward.default: flash_backward,
}


class GPUTensor(torch.Tensor):
    """Numbers on the CPU under another name."""

    numbers: torch.Tensor
    waits: ClassVar[Counter[str]] = Counter()
    launches: ClassVar[Counter[str]] = Counter()

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> "GPUTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device="cpu",  # for torch itself, which has no autograd for CUDA in a build without it
        )
        tensor.numbers = numbers
        return tensor

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        self.waits["tolist"] += 1
        return self.numbers.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"GPUTensor({self.numbers})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "GPUTensor":
        copied = GPUTensor(self.numbers.clone()).requires_grad_(self.requires_grad)
        return torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_there(func, args, kwargs or {})


def run_there(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on tensors of which some are on the GPU; return its result, on the GPU."""
    checked = (args[:1], args[2:]) if func in BY_INDEX else (args, kwargs)
    tensors = [x for x in tree_leaves(checked) if isinstance(x, torch.Tensor)]
    if func is not aten.copy_.default and any(not isinstance(x, GPUTensor) and x.dim() for x in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu")
    if func.namespace == "rlkernels":  # its lines in torch, on tensors of the GPU
        with PretendGPU():
            return OPDEFS[func._schema.name]._backend_fns[None](*args, **kwargs)
    if waits(func, args, kwargs):
        GPUTensor.waits[str(func)] += 1
    if computes(func):
        GPUTensor.launches[func.overloadpacket.__name__] += 1
    numbers = tree_map(lambda x: x.numbers if isinstance(x, GPUTensor) else x, (args, kwargs))
    out = STAND_INS.get(func, func)(*numbers[0], **numbers[1])
    written = [i for i, argument in enumerate(func._schema.arguments) if argument.is_write]
    if written and len(func._schema.returns):  # in place, or into out=
        outputs = [args[i] if i < len(args) else kwargs[func._schema.arguments[i].name] for i in written]
        return outputs[0] if len(func._schema.returns) == 1 else tuple(outputs)
    return tree_map(lambda x: GPUTensor(x) if isinstance(x, torch.Tensor) else x, out)


class PretendGPU(TorchFunctionMode):
    """Make and move tensors where ``device`` says, "cuda" included."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return move(args[0], "cuda" if func is torch.Tensor.cuda else "cpu")
        if func is torch.Tensor.backward:
            with self:
                return torch.autograd.backward(args[0])
        if func in (torch.autograd.backward, torch.autograd.grad):  # may compute again, and make tensors on the GPU
            with self, patch.object(torch.autograd, "has_torch_function", lambda _: False):
                return func(*args, **kwargs)
        if func is torch.Tensor.to:
            values = [x for x in (*args[1:], *kwargs.values()) if x is not None]
            device = next((name for x in values if (name := device_of(x))), None)
            if device == "meta" or args[0].is_meta:
                return func(*args, **kwargs)
            dtype = next((x for x in values if isinstance(x, torch.dtype)), None)
            dtype = next((x.dtype for x in values if isinstance(x, torch.Tensor)), dtype)
            moved = args[0] if device is None else move(args[0], device)
            return moved if dtype is None else func(moved, dtype, copy=kwargs.get("copy", False))
        device = device_of(kwargs.get("device"))
        if device in (None, "meta") or func is torch._C._nn._parse_to:
            return func(*args, **kwargs)
        kwargs["device"] = torch.device("cpu")
        out = func(*args, **kwargs)
        if device == "cuda":
            if not func.__name__.startswith("empty"):
                GPUTensor.launches[func.__name__] += 1
            return out if isinstance(out, GPUTensor) else GPUTensor(out).requires_grad_(out.requires_grad)
        return out.numbers if isinstance(out, GPUTensor) else out


def device_of(value: Any) -> str | None:
    """Return the type of the device that an argument of torch names, or None."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu", "meta"):
        return value.split(":")[0]
    return value.type if isinstance(value, torch.device) else None


def move(tensor: torch.Tensor, device: str | None) -> torch.Tensor:
    """Return a copy on the other device, as a real GPU does; the host waits for a copy to the CPU."""
    if device == tensor.device.type:
        return tensor
    assert not (tensor.requires_grad and torch.is_grad_enabled()), "no gradient goes from one device to the other"
    if device == "cuda":
        GPUTensor.launches["to the GPU"] += 1
        return GPUTensor(tensor.detach().clone())
    GPUTensor.waits["to the host"] += 1
    return tensor.numbers.clone()  # type: ignore[attr-defined]


def move_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Run ``Module._apply``, which makes new parameters of another class, and tie those again that were tied."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    APPLY(module, *args, **kwargs)
    for first_name, *tied_names in names.values():
        for name in tied_names:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, module.get_parameter(first_name))
    return module


@contextmanager
def pretended() -> Iterator[Counter[str]]:
    """Pretend that there is a GPU; yield how often the host waited for it, by operation."""
    facts = {"total_memory": MEMORY, "major": 9, "minor": 0, "multi_processor_count": 132}
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": SimpleNamespace(name="a GPU that is not there", **facts),
        "mem_get_info": (MEMORY, MEMORY),
        "synchronize": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    GPUTensor.waits.clear()
    GPUTensor.launches.clear()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # to parameters of another class
    try:
        with pytest.MonkeyPatch.context() as monkeypatch, PretendGPU():
            for name, value in answers.items():
                monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
            # an optimizer of a torch with CUDA would ask the driver, which is not there, for a stream
            monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
            monkeypatch.setattr(torch.nn.Module, "_apply", move_module)
            monkeypatch.setattr(backend, "RECORDS", {})  # no kernel of ours runs there
            monkeypatch.setenv("RLKERNELS_PROVE", "off")
            backend.set_run_backends({})
            yield GPUTensor.waits
    finally:
        backend.set_run_backends({})
        torch.__future__.set_overwrite_module_params_on_conversion(False)
