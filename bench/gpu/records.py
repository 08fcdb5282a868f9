"""``python -m bench.gpu.records``: from the records of GPUs to the choices of ``auto`` on machines without a proof.

Reads ``bench/gpu/records``: ``*-prove.json``, which ``python -m rlkernels prove --record`` writes, and ``*.jsonl``, the
rows of ``bench.gpu.session``. Writes rlkernels/records.json, which a wheel contains. For each compute capability and op
(or regime), the newest valid proof and the newest rows count together. The choice is the fastest on average of the
kernels that are faster than torch in every case; without one, torch. Rivals do not count: ``auto`` cannot take them.
If no proof has chosen a kernel, rows can choose it by their PTX, ``NAME.ptx.xz`` beside them. torch needs none.

A record is valid while its compilers turn the present code into the proved PTX, apart from names and lines. Other PTX
is valid if the tests of tests/ptx pass and no count is worse: launches, waits of the host, instructions, bytes,
registers, spills, shared memory, blocks per SM. torch's kernels count as launches only: a new kernel with fewer
launches in all does torch's work. If torch won, only the same code is valid: other code may be faster. Launches and
waits may change in favour of a verdict: fewer make a winner faster, more make a kernel that lost slower. Fewer void a
verdict for torch, as the kernel may win now. torch's own launches are not recorded: a faster reference needs another
proof. If torch was kept because times could not be told apart, an earlier verdict remains: another machine does not
revoke a proof.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu.cases import LARGE
from bench.gpu.journal import RECORDS, ROOT, line, read
from rlkernels import backend as _backend
from rlkernels.proof import WIN, fastest
from rlkernels.proof.compiled import Code, Kernels, nvcc_version, read_code
from rlkernels.registry import OPS

RESULT = ROOT / "rlkernels/records.json"
TESTS = ["tests/ptx/test_kernels.py", "tests/ptx/test_dtw_cuda.py"]
# allowed rise of instruction counts: the last bits of random inputs differ between processors and end loops
MAX_COUNT_GROWTH = 1e-3
TAKEN_OVER = 1e-2  # the same with fewer launches: the work of torch's kernels, which are not counted
FIGURES = {"row": "median_s", "replay": "replay_s"}  # seconds by kind of entry; a replay counts in place of a call
Counts = dict[str, Any]


class Missing(RuntimeError):
    """The compiler of a record is not installed."""


def triton_folder(version: str) -> str:
    """Return the folder to import this Triton from; "" for the environment's own. Raises Missing."""
    folders = [*os.environ.get("RLKERNELS_OTHER_TRITON", "").split(os.pathsep), str(ROOT / f"build/triton-{version}")]
    for folder in ["", *filter(None, folders)]:
        distributions = importlib.metadata.distributions(name="triton", path=[folder] if folder else sys.path)
        if any(distribution.version == version for distribution in distributions):
            return folder
    target = f"build/triton-{version}"
    raise Missing(f"Triton {version} is not here: pip install --no-deps --target {target} triton=={version}")


