"""``python -m bench.gpu.proven``: from the records in bench/gpu/records to what ``auto`` takes on a GPU.

Writes rlkernels/proven.json, which a wheel brings along, and says of every backend that is not in it why. A backend of
an op has to pass all checks, timings, tests and the sanitizer (it says so where that could not run), and to be at least
as quick as the default and every rival that is right; what has changed in its source since the record was made counts
as never run.
"""

import argparse
import ast
import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import rlkernels
from bench.gpu.cases import CASES, TESTS
from bench.gpu.journal import RECORDS, ROOT, Entry, read
from bench.gpu.plan import LEAST_SANITIZED_S, MODEL_OPS, SANITIZED, SANITIZERS
from rlkernels.backend import OPS

GPU_BACKENDS = ("cuda", "triton")
RESULT = ROOT / "rlkernels/proven.json"
ASIDE = ("rlkernels._check", "rlkernels.backend")  # what is refused and which way is taken: nothing is computed there
CUDA_OPS = "TORCH_LIBRARY_IMPL(rlkernels, CUDA,"


def sources() -> dict[str, dict[str, str]]:
    """Op -> GPU backend -> what it runs through, as a hash that comments and layout do not change."""
    out: dict[str, dict[str, str]] = {}
    for op, written in OPS.items():
        found = {b: source(op, b) for b in GPU_BACKENDS if getattr(written, b)}
        if found:
            out[op] = found
    return out


def source(op: str, backend: str) -> str:
    texts = [(path, path.read_text()) for path in sorted(files(op, backend))]
    code = [outline(text) if path.suffix == ".py" else without_comments(text) for path, text in texts]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def files(op: str, backend: str) -> set[Path]:
    """All that a GPU backend of an op runs through, and what the modules among it import beside that."""
    found = modules(getattr(rlkernels, op).__module__)
    if backend == "triton":
        return found
    on_host = {path for path in found if not re.search(r"^import triton$", path.read_text(), re.MULTILINE)}
    return {*on_host, *cuda_files(), ROOT / "setup.py"}  # where the flags are


def modules(name: str) -> set[Path]:
    """Files of a module and of all that it imports of the package, itself or through others, wherever it does."""
    found, left = set(), [name]
    while left:
        path = file_of(left.pop())
        if path is None or path in found:
            continue
        found.add(path)
        for module, part in imports(path.read_text()):
            inner = f"{module}.{part}"
            left.append(inner if part and file_of(inner) else module)
    return found


@functools.cache
def imports(text: str) -> list[tuple[str, str]]:
    """(module, what is taken of it), "" for a whole one."""
    out = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            out += [(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            out += [(alias.name, "") for alias in node.names]
    return out


def file_of(module: str) -> Path | None:
    """None: it is no module of the package, or it computes nothing."""
    package, *names = module.split(".")
    if package != "rlkernels" or not names or module in ASIDE:
        return None
    path = ROOT.joinpath(package, *names)
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def cuda_files() -> set[Path]:
    """What nvcc compiles, what registers it, and what these include of ours."""
    found, csrc = set(), ROOT / "csrc"
    left = [*csrc.glob("cuda/*.cu"), *(p for p in csrc.rglob("*.cpp") if CUDA_OPS in p.read_text())]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r'#include "(.*?)"', path.read_text())
            left += [p for name in names for p in csrc.rglob(name)]
    return found


def without_comments(text: str) -> str:
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).split())


@functools.cache
def outline(text: str) -> str:
    return structure(ast.parse(text))


