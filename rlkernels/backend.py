"""Which implementation of an op runs: ``"auto" | "cuda" | "triton" | "cpu" | "torch"``.

``cpu`` and ``cuda`` are our compiled kernels, ``triton`` our Triton kernels, ``torch`` the reference in plain
torch that every op has. ``auto`` takes the fastest that works for the device of the tensors; an explicit choice
that cannot work raises and says why. The environment variable ``RLKERNELS_BACKEND`` sets what ``auto`` means, for the
ops that have that backend; one that no op could use here raises.
"""

import functools
import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
BACKENDS = ("auto", "cuda", "triton", "cpu", "torch")


@dataclass(frozen=True)
class Op:
    """What has been written for an op. ``proven``: in order of preference, what ``auto`` takes on a GPU; None: what
    the records of its architecture say, see :func:`proven`."""

    cpu: bool = False
    triton: bool = False
    cuda: bool = False
    proven: tuple[str, ...] | None = None


# Compute capability ("9.0") -> op -> backends that won on such a GPU, best first. `python -m bench.gpu.proven` writes
# it from the records in bench/gpu/records, which a wheel does not hold.
PROVEN: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("proven.json").read_text())["won"]

# One line per op of the public contract.
OPS: dict[str, Op] = {
    "dtw": Op(cpu=True, triton=True, cuda=True),
    "dtw_topk": Op(cpu=True, triton=True, cuda=True),
    "soft_dtw": Op(),
    "state_similarity": Op(),
    "rhyme_similarity": Op(),
    "rhyme_topk": Op(),
    "top1_delta": Op(cpu=True, triton=True),
    "top1_deltas": Op(cpu=True, triton=True),
    "delta_matvec": Op(cpu=True, triton=True),
    "add_rank1_": Op(cpu=True, triton=True),
    "block_pool": Op(cpu=True),
    "write_kv": Op(cpu=True, triton=True),
    "paged_attention": Op(cpu=True, triton=True),
    "shared_prefix_attention": Op(cpu=True, triton=True),
    "merge_attention": Op(cpu=True, triton=True),
    "grouped_attention": Op(cpu=True, triton=True),
    "keyed_uniform": Op(cpu=True),
    "sample_tokens": Op(cpu=True, triton=True),
    "verify_drafts": Op(cpu=True, triton=True),
    "rollout_history": Op(cpu=True),
    "token_logprobs": Op(cpu=True, triton=True),
    "linear_token_logprobs": Op(cpu=True, triton=True),
    # between the matrix products of a decoder layer (rlkernels.decoder)
    "add_rms_norm": Op(cpu=True),
    "rope": Op(cpu=True),
    "silu_mul": Op(cpu=True),
}


@functools.cache
def extension_error() -> str | None:
    """Loads ``rlkernels._C``. None when that worked, otherwise the reason in one line.

    One that is there but does not load is warned of: what depends on it would only become slow.
    """
    try:
        import rlkernels._C
        import rlkernels._fakes  # noqa: F401
    except ImportError as error:
        how = "with `pip install --no-build-isolation -e .`"
        built = sorted(path.name for path in Path(__file__).parent.glob("_C.*") if path.suffix in (".so", ".pyd"))
        if not built:
            return f"the compiled extension is missing ({error}); build it {how}"
        reason = (
            f"the compiled extension {', '.join(built)} does not load ({error}); it fits the torch and the Python that "
            f"it was built with: build it again {how}"
        )
        warnings.warn(f"rlkernels works without its compiled code, more slowly: {reason}", RuntimeWarning, stacklevel=2)
        return reason
    return None


@functools.cache
def built_with_cuda() -> bool:
    """True when the extension holds the CUDA kernels."""
    return extension_error() is None and torch.ops.rlkernels.built_with_cuda()