class Compilers:
    """The Triton and nvcc of a record, and their results for the present code."""

    def __init__(self, record: dict[str, Any]):
        device = record["device"]
        self.arch = device["capability"].replace(".", "")
        self.nvcc = record["nvcc"]
        self.triton = device["triton"]
        self._answers: dict[str, dict[str, Any]] = {"compile": {}, "count": {}}

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with the record's Triton and the tests' modules."""
        paths = [triton_folder(self.triton), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "RLKERNELS_OTHER_TRITON": ""}
        env.pop("TRITON_INTERPRET", None)
        return subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True)

    def ask(self, command: str, pairs: list[str]) -> dict[str, Any]:
        """Return the answers of ``ptx.proof``, which is asked once for each pair."""
        answers = self._answers[command]
        if missing := [pair for pair in pairs if pair not in answers]:
            if any(pair.endswith(":cuda") for pair in missing) and self.nvcc != (installed := nvcc_version()):
                raise Missing(f"nvcc {self.nvcc} is not here, but {installed}")
            process = self.python("-m", "ptx.proof", command, self.arch, *missing)
            if process.returncode:
                raise RuntimeError(f"the present code does not compile: {process.stderr[-3000:]}")
            answers |= json.loads(process.stdout)
        return answers

    def compile(self, pairs: list[str]) -> dict[str, Any]:
        """Return PTX, launches and waits of the timed cases, by "op:backend"."""
        return self.ask("compile", pairs)

    def count(self, pairs: list[str]) -> dict[str, Counts]:
        """Return all counts, by "op:backend"; ``wrong`` in place of the counts of a wrong result."""
        return self.ask("count", pairs)

    def test(self) -> str:
        """Run the tests of the compiled kernels; return the last line if one fails."""
        process = self.python("-m", "pytest", "-q", "-m", "not slow", *TESTS)
        return "" if process.returncode == 0 else (process.stdout + process.stderr).strip().splitlines()[-1]


def compare(counts: Counts, recorded: Counts) -> Iterator[str]:
    """Yield the counts that are worse than in a record."""
    for name in ("launches", "waits"):
        if counts[name] > recorded[name]:
            yield f"{name} {counts[name]}, {recorded[name]} in the record"
    has_fewer_launches = counts["launches"] < recorded["launches"]
    for name in ("instructions", "bytes") if "instructions" in counts else ():
        only_recorded = has_fewer_launches and recorded[name].keys() <= counts[name].keys()
        kernels = recorded[name] if only_recorded else counts[name]
        total = sum(counts[name][kernel] for kernel in kernels)
        limit = sum(recorded[name].values())
        if total > limit * (1 + (TAKEN_OVER if has_fewer_launches else MAX_COUNT_GROWTH)):
            rises = {kernel: count - recorded[name].get(kernel, 0) for kernel, count in counts[name].items()}
            yield f"{max(rises, key=rises.__getitem__)}: {name} {total:,} in all, {limit:,} in the record"
    for kernel, resources in counts.get("ptxas", {}).items():
        # the limit of a new kernel is the largest need in the record
        recorded_kernels = [recorded["ptxas"][kernel]] if kernel in recorded["ptxas"] else recorded["ptxas"].values()
        for name, value in resources.items():
            sign = -1 if name == "blocks per SM" else 1
            limit = max(
                (kernel_resources[name] for kernel_resources in recorded_kernels), key=lambda number: sign * number
            )
            if sign * value > sign * limit:
                yield f"{kernel}: {name} {value:,}, {limit:,} in the record"


def changed_kernels(kernels: Kernels, recorded: Kernels) -> list[str]:
    """Return the launched kernels that were not proved."""
    return [name for name, ptx in kernels.items() if ptx not in recorded.values()]


class Check:
    """Check whether records are valid; compile and count each kernel once."""

    def __init__(self, make: type[Compilers] = Compilers):
        self.make = make
        self.compilers: dict[tuple[str, ...], Compilers] = {}
        self.failures: dict[Compilers, str] = {}

    def prepare(self, verdicts: list[tuple[Path, dict[str, Any], str]]) -> None:
        """Compile, then count, for all these (path, record, op) together."""
        compiled: dict[Compilers, list[str]] = {}
        verdicts = [(path, record, op) for path, record, op in verdicts if op in read_code(path)]
        for _, record, op in verdicts:
            compiled.setdefault(self.of(record), []).extend(pairs(record, op))
        for compilers, names in compiled.items():
            compilers.compile(list(dict.fromkeys(names)))
        counted: dict[Compilers, list[str]] = {}
        for path, record, op in verdicts:
            code = read_code(path)
            compilers = self.of(record)
            for pair in pairs(record, op) if record["verdicts"][op]["backend"] != "torch" else ():
                recorded = code.get(op, {}).get(pair.split(":")[1], {})
                result = compilers.compile([pair])[pair]
                if recorded and pair in record.get("counts", {}) and changed_kernels(result["kernels"], recorded):
                    counted.setdefault(compilers, []).append(pair)
        for compilers, names in counted.items():
            compilers.count(list(dict.fromkeys(names)))

    def of(self, record: dict[str, Any]) -> Compilers:
        compilers = self.make(record)
        return self.compilers.setdefault((compilers.arch, compilers.triton, compilers.nvcc), compilers)

    def objections(self, record: dict[str, Any], code: Code, op: str) -> tuple[list[str], str]:
        """Return the reasons why a verdict is invalid, and a remark on a valid one."""
        compilers = self.of(record)
        reasons = list[str]()
        remark = ""
        for pair in pairs(record, op):
            backend = pair.split(":")[1]
            if backend not in code.get(op, {}):
                reasons.append(f"{backend}: the record has no PTX of it: prove it again")
                continue
            result, recorded = compilers.compile([pair])[pair], record.get("counts", {}).get(pair)
            changed = changed_kernels(result["kernels"], code[op][backend])
            change = f"{', '.join(changed)} changed"
            if record["verdicts"][op]["backend"] == "torch":
                is_less = recorded and any(result[name] < recorded[name] for name in ("launches", "waits"))
                if changed or is_less:
                    reason = change if changed else "launches or waits less"
                    reasons.append(f"{backend}: {reason}, and may be faster now")
                continue
            if changed and recorded is None:
                reasons.append(f"{backend}: {change}, and the record was not counted")
            elif changed:
                counts = compilers.count([pair])[pair]
                if "wrong" in counts:
                    reasons.append(f"{backend}: {change}: wrong: {counts['wrong']}")
                elif worse_counts := [*compare(counts, recorded)]:
                    reasons.append(f"{backend}: {change}: {'; '.join(worse_counts)}")
                elif failure := self.failure(compilers):
                    reasons.append(f"{backend}: {change}: tests/ptx: {failure}")
                else:
                    remark = f"{backend}: {change}, no count is worse, tests/ptx pass"
            elif recorded and (worse_counts := [*compare(result, recorded)]):
                reasons.append(f"{backend}: {'; '.join(worse_counts)}")
        return reasons, remark

    def objections_to(self, backend: str, path: Path, record: dict[str, Any], op: str) -> list[str]:
        """Return the reasons why a record does not show this backend, whichever it chose."""
        chosen = record | {"verdicts": {op: record["verdicts"][op] | {"backend": backend}}}
        return [f"{reason}, in {path.name}" for reason in self.objections(chosen, read_code(path), op)[0]]

    def failure(self, compilers: Compilers) -> str:
        """Run the tests once; return the last line if one fails."""
        if compilers not in self.failures:
            self.failures[compilers] = compilers.test()
        return self.failures[compilers]


def pairs(record: dict[str, Any], op: str) -> list[str]:
    """Return "op:backend" for the winner of a verdict, or for all that lost to torch; for each row with ":shape"."""
    verdict = record["verdicts"][op]
    backends = verdict["candidates"] if verdict["backend"] == "torch" else [verdict["backend"]]
    shapes = [f":{shape}" for shape in verdict.get("shapes", ())] or [""]
    return [] if OPS[op].like else [f"{op}:{backend}{shape}" for backend in backends for shape in shapes]


def losses(verdict: dict[str, Any]) -> list[str]:
    """Return why candidates lost."""
    return [f"{backend}: {entry['reason']}" for backend, entry in verdict["candidates"].items() if entry["reason"]]


def is_decided(verdict: dict[str, Any]) -> bool:
    """Return whether a kernel of ours won, or all were wrong or no faster."""
    return verdict["backend"] != "torch" or all(
        not entry["cases"] or any(case["interval"][0] >= WIN for case in entry["cases"].values())
        for entry in verdict["candidates"].values()
    )


class Asked(Exception):
    """A call has asked ``auto``."""


def asked_name(op: str, shape: str) -> str:
    """Return the name by which a case of ``bench.gpu`` asks for a backend: that of its op, or of a regime."""
    if not OPS[op].regimes:
        return op
    names = []

    def choose(name: str, *_: Any) -> str:
        names.append(name)
        raise Asked

    (case,) = (case for case in LARGE if (case.op, case.label) == (op, shape))
    with patch.object(_backend, "choose", choose), contextlib.suppress(Asked):
        case.make(torch.device("meta")).call("auto")
    return names[0]


def rows_of(path: Path) -> dict[str, Any]:
    """Return the rows of a session in the form of a proof's record: times of the backends over torch's, by shape."""
    entries = read(path)
    facts = {entry["kind"]: entry for entry in entries}
    verdicts: dict[str, dict[str, Any]] = {}
    for kind, figure in FIGURES.items() if "capability" in facts.get("device", {}) else ():
        seconds: dict[tuple[str, str], dict[str, float | None]] = {}  # None: wrong, or it did not run
        for entry in entries:
            if entry["kind"] == kind and "ok" in entry and entry["op"] in OPS and not OPS[entry["op"]].like:
                times = seconds.setdefault((entry["op"], entry["shape"]), {})
                times[entry["provider"]] = entry.get(figure) if entry["ok"] else None
        for (op, shape), times in seconds.items():
            backends = [backend for backend in OPS[op].backends if backend in times]
            plain = times.get("torch")
            if not backends or not plain:
                continue
            name = asked_name(op, shape)
            verdict = verdicts.setdefault(name, {"date": facts["call"]["date"], "candidates": {}, "shapes": []})
            verdict["shapes"] = list(dict.fromkeys([*verdict["shapes"], shape]))
            for backend in backends:
                candidate = verdict["candidates"].setdefault(backend, {"reason": "", "cases": {}})
                if (time := times[backend]) is None:
                    candidate["reason"] = f"wrong, or no time, in {shape}"
                else:
                    candidate["cases"][shape] = {"ratio": time / plain, "interval": [time / plain] * 2}
    for verdict in verdicts.values():
        verdict["backend"] = fastest(verdict["candidates"])
    counts = {entry["pair"]: entry["counts"] for entry in entries if entry["kind"] == "counts"}
    return {"device": facts.get("device", {}), "nvcc": None, "verdicts": verdicts, "counts": counts}


def load(paths: Iterable[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Load records of proofs (.json) and of rows (.jsonl)."""
    return [(path, rows_of(path) if path.suffix == ".jsonl" else json.loads(path.read_text())) for path in paths]