def structure(node: Any) -> str:
    """A syntax tree as text, the same in every version of Python: fields that are empty may be missing in another.

    Docstrings count as comments.
    """
    if isinstance(node, list):
        node = [part for part in node if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
        return f"[{','.join(map(structure, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = (f"{name}={structure(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
    return f"{type(node).__name__}({','.join(fields)})"


def read_record(path: Path, device: str, commit: str) -> list[Entry]:
    """A record, if it is of this device and commit.

    Raises:
        ValueError: it is not; the message says what it is of.
        OSError: it cannot be read.
    """
    entries = read(path)
    if not entries:
        raise ValueError(f"{path} is empty")
    found = entries[0]["gpu"] or "cpu", entries[0]["commit"]
    if found != (device, commit):
        raise ValueError(f"{path} is of {found[0]} at {found[1]}, not of {device} at {commit}")
    return entries


def objections(entries: Sequence[Entry], op: str, backend: str) -> list[str]:
    """Why a record does not prove a backend of an op; empty where it does."""
    return [
        *_unchecked(entries, op, backend), *_beaten(entries, op, backend), *_untested(entries, op, backend),
        *_slower_in_a_model(entries, op, backend),
    ]  # fmt: skip


def _unchecked(entries: Sequence[Entry], op: str, backend: str) -> Iterator[str]:
    checks = {e["case"]: e["ok"] for e in entries if e["kind"] == "check" and (e["op"], e["backend"]) == (op, backend)}
    for case in CASES:
        if case.op == op and not case.timed and not checks.get(case.label):
            yield f"check {case.label}: {'wrong' if case.label in checks else 'not done'}"


def _beaten(entries: Sequence[Entry], op: str, backend: str) -> Iterator[str]:
    """Timed cases that the backend did not win."""
    rows: dict[str, dict[str, Entry]] = {}
    for e in entries:
        if e["kind"] == "row" and e["of"] == "time" and e["op"] == op:
            rows.setdefault(e["shape"], {})[e["provider"]] = e
    done = {e["job"] for e in entries if e["kind"] == "done"}
    for case in CASES:
        if case.op != op or not case.timed:
            continue
        here = rows.get(case.label, {})
        ours = here.get(backend)
        others = {name: row for name, row in here.items() if name not in GPU_BACKENDS and row.get("median_s")}
        if f"time {op}: {case.label}" not in done:
            yield f"{case.label}: not timed to its end"
        elif ours is None or not ours["ok"]:
            yield f"{case.label}: {(ours or {}).get('missing') or 'wrong'}"
        elif not others:
            yield f"{case.label}: nobody to compare with"
        else:
            best = min(others, key=lambda name: others[name]["median_s"])
            times = ours["median_s"] / others[best]["median_s"]
            if times > 1:
                yield f"{case.label}: {times:.2f} times as long as {best}"


def _untested(entries: Sequence[Entry], op: str, backend: str) -> Iterator[str]:
    tests = {e["file"]: e["ok"] for e in entries if e["kind"] == "tests"}
    for file in TESTS[op]:
        if not tests.get(file):
            yield f"{file}: {'failed' if file in tests else 'not run'}"
    for e in entries:
        if e["kind"] == "sanitize" and op in SANITIZED[e["op"]] and not e["ok"]:
            yield f"{e['case']}: {e['message'][-200:]}"
    if any(op in ops for ops in SANITIZED.values()) and _could_sanitize(entries):
        yield from (f"{tool}: not run" for tool in unsanitized(entries, op))


def unsanitized(entries: Sequence[Entry], op: str) -> list[str]:
    """The tools of the sanitizer that have not looked at an op."""
    seen = {e["case"] for e in entries if e["kind"] == "sanitize" and op in SANITIZED[e["op"]]}
    return [tool for tool in SANITIZERS if tool not in seen]


def _could_sanitize(entries: Sequence[Entry]) -> bool:
    """Whether a call had the sanitizer and ended before its time was up."""
    there = False
    for e in entries:
        if e["kind"] == "call":
            there = e.get("sanitizer", False)
        elif e["kind"] == "end" and there and e["left_s"] >= LEAST_SANITIZED_S:
            return True
    return False


def _slower_in_a_model(entries: Sequence[Entry], op: str, backend: str) -> Iterator[str]:
    """The real default is a path through a whole model, not the op alone."""
    for part, ops in MODEL_OPS.items():
        if op not in ops or backend != "triton":
            continue
        rows = {e["provider"]: e for e in entries if e["kind"] == "row" and e["of"] == "model" and e["op"] == part}
        ours, default = rows.get("triton"), rows.get("default")
        if ours and ours.get("median_s") and "OutOfMemory" in (default or {}).get("missing", ""):
            continue  # where the default does not fit
        if not (ours and default and ours.get("median_s") and default.get("median_s")):
            yield f"model, {part}: not measured"
        elif ours["median_s"] > default["median_s"]:
            yield f"model, {part}: {ours['median_s'] / default['median_s']:.2f} times as long as the default"


def passed(entries: Sequence[Entry]) -> dict[str, tuple[str, ...]]:
    """Op -> the GPU backends that a record proves, quickest first."""

    def seconds(op: str, backend: str) -> float:
        rows = (e for e in entries if e["kind"] == "row" and e["of"] == "time" and e["op"] == op)
        return sum(e.get("median_s") or 0.0 for e in rows if e["provider"] == backend)

    out = {}
    for op, written in OPS.items():
        good = [b for b in GPU_BACKENDS if getattr(written, b) and not objections(entries, op, b)]
        if good:
            out[op] = tuple(sorted(good, key=lambda backend: seconds(op, backend)))
    return out


def prove(backends: Mapping[str, Sequence[str]]) -> None:
    """From here on ``auto`` takes these on a GPU, and no others, in this process."""
    for op in OPS:
        OPS[op] = replace(OPS[op], proven=tuple(backends.get(op, ())))


def compose(records: Iterable[Path]) -> tuple[dict[str, Any], list[str]]:
    """What rlkernels/proven.json should hold, and why other backends are not in it.

    For each architecture and op the newest record of the present source decides.
    """
    now, loaded = sources(), []
    for path in records:
        entries = read(path)
        calls = [e for e in entries if e["kind"] == "call"]
        device = next((e for e in reversed(entries) if e["kind"] == "device" and e["ok"]), None)
        if calls and device and "capability" in device:
            loaded.append((calls[-1]["date"], path.name, device["capability"], calls[-1]["sources"], entries))
    won: dict[str, dict[str, tuple[str, ...]]] = {}
    used, complaints = set(), []
    for _, name, capability, made_of, entries in sorted(loaded, key=lambda record: record[0]):
        good = passed(entries)
        for op, present in now.items():
            current = {b for b in present if made_of.get(op, {}).get(b) == present[b]}
            if not current:
                continue
            won.setdefault(capability, {})[op] = tuple(b for b in good.get(op, ()) if b in current)
            used.add(name)
            for b in sorted(current):
                lacks = ", ".join(unsanitized(entries, op))
                note = [f"proven, but not sanitized by {lacks}"] if b in good.get(op, ()) and lacks else []
                complaints += [f"{capability} {op} {b}: {why}" for why in [*objections(entries, op, b), *note]]
    kept = {arch: {op: list(names) for op, names in ops.items() if names} for arch, ops in won.items()}
    return {"won": {arch: ops for arch, ops in kept.items() if ops}, "records": sorted(used)}, complaints


def main() -> int:
    """Writes rlkernels/proven.json -> exit code."""
    argparse.ArgumentParser(
        prog="python -m bench.gpu.proven", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        found, complaints = compose(sorted(RECORDS.glob("*.jsonl")))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(complaints))
    print(f"{RESULT.relative_to(ROOT)}: {found['won'] or 'nothing proven'} from {found['records'] or 'no records'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
