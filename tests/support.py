"""Helpers that several test files share."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlkernels import backend

aten = torch.ops.aten
ROOT = Path(__file__).parents[1]
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)  # of tensors, and of containers of tensors


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the host of a GPU would have to wait for the result of an operation: for a number, or a shape."""
    if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
        return True
    if func is aten.repeat_interleave.Tensor:
        return (kwargs or {}).get("output_size") is None
    if func in (aten.index.Tensor, aten.index_put_.default):
        by_mask = any(i is not None and i.dtype == torch.bool for i in args[1])
        return by_mask and not (func is aten.index_put_.default and args[2].ndim == 0)
    return False


def computes(func: Any) -> bool:
    """Return whether a GPU would launch a kernel for an operation: not for views and empty memory."""
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not view and not func.overloadpacket.__name__.startswith(("empty", "new_empty", "lift_fresh"))


class Launches(TorchDispatchMode):
    """Record the operations of torch.

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


def draw_series(n: int, steps: int, features: int | None = None, *, min_length: int = 0, whole_numbers: bool = False
                ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return n random trajectories with random lengths, NaN beyond them; ``whole_numbers`` add up exactly."""
    shape = (n, steps) if features is None else (n, steps, features)
    values = torch.randint(-3, 4, shape).float() if whole_numbers else torch.randn(shape)
    lengths = torch.randint(min_length, steps + 1, (n,))
    values[torch.arange(steps) >= lengths[:, None]] = torch.nan
    return values, lengths


def every_isa() -> Iterator[str]:
    """Choose each instruction set of the CPU kernels that works here in turn, and yield it."""
    try:
        for isa in ("portable", "avx2", "avx512", "amx"):  # they ascend; the fixture cpu_isa names what is missing
            torch.ops.rlkernels.set_cpu_isa(isa)
            yield isa
    except ValueError:
        pass
    finally:
        torch.ops.rlkernels.set_cpu_isa("auto")


def run_python(*arguments: str, cwd: Path = ROOT, **env: str) -> str:
    """Return what another Python prints with these arguments, and with ``env`` added to the environment."""
    command = [sys.executable, *arguments]
    process = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout.strip()


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Write a file with the JSON of a row on each line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lacks(what: str) -> None:
    """Skip the running test because this machine lacks ``what``; the summary names it."""
    pytest.skip(f"this machine lacks {what}")


def take_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run all of a test on this backend, or skip it."""
    if name == "cpu" and backend.extension_error():
        lacks("the compiled extension")
    monkeypatch.setenv("RLKERNELS_BACKEND", name)
    return name
