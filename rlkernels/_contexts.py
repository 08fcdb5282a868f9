"""The rule for public ops in torch's contexts, and with tensors that are more than numbers in memory.

Calls with plain tensors (strided, on a CPU or a GPU) outside of all contexts go straight to the op. :func:`public_op`
applies the rule once to each kind of call (types, dtypes, ranks, devices, layouts and modes), not to each call.

| where | what an op does |
|---|---|
| another default dtype or device | the same: every allocation states its own |
| autocast | computes in the dtypes of its operands; ``linear_token_logprobs`` casts them as ``F.linear`` does |
| DTensors | gathers them; returns plain tensors; what it writes goes back into every rank's shard |
| parameters of DeepSpeed's ZeRO-3 | gathers them, for the backward pass too |
| ``torch.func.grad``, ``vjp`` | works if the op has a gradient |
| ``torch.vmap``, ``jvp``, dual tensors, batched gradients | raises TypeError, but for backends of plain torch |
| ``torch.compile``, dispatch modes, subclasses | runs as one op of torch's library |
| sparse and nested tensors | raises TypeError |
| meta tensors | returns meta tensors; raises TypeError where shapes alone do not tell the result |
| views with a pending negation | negates first |

The gradient of a DTensor is the mean over its ranks, as FSDP's: right where they have different data, and where they
have the same. So TRL's ``weight.full_tensor()`` alone is not enough: it keeps the gradient of one rank's data.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from rlkernels import backend
from rlkernels._check import has_values
from rlkernels.registry import OPS, Op

F = TypeVar("F", bound=Callable[..., Any])
functorch: Any = torch._C._functorch


def public_op(name: str, check_types: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate the public function of an op with the rule.

    Args:
        name: of the op in :data:`rlkernels.registry.OPS`, which says what it writes to, casts and needs.
        check_types: gets the arguments by name, and raises for a wrong type, dtype, rank or device of a tensor.
    """

    def decorate(function: F) -> F:
        op_call = OpCall(OPS[name], function, check_types)
        plain_signatures = op_call.plain_signatures
        signature = backend.signature_function()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return op_call.call_compiled(args, kwargs)
            key = signature(args, kwargs)
            if key in plain_signatures:
                return function(*args, **kwargs)
            return op_call.call_checked(key, args, kwargs)

        return call  # type: ignore[return-value]

    return decorate


class OpCall:
    """Calls of one op, whatever context or kind of tensor they meet; arguments as for :func:`public_op`."""

    def __init__(self, op: Op, function: Callable[..., Any], check_types: Callable[..., Any]):
        self.op = op
        self.function = function
        self.check_types = check_types
        self.python_signature = inspect.signature(function)
        self.names = tuple(self.python_signature.parameters)
        self.plain_signatures: set[Any] = set()  # signatures of calls that go straight to the function

    def call_compiled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call inside ``torch.compile``."""
        return self._call_dense({**dict(zip(self.names, args)), **kwargs})

    def call_checked(self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call where the signature ``key`` is new or not plain."""
        try:
            values = self.python_signature.bind(*args, **kwargs).arguments
        except TypeError:
            return self.function(*args, **kwargs)  # Python's own message
        tensors = dict(named_tensors(values))
        for name, tensor in tensors.items():
            check_supported(self.op.name, name, tensor, self.op.composite, values.get("backend") == "torch")
        if backend.are_plain(tensors.values()):
            self.check_types(**values)
            if not any(isinstance(value, Mapping) for value in values.values()):  # signatures see no tensors in them
                self.plain_signatures.add(key)
            return self.function(*args, **kwargs)
        with gathered(*tensors.values()):
            try:
                return self._call_dense(values)
            except RuntimeError as error:
                self._refuse_meta(tensors, error)
                raise

    def _refuse_meta(self, tensors: Mapping[str, torch.Tensor], error: Exception | None = None) -> None:
        for name, tensor in tensors.items():
            if not has_values(tensor):
                kind = "meta" if tensor.is_meta else "fake"
                raise TypeError(f"{self.op.name} needs the values of {name}, got a {kind} tensor") from error

    def _call_dense(self, values: dict[str, Any]) -> Any:
        """Call with dense tensors, outside of autocast; write back to those that were not dense."""
        device = next((t.device.type for _, t in named_tensors(values)), "meta")
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        if autocast and self.op.casts:
            dtype = torch.get_autocast_dtype(device)
            values = map_tensors(lambda _, t: t.to(dtype) if _is_cast(t) else t, values)
        self.check_types(**values)
        if self.op.needs_values:
            self._refuse_meta(dict(named_tensors(values)))
        arguments = map_tensors(lambda name, t: dense(t, name in self.op.writes), values)
        if autocast:
            with torch.autocast(device, enabled=False):
                out = self.function(**arguments)
        else:
            out = self.function(**arguments)
        for name in self.op.writes:
            if arguments[name] is not values[name]:
                write_back(arguments[name], values[name])
                out = values[name] if out is arguments[name] else out
        return out