def triton_interpreted() -> bool:
    """True when Triton kernels run on CPU tensors through Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_META_IS_CPU = ContextVar("meta_is_cpu", default=False)


@contextmanager
def meta_as_cpu() -> Iterator[None]:
    """Within it ops take tensors on ``meta`` for those of a CPU, so that what they would hold there can be counted."""
    token = _META_IS_CPU.set(True)
    try:
        yield
    finally:
        _META_IS_CPU.reset(token)


def runs_on(device: torch.device) -> str:
    """The type of a device; "cpu" for ``meta`` within :func:`meta_as_cpu`."""
    return "cpu" if device.type == "meta" and _META_IS_CPU.get() else device.type


def mark_written(*tensors: torch.Tensor) -> None:
    """Tells autograd of tensors that a kernel wrote to, so that it does not differentiate through their old values."""
    if not torch.compiler.is_compiling():  # the compiler does it by the schemas of the ops
        torch.autograd.graph.increment_version(tensors)


def on_its_device(function: Callable[Concatenate[torch.Tensor, P], R]) -> Callable[Concatenate[torch.Tensor, P], R]:
    """``function`` with the GPU of its first argument as the current one, which is where Triton launches kernels."""

    @functools.wraps(function)
    def run(first: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device(first.get_device()):  # -1, which changes nothing, on a CPU
            return function(first, *args, **kwargs)

    return run


def unavailable(op: str, backend: str, device: torch.device) -> str | None:
    """Why ``backend`` cannot run ``op`` on ``device``; None when it can."""
    written = OPS[op]
    if backend == "torch":
        return None
    if not getattr(written, backend):
        return f"{op} has no {backend} implementation"
    if backend == "cpu":
        return f"the tensors are on {device}" if runs_on(device) != "cpu" else extension_error()
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; `pip install triton`"
        if device.type != "cuda" and not triton_interpreted():
            return f"the tensors are on {device}; Triton runs on a GPU, or anywhere with TRITON_INTERPRET=1"
        return None
    if device.type != "cuda":
        return f"the tensors are on {device}"
    return extension_error() or (None if built_with_cuda() else "the extension was built without CUDA")


def proven(op: str, device: torch.device) -> tuple[str, ...]:
    """The backends that ``auto`` may take for ``op`` on this GPU, in order of preference.

    On an architecture without a record these are none: nothing of ours that has never run there is the default.
    """
    own = OPS[op].proven
    if own is not None or not PROVEN or device.type != "cuda" or not torch.cuda.is_available():
        return own or ()
    found = torch.cuda.get_device_properties(device)
    return tuple(PROVEN.get(f"{found.major}.{found.minor}", {}).get(op, ()))


def wanted() -> str:
    """What the environment variable ``RLKERNELS_BACKEND`` asks for, "auto" where it is not set.

    Raises:
        ValueError: it is unknown, or no op whatever could run with it here.
    """
    asked = os.environ.get("RLKERNELS_BACKEND", "auto")
    return asked if asked == "auto" else _usable(asked)


@functools.cache
def _usable(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"RLKERNELS_BACKEND must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend in ("auto", "torch"):
        return backend
    device = torch.device("cuda" if torch.cuda.is_available() and backend != "cpu" else "cpu")
    reasons = [unavailable(op, backend, device) for op, written in OPS.items() if getattr(written, backend)]
    if all(reasons):
        raise ValueError(f"RLKERNELS_BACKEND={backend} cannot work here: {reasons[0]}")
    return backend


def choose(op: str, device: torch.device, backend: str = "auto") -> str:
    """The backend that runs ``op`` on tensors of ``device``.

    Raises:
        ValueError: ``backend`` is unknown, or was asked for by name and cannot run here; or as of :func:`wanted`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "auto":
        if (reason := unavailable(op, backend, device)) is not None:
            raise ValueError(f"backend={backend!r} cannot run {op} here: {reason}")
        return backend
    asked = wanted()  # of the ops that it can run: others, and tensors on another device, go on as ever
    if asked != "auto" and unavailable(op, asked, device) is None:
        return asked
    candidates = ("cpu",) if runs_on(device) == "cpu" else proven(op, device)
    return next((b for b in candidates if unavailable(op, b, device) is None), "torch")
