"""Which implementation of an op runs: ``"auto" | "cuda" | "triton" | "cpu" | "torch"``.

``cpu`` and ``cuda`` are our compiled kernels, ``triton`` our Triton kernels. Every op has ``torch``, plain torch: on a
GPU it uses the kernels of torch's libraries if they fit. An explicit choice that cannot work raises and says why.

``auto`` takes the environment variable ``RLKERNELS_BACKEND`` for the ops that have that backend. Else it takes our
kernels on a CPU. On a GPU it asks, in this order:

1. the verdicts of a run, see :func:`set_run_backends`;
2. the verdicts of ``rlkernels.prove`` on this GPU;
3. the records that come with the package, of GPUs with the same compute capability; ``bench.gpu.records`` says how.

Without any of them it takes ``torch``.
"""

import functools
import importlib.util
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from rlkernels import _fakes
from rlkernels.registry import OPS

P = ParamSpec("P")
R = TypeVar("R")
BACKENDS = ("auto", "cuda", "triton", "cpu", "torch")


# os.environ.get takes 1 µs for a variable that is not set
_environ: Any = os.environ._data  # type: ignore[attr-defined]
_BACKEND_KEY = os.environ.encodekey("RLKERNELS_BACKEND")
_INTERPRET_KEY = os.environ.encodekey("TRITON_INTERPRET")
_ONE = os.environ.encodevalue("1")

# Compute capability ("9.0") -> op -> its backend there, from the records in bench/gpu/records, which a wheel does not
# hold; `python -m bench.gpu.records` writes it.
RECORDS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("records.json").read_text())["backends"]


@functools.cache
def extension_error() -> str | None:
    """Load ``rlkernels._C``; return None, or one line with the reason why it does not load.

    Warn if the extension exists but does not load, or if a clone hides it. Without it everything works, but slower.
    """
    try:
        import rlkernels._C  # noqa: F401
    except ImportError as error:
        command = "with `pip install --no-build-isolation -e .`"
        built = sorted(path.name for path in Path(__file__).parent.glob("_C.*") if path.suffix in (".so", ".pyd"))
        installed = [path for path in map(Path, sys.path) if [*path.glob("rlkernels/_C.*.so")]]
        if built:
            reason = (
                f"the compiled extension {', '.join(built)} does not load ({error}); it fits the torch and the Python "
                f"that it was built with: build it again {command}"
            )
        elif installed:
            reason = (
                f"Python takes {Path(__file__).parent}, which is not compiled, before the installed package in "
                f"{installed[0]}: install {command}, or start Python in another folder"
            )
        else:
            return f"the compiled extension is missing ({error}); build it {command}"
        warnings.warn(f"rlkernels works without its compiled code, more slowly: {reason}", RuntimeWarning, stacklevel=2)
        return reason
    _fakes.register()
    return None


@functools.cache
def built_with_cuda() -> bool:
    """Return True if the extension holds the CUDA kernels."""
    return extension_error() is None and torch.ops.rlkernels.built_with_cuda()


def triton_interpreted() -> bool:
    """Return True if Triton kernels run on CPU tensors through Triton's interpreter."""
    return _environ.get(_INTERPRET_KEY) == _ONE


def next_power_of_2(number: int) -> int:
    """Return the least power of two that a number >= 1 does not exceed; Triton's own function takes 10 µs."""
    return 1 << (number - 1).bit_length()


def device_kind(device: torch.device) -> str:
    """Return the type of a device; "cpu" for "meta", on which our ops compute shapes."""
    return "cpu" if device.type == "meta" else device.type


@functools.cache
def generation(device: torch.device) -> int:
    """Return the first digit of the GPU's compute capability; 0 on a CPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def mark_written(*tensors: torch.Tensor) -> None:
    """Tell autograd of tensors that a kernel wrote to, so that it does not differentiate through their old values."""
    if not torch.compiler.is_compiling():  # the compiler does it by the schemas of the ops
        torch.autograd.graph.increment_version(tensors)


def may_share(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether a tensor shares memory with another; True if that is unknown, as in a compiled graph."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return any([torch._C._is_alias_of(first, other) for other in others])  # type: ignore[attr-defined]


def current_device() -> int:
    """Return the index of the current GPU; -1 before the first use of one."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