def check_supported(
    op: str, name: str, tensor: torch.Tensor, composite: bool = False, plain_torch: bool = False
) -> None:
    """Raise TypeError for a sparse or nested tensor, and for a transform, unless plain torch runs a composite op."""
    if tensor.is_nested:
        raise TypeError(f"{name} must have one size, got a nested tensor: pad it by torch.nested.to_padded_tensor")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be dense, got {tensor.layout}: pass {name}.to_dense()")
    if (transform := transform_of(tensor)) and not (composite and plain_torch):
        hint = "; backend='torch' has one" if composite else ""
        raise TypeError(f"{op} has no rule for {transform}, which {name} is part of{hint}")


def dense_tensors(op: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Apply the rule to tensors that are kept for later calls."""
    if backend.are_plain(tensors.values()):
        return tensors
    for name, tensor in tensors.items():
        check_supported(op, name, tensor)
    return {name: dense(tensor) for name, tensor in tensors.items()}


def named_tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, with names that say where in dictionaries and tuples they lie."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from named_tensors({f"{name}[{key!r}]": item for key, item in value.items()})
        elif isinstance(value, (tuple, list)):
            yield from named_tensors({f"{name}[{i}]": item for i, item in enumerate(value)})


def map_tensors(change: Callable[[str, torch.Tensor], torch.Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with :func:`named_tensors` changed."""
    out = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            value = change(name, value)
        elif isinstance(value, Mapping):
            value = map_tensors(change, value)
        elif isinstance(value, (tuple, list)):
            value = [*map_tensors(change, {str(i): item for i, item in enumerate(value)}).values()]
        out[name] = value
    return out


def transform_of(tensor: torch.Tensor) -> str | None:
    """Return the transform for which a tensor would need a rule of ours: vmap, or forward-mode derivatives."""
    levels = [i.level() for i in functorch.get_interpreter_stack() or () if i.key() == functorch.TransformType.Jvp]
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return "torch.vmap"
        if functorch.maybe_get_level(tensor) in levels:
            return "forward-mode derivatives"
        tensor = functorch.get_unwrapped(tensor)
    return None if forward_ad.unpack_dual(tensor).tangent is None else "forward-mode derivatives"


def _is_cast(tensor: torch.Tensor) -> bool:
    """Tell whether autocast casts a tensor: as torch's, it leaves float64 alone."""
    return tensor.dtype.is_floating_point and tensor.dtype != torch.float64


def dense(tensor: Any, written: bool = False) -> torch.Tensor:
    """Return the whole of a DTensor (without history if ``written``), or a view with its negation done."""
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor import Partial

        tensor = tensor.detach() if written else tensor
        return tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)
    if torch.compiler.is_compiling():  # torch negates before an op of its library
        return tensor
    return tensor.resolve_neg() if tensor.is_neg() else tensor


@torch.no_grad()
def write_back(result: torch.Tensor, target: Any) -> None:
    """Copy ``result``, which was :func:`dense` of ``target``, into it; on every rank into its shard."""
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        shard = distribute_tensor(result, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local())
    else:
        target.copy_(result)


@contextmanager
def gathered(*tensors: torch.Tensor | None) -> Iterator[None]:
    """Gather parameters that DeepSpeed's ZeRO-3 has partitioned; outside of their module they are empty."""
    partitioned = {id(t): t for t in tensors if t is not None and t.numel() == 0 and hasattr(t, "ds_status")}
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(partitioned.values())):
        yield
