"""``python -m bench.gpu.records``: from the records of proofs to what ``auto`` takes where nobody has proved yet.

Reads ``bench/gpu/records/*-prove.json``, which ``python -m rlkernels prove --record`` writes, and writes
rlkernels/records.json, which a wheel holds. For each compute capability and op the newest record counts whose sources
are the present ones; comments, docstrings and layout do not count. A record in which torch was kept because the times
could not be told apart leaves an earlier verdict: another machine, or its host, does not take back what was proved.
"""

import argparse
import functools
import json
import re
from pathlib import Path
from typing import Any

from bench.gpu.journal import RECORDS, ROOT
from rlkernels.backend import OPS
from rlkernels.proof import WIN
from rlkernels.verdicts import digest, python_files

RESULT = ROOT / "rlkernels/records.json"


def files(op: str, backend: str) -> set[str]:
    """The sources of a backend of an op, relative to the project; for CUDA C++ with what nvcc compiles.

    Our calls of torch's kernels are left out: ours stay right, and a record counts beside any version of torch anyway.
    """
    found = {path for path in python_files(op) if path.name != "library.py"}
    left = [*(ROOT / "csrc/cuda").glob("*.cu")] if backend == "cuda" else []
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r'#include "(.*?)"', path.read_text())
            left += [p for name in names for p in (ROOT / "csrc").rglob(name)]
    return {str(path.relative_to(ROOT)) for path in found}


digest_once = functools.cache(digest)


def changed(record: dict[str, Any], op: str, backend: str) -> list[str]:
    """The sources of a backend that are not what they were when the record was made."""
    made_of = record["sources"]
    return sorted(name for name in files(op, backend) if made_of.get(name) != digest_once(ROOT / name))


def is_decided(verdict: dict[str, Any]) -> bool:
    """Tell whether a kernel of ours won, or all were wrong or no faster."""
    return verdict["backend"] != "torch" or all(
        not entry["cases"] or any(case["interval"][0] >= WIN for case in entry["cases"].values())
        for entry in verdict["candidates"].values()
    )


def compose(records: list[Path]) -> tuple[dict[str, Any], list[str]]:
    """Return what rlkernels/records.json should hold, and why other backends are not in it."""
    loaded = [(path.name, json.loads(path.read_text())) for path in records]
    chosen: dict[str, dict[str, tuple[str, str]]] = {}
    used, complaints = set(), []
    for name, record in loaded:
        capability = record["device"]["capability"]
        for op, verdict in record["verdicts"].items():
            if OPS[op].like:
                continue
            backend, date = verdict["backend"], verdict["date"] if is_decided(verdict) else "0"
            if stale := changed(record, op, backend):
                complaints.append(f"{name}, {op}: changed since: {', '.join(stale)}")
            elif date > chosen.get(capability, {}).get(op, ("", ""))[1]:
                chosen.setdefault(capability, {})[op] = backend, date
                used.add(name)
            complaints += [
                f"{name}, {op} {who}: {e['reason']}" for who, e in verdict["candidates"].items() if e["reason"]
            ]
    backends = {at: {op: backend for op, (backend, _) in ops.items()} for at, ops in chosen.items()}
    return {"backends": backends, "records": sorted(used)}, complaints


def main() -> int:
    """Writes rlkernels/records.json -> exit code."""
    argparse.ArgumentParser(
        prog="python -m bench.gpu.records", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    found, complaints = compose(sorted(RECORDS.glob("*-prove.json")))
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(complaints))
    print(f"{RESULT.relative_to(ROOT)}: {found['backends'] or 'nothing'} from {found['records'] or 'no records'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