def on_its_device(function: Callable[Concatenate[torch.Tensor, P], R]) -> Callable[Concatenate[torch.Tensor, P], R]:
    """Run ``function`` with the GPU of its first argument as the current one, where Triton launches kernels."""

    @functools.wraps(function)
    def run(first: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        index = first.get_device()  # -1 on a CPU
        if index == current_device():
            return function(first, *args, **kwargs)
        with torch.cuda.device(index):
            return function(first, *args, **kwargs)

    return run


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all tensors are plain numbers in memory, and no mode of torch intercepts their ops."""
    return not is_intercepted() and all(_is_plain(tensor) for tensor in tensors)


def is_intercepted() -> bool:
    """Return whether a mode or a transform of torch intercepts its ops."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_neg():
        return False
    if type(tensor) is torch.nn.Parameter and tensor.numel() == 0:  # DeepSpeed may hold its entries elsewhere
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # it may outlive its transform
        return False
    if torch.is_autocast_enabled(tensor.device.type):
        return False
    return forward_ad.unpack_dual(tensor).tangent is None


@functools.cache
def signature_function() -> Callable[..., Any]:
    """Return the function that makes a call's key: all facts that :func:`are_plain` and checks of types depend on."""
    if extension_error() is not None:
        return _signature
    from rlkernels import _C

    return getattr(_C, "signature", _signature)


def _signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the key of ``rlkernels._C.signature``, in Python; a call that is not plain equals no other."""
    values = (*args, *kwargs.values())
    if not are_plain(value for value in values if isinstance(value, torch.Tensor)):
        return object()
    grad = torch.is_grad_enabled()
    facts = [
        (type(v), v.dtype, v.device, v.dim(), grad and v.requires_grad) if isinstance(v, torch.Tensor) else v is None
        for v in values
    ]
    return (*facts, *kwargs)


_plain_signatures: set[Any] = set()  # signatures of plain calls of launchers
_NO_NAMES: dict[str, Any] = {}


def kernel_op(
    name: str, fake: Callable[..., Any] | None = None, *, mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., R]], Any]:
    """Register a launcher as an op for torch.compile and dispatch modes.

    Calls with plain tensors go straight to the launcher: torch's dispatcher takes longer than a launch.

    Args:
        name: of the op.
        fake: returns results of the same shapes and dtypes; None for an op that returns nothing.
        mutates: arguments that it writes to.
    """

    def register(launcher: Callable[..., R]) -> Any:
        launch = on_its_device(launcher)
        op = torch.library.custom_op(name, mutates_args=mutates)(launch)  # type: ignore[arg-type]
        if fake is not None:
            op.register_fake(fake)
        parameters = list(inspect.signature(launcher).parameters)
        written = [parameters.index(argument) for argument in mutates]

        @functools.wraps(launcher)
        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return op(*args)
            key = signature_function()(args, _NO_NAMES)
            if key not in _plain_signatures:
                if not are_plain(a for a in args if isinstance(a, torch.Tensor)):
                    return op(*args)
                _plain_signatures.add(key)
            out = launcher(*args) if args[0].get_device() == current_device() else launch(*args)
            if written:
                mark_written(*[args[i] for i in written])
            return out

        return call

    return register


def unavailable(op: str, backend: str, device: torch.device) -> str | None:
    """Return why ``backend`` cannot run ``op`` on ``device``; None if it can."""
    if backend == "torch":
        return None
    if backend not in OPS[op].backends:
        return f"{OPS[op].name} has no {backend} implementation"
    backend = backend.partition("/")[0]
    if backend == "cpu":
        return f"the tensors are on {device}" if device_kind(device) != "cpu" else extension_error()
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; `pip install triton`"
        if device.type != "cuda" and not triton_interpreted():
            return f"the tensors are on {device}; Triton runs on a GPU, or anywhere with TRITON_INTERPRET=1"
        return None
    if device.type != "cuda":
        return f"the tensors are on {device}"
    return extension_error() or (None if built_with_cuda() else "the extension was built without CUDA")


_run_backends: dict[str, str] = {}  # by op: what a run chose
_choices: dict[tuple[Any, ...], str] = {}  # chosen backends, by all facts that they depend on


def set_run_backends(table: Mapping[str, str]) -> None:
    """Make ``auto`` choose these backends on a GPU, by op; other ops do not change, and {} undoes it."""
    _run_backends.clear()
    _run_backends.update(table)
    clear_choices()


def clear_choices() -> None:
    """Drop the cached choices; the next choice reads the verdicts again."""
    gpu_choice.cache_clear()
    _choices.clear()


@functools.cache
def gpu_choice(op: str, index: int | None) -> tuple[str, str]:
    """Return the backend of an op on a GPU, and its source: run, verdict, record or default."""
    device = torch.device("cuda") if index is None else torch.device("cuda", index)
    for backend, source in _gpu_candidates(op, index):
        if backend is None:
            continue
        reason = unavailable(op, backend, device)
        if reason is None:
            return backend, source
        if source == "run":
            warnings.warn(f"torch runs {op}, though the run chose {backend}: {reason}", stacklevel=2)
    return "torch", "default"


def _gpu_candidates(op: str, index: int | None) -> Iterator[tuple[str | None, str]]:
    """Yield backends of an op on a GPU, or None, and their sources, in order of precedence."""
    op = OPS[op].like or op
    names = list(dict.fromkeys([op, OPS[op].name]))  # a regime, then its op
    for name in names:
        if name in _run_backends:
            yield _run_backends[name], "run"
            return
    if not OPS[op].on_gpu or not torch.cuda.is_available():
        return
    from rlkernels import verdicts  # read at the first choice on a GPU

    if index is None:
        index = torch.cuda.current_device()
    records = RECORDS.get(verdicts.device_facts(index)["capability"], {})
    candidates = [(verdicts.winner(verdicts.load(name, index)), "verdict") for name in names]
    candidates += [(records.get(name), "record") for name in names]
    if all(backend is None for backend, _ in candidates):
        _warn_unproved()
    yield from candidates


def _gpu_backend(op: str, index: int | None) -> str:
    return gpu_choice(op, index)[0]


# torch.compile treats their results as constants, as with torch.compiler.assume_constant_result, which imports the
# compiler.
_gpu_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _warn_unproved() -> None:
    warnings.warn(
        "rlkernels has kernels that are not proved on this GPU, so torch runs instead; `python -m rlkernels prove` "
        "(about a minute) can change that",
        stacklevel=2,
    )


def environment_backend() -> str:
    """Return the environment variable ``RLKERNELS_BACKEND``, "auto" if it is not set.

    Raises:
        ValueError: the backend is unknown, or no op can run with it here.
    """
    backend = os.environ.get("RLKERNELS_BACKEND", "auto")
    if backend != "auto":
        _check_environment(backend)
    return backend


@functools.cache
def _check_environment(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"RLKERNELS_BACKEND must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return
    device = torch.device("cuda" if torch.cuda.is_available() and backend != "cpu" else "cpu")
    reasons = [unavailable(name, backend, device) for name, op in OPS.items() if getattr(op, backend)]
    if all(reasons):
        raise ValueError(f"RLKERNELS_BACKEND={backend} cannot work here: {reasons[0]}")


def choose(op: str, device: torch.device, backend: str = "auto") -> str:
    """Choose the backend that runs ``op`` on tensors of ``device``.

    Raises:
        ValueError: ``backend`` is unknown or cannot run here; or as :func:`environment_backend`.
    """
    if torch.compiler.is_compiling():
        return _choose(op, device, backend)
    key = op, device, backend, _environ.get(_BACKEND_KEY)
    chosen = _choices.get(key)
    if chosen is None:
        chosen = _choices[key] = _choose(op, device, backend)
    return chosen


def _choose(op: str, device: torch.device, backend: str) -> str:
    if backend not in (allowed := (*BACKENDS, *OPS[op].variants)):
        raise ValueError(f"backend must be one of {', '.join(allowed)}, got {backend!r}")
    if backend != "auto":
        if (reason := unavailable(op, backend, device)) is not None:
            raise ValueError(f"backend={backend!r} cannot run {OPS[op].name} here: {reason}")
        return backend
    requested = environment_backend()  # for ops and devices that it can run; it changes no other choice
    if requested != "auto" and unavailable(op, requested, device) is None:
        return requested
    if device_kind(device) == "cpu":
        return "cpu" if unavailable(op, "cpu", device) is None else "torch"
    return _gpu_backend(op, device.index) if device.type == "cuda" else "torch"
