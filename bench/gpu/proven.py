"""From a record of ``python -m bench.gpu`` to what ``auto`` takes in this process."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.cases import CASES
from rlkernels.backend import OPS

GPU_BACKENDS = ("cuda", "triton")


def read_checks(path: Path, device: str, commit: str) -> dict[str, Any]:
    """A record, if it is of this device and commit.

    Raises:
        ValueError: it is not; the message says what it is of.
        OSError: it cannot be read.
    """
    try:
        record = json.loads(path.read_text())
        found = record["gpu"] or "cpu", record["commit"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"--checks {path} is no record of python -m bench.gpu: {error!r}") from error
    if found != (device, commit):
        raise ValueError(f"--checks {path} is of {found[0]} at {found[1]}, not of {device} at {commit}")
    return record


def passed(record: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Op -> the GPU backends that passed all checks there are, quickest first.

    One that took longer than plain torch on the timed cases, or failed on one of them, is left out; one that was not
    timed is not. Where a timing failed as a whole, nobody knows by whose fault: none of that op's is taken.
    """
    wanted: dict[str, set[str]] = defaultdict(set)
    for case in CASES:
        if not case.timed:
            wanted[case.op].add(case.label)
    right, wrong = defaultdict[tuple[str, str], set[str]](set), set[tuple[str, str]]()
    for check in record.get("checks", []):
        if check["ok"]:
            right[check["op"], check["backend"]].add(check["case"])
    seconds: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in record.get("timings", []):
        if row.get("median_s"):
            seconds[row["op"], row["provider"]][row["shape"]] = row["median_s"]
        if row.get("missing") or row.get("match") == "differs":
            wrong.add((row["op"], row["provider"]))
    wrong |= {(failed["op"], backend) for failed in record.get("failed_timings", []) for backend in GPU_BACKENDS}

    def share(op: str, backend: str) -> float:
        """Time over that of plain torch, on the cases that both have; 1 where there is none."""
        own, plain = seconds[op, backend], seconds[op, "torch"]
        both = own.keys() & plain.keys()
        return sum(own[shape] for shape in both) / sum(plain[shape] for shape in both) if both else 1.0

    out = {}
    for op in OPS:
        proved = [b for b in GPU_BACKENDS if wanted[op] and right[op, b] >= wanted[op] and (op, b) not in wrong]
        good = [b for b in proved if share(op, b) <= 1]
        if good:
            out[op] = tuple(sorted(good, key=lambda backend: share(op, backend)))
    return out


def prove(backends: Mapping[str, Sequence[str]]) -> None:
    """From here on ``auto`` takes these on a GPU, in this process."""
    for op, names in backends.items():
        OPS[op] = replace(OPS[op], proven=tuple(names))
