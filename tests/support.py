"""Helpers that several test files share."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlkernels import backend

aten = torch.ops.aten
ROOT = Path(__file__).parents[1]


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host of a GPU would have to wait for the result of an operation: for a number, or a shape."""
    if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
        return True
    if func is aten.repeat_interleave.Tensor:
        return (kwargs or {}).get("output_size") is None
    if func in (aten.index.Tensor, aten.index_put_.default):
        by_mask = any(i is not None and i.dtype == torch.bool for i in args[1])
        return by_mask and not (func is aten.index_put_.default and args[2].ndim == 0)
    return False


def computes(func: Any) -> bool:
    """Whether a GPU would launch something for an operation: not for views and empty memory."""
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not view and not func.overloadpacket.__name__.startswith(("empty", "new_empty", "lift_fresh"))


class Launches(TorchDispatchMode):
    """Notes what operations do.

    Attributes:
        counts: by name, the operations that compute, which a GPU would launch.
        waits: those whose result the host of a GPU would have to wait for.
        results: (name of the operation, shape) of every tensor that an operation gives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.waits: list[str] = []
        self.results: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if waits(func, args, kwargs):
            self.waits.append(str(func))
        if computes(func):
            self.counts[name] += 1
        out = func(*args, **(kwargs or {}))
        self.results += [(name, t.shape) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out


def series(n: int, steps: int, features: int | None = None, *, least: int = 0, whole: bool = False
           ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """n random trajectories with random lengths, poisoned with NaN beyond them; ``whole`` numbers add up exactly."""
    shape = (n, steps) if features is None else (n, steps, features)
    values = torch.randint(-3, 4, shape).float() if whole else torch.randn(shape)
    lengths = torch.randint(least, steps + 1, (n,))
    values[torch.arange(steps) >= lengths[:, None]] = torch.nan
    return values, lengths


def every_isa() -> Iterator[str]:
    """Chooses one instruction set of the CPU kernels after the other, of those that work here."""
    try:
        for isa in ("portable", "avx2", "avx512", "amx"):  # they ascend; the fixture cpu_isa names what is missing
            torch.ops.rlkernels.set_cpu_isa(isa)
            yield isa
    except ValueError:
        pass
    finally:
        torch.ops.rlkernels.set_cpu_isa("auto")


def run_python(*arguments: str, cwd: Path = ROOT, **env: str) -> str:
    """What another Python with these arguments prints, with ``env`` beside the environment of this one."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.strip()


def lacks(what: str) -> None:
    """Skips the running test because this machine lacks ``what``; the summary names it."""
    pytest.skip(f"this machine lacks {what}")


def take_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """All of a test runs on this backend, or it is skipped."""
    if name == "cpu" and backend.extension_error():
        lacks("the compiled extension")
    monkeypatch.setenv("RLKERNELS_BACKEND", name)
    return name
