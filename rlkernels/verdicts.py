"""Verdicts on backends: the facts that they depend on, and the files that hold them.

Each op, GPU and workload has a file in ``$RLKERNELS_CACHE``, else ``$XDG_CACHE_HOME/rlkernels``, else
``~/.cache/rlkernels``. Processes replace it atomically. If nothing can be written there, verdicts live as long as the
process.
"""

import ast
import contextlib
import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from rlkernels._files import replace_file
from rlkernels.registry import OPS

PACKAGE = Path(__file__).parent
# modules of other folders whose numbers an op uses, by folder
SHARED = {"rank1": ["sampling/reference.py"]}
# modules of the folders of ops that launch nothing: verdicts do not depend on them
HOST_ONLY = "block_pool.py", "cache.py", "peft.py", "soft.py", "states.py", "stream.py", "trajectories.py"
Verdict = dict[str, Any]
_memory: dict[str, Verdict] = {}  # by file name: verdicts of this process, also if their file could not be written


def structure(node: Any) -> str:
    """Return a syntax tree as text that is the same in all versions of Python, without docstrings."""
    if isinstance(node, list):
        statements = [n for n in node if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
        return f"[{','.join(map(structure, statements))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = (f"{name}={structure(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
    return f"{type(node).__name__}({','.join(fields)})"


def digest(path: Path) -> str:
    """Hash a module without its comments and layout; another file by its bytes."""
    text = structure(ast.parse(path.read_text())).encode() if path.suffix == ".py" else path.read_bytes()
    return hashlib.sha256(text).hexdigest()[:16]


def python_files(op: str) -> list[Path]:
    """Return the modules whose change voids verdicts on an op: those that compute its results.

    They lie in its folder, but for some shared ones. Modules that check, dispatch or differentiate are not among them.
    """
    folder = OPS[op].folder
    modules = [path for path in (PACKAGE / folder).glob("*.py") if path.name not in HOST_ONLY]
    return sorted([*modules, *(PACKAGE / name for name in ["_fakes.py", "_precision.py", *SHARED.get(folder, [])])])


@functools.cache
def sources(op: str) -> str:
    """Hash the modules of an op; with CUDA C++ also the compiled extension."""
    files = [*python_files(op), *(sorted(PACKAGE.glob("_C.*")) if OPS[op].cuda else [])]
    return hashlib.sha256(" ".join(map(digest, files)).encode()).hexdigest()[:16]


@functools.cache
def device_facts(index: int) -> dict[str, Any]:
    """Return the GPU, its driver, and the versions of its compilers."""
    properties = torch.cuda.get_device_properties(index)
    driver = Path("/proc/driver/nvidia/version")
    version = re.search(r"\d+\.\d+(\.\d+)?", driver.read_text()) if driver.exists() else None
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = None
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": version[0] if version else str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton,
    }


def folder() -> Path:
    """Return the folder of verdicts, which may not exist or not be writable."""
    if root := os.environ.get("RLKERNELS_CACHE"):
        return Path(root).expanduser() / "verdicts"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "rlkernels" / "verdicts"


def _key(op: str, index: int) -> str:
    facts = {**device_facts(index), "sources": sources(op)}
    return f"{op.replace('/', '.')}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def store(verdict: Verdict, index: int) -> None:
    """Store a verdict on the device with this index for later processes."""
    name = f"{_key(verdict['op'], index)}-{verdict['workload']}.json"
    _memory[name] = verdict
    with contextlib.suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(folder() / name, json.dumps(verdict, indent=1).encode())


def load(op: str, index: int, workload: str | None = None) -> list[Verdict]:
    """Load the verdicts on an op for this device and the present sources, of one workload or of all.

    Ignores files of another owner and files that hold no verdict.
    """
    pattern = f"{_key(op, index)}-{workload or '*'}.json"
    by_file = {name: verdict for name, verdict in _memory.items() if Path(name).match(pattern)}
    with contextlib.suppress(OSError):
        for path in sorted(folder().glob(pattern)):
            if path.name not in by_file and (verdict := _read(path)) is not None:
                by_file[path.name] = verdict
    return [verdict for verdict in by_file.values() if verdict["op"] == op]


def _read(path: Path) -> Verdict | None:
    try:
        if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
            return None
        verdict = json.loads(path.read_text())
        summary(verdict)  # `info` shows it
        known = verdict["backend"].partition("/")[0] in ("cuda", "triton", "torch")
        return verdict if isinstance(verdict["op"], str) and known else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def winner(verdicts: list[Verdict]) -> str | None:
    """Return the backend that won in every proved workload, else plain torch; None without a verdict."""
    backends = {verdict["backend"] for verdict in verdicts}
    if len(backends) > 1:
        return "torch"
    return next(iter(backends), None)


def summary(verdict: Verdict) -> str:
    """Describe each candidate: its worst time over plain torch's, or the reason against it."""
    descriptions = []
    for name, entry in verdict["candidates"].items():
        ratios = [case["ratio"] for case in entry["cases"].values()]
        result = entry["reason"] or f"{max(ratios):.2f} of the time of plain torch"
        descriptions.append(f"{name}: {result}")
    return "; ".join(descriptions)