def merge(verdicts: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the candidates of verdicts on one op, each with the cases of all."""
    candidates: dict[str, dict[str, Any]] = {}
    for verdict in verdicts:
        for backend, entry in verdict["candidates"].items():
            merged = candidates.setdefault(backend, {"reason": "", "cases": {}})
            merged["reason"] = merged["reason"] or entry["reason"]
            merged["cases"] |= entry["cases"]
    return candidates


def paths_of(folder: Path) -> list[Path]:
    """Return the records of a folder."""
    return [*sorted(folder.glob("*-prove.json")), *sorted(folder.glob("*.jsonl"))]


def compose(paths: list[Path], check: Check) -> tuple[dict[str, Any], list[str]]:
    """Return the content of rlkernels/records.json, and remarks on the checked verdicts.

    Raises:
        Missing: a compiler is not installed.
        RuntimeError: the present code does not compile.
    """
    newest_first: dict[tuple[str, str], list[tuple[str, Path, dict[str, Any]]]] = {}
    for path, record in load(paths):
        for op, verdict in record["verdicts"].items():
            if not OPS[op].like:
                date = verdict["date"] if is_decided(verdict) else ""
                newest_first.setdefault((record["device"]["capability"], op), []).append((date, path, record))
    for entries in newest_first.values():
        entries.sort(key=lambda entry: entry[0], reverse=True)
    check.prepare([(path, record, op) for (_, op), entries in newest_first.items() for _, path, record in entries[:2]])
    backends: dict[str, dict[str, str]] = {}
    used = set[str]()
    remarks = []
    for (capability, op), entries in newest_first.items():
        counted: dict[str, tuple[Path, dict[str, Any]]] = {}  # by suffix: the newest valid proof, the newest rows
        proved = None  # what that proof chose
        for _, path, record in entries:
            if path.suffix in counted:
                continue
            verdict = record["verdicts"][op]
            reasons, remark = ([], "") if path.suffix == ".jsonl" else check.objections(record, read_code(path), op)
            remarks += [f"{path.name}, {op} {text}" for text in [*reasons, remark, *losses(verdict)] if text]
            if not reasons:
                counted[path.suffix] = path, record
                proved = verdict["backend"] if path.suffix == ".json" else proved
        candidates = merge(record["verdicts"][op] for _, record in counted.values())
        is_shown = True  # False: a kernel won whose present code may be another
        while (best := fastest(candidates)) not in ("torch", proved):
            reasons = [
                reason for path, record in counted.values() for reason in check.objections_to(best, path, record, op)
            ]
            if not reasons:
                break
            remarks += [f"{op} {reason}" for reason in reasons]
            candidates[best]["reason"] = reasons[0]
            is_shown = False
        if counted and (is_shown or best != "torch"):
            backends.setdefault(capability, {})[op] = best
            used.update(path.name for path, _ in counted.values())
    return {"backends": backends, "records": sorted(used)}, remarks


def count_unchanged(paths: list[Path], check: Check) -> None:
    """Write the counts of the present code into records of the same code without counts, as limits for later code."""
    for path, record in load(paths):
        code = read_code(path)
        counts = record.setdefault("counts", {})
        for pair in (pair for op in record["verdicts"] for pair in pairs(record, op) if pair not in counts):
            op, backend = pair.split(":")[:2]
            recorded = code.get(op, {}).get(backend)
            compilers = check.of(record)
            if recorded and not changed_kernels(compilers.compile([pair])[pair]["kernels"], recorded):
                print(f"{path.name}: counting {pair}", flush=True)
                result = compilers.count([pair])[pair]
                if "wrong" in result:
                    raise RuntimeError(f"{pair} is wrong: {result['wrong']}")
                counts[pair] = result
                if path.suffix == ".jsonl":
                    with path.open("a") as file:
                        file.write(line({"kind": "counts", "pair": pair, "counts": result}))
                else:
                    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Write rlkernels/records.json and return the exit code."""
    argparse.ArgumentParser(
        prog="python -m bench.gpu.records", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    check = Check()
    paths = paths_of(RECORDS)
    try:
        result, remarks = compose(paths, check)
        count_unchanged(paths, check)
    except RuntimeError as error:
        print(f"bench.gpu.records: {error}", file=sys.stderr)
        return 2
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join([*remarks, ""]), end="")
    print(f"{RESULT.relative_to(ROOT)}: {result['backends'] or 'nothing'} from {result['records'] or 'no records'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
