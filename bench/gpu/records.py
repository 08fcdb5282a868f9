"""``python -m bench.gpu.records``: from the records of proofs to what ``auto`` takes where nobody has proved yet.

Reads ``bench/gpu/records/*-prove.json``, which ``python -m rlkernels prove --record`` writes, and writes
rlkernels/records.json, which a wheel holds. For each compute capability and op the newest record counts that stands.

A record stands while its compilers make of the present code the PTX that was proved, names and lines apart. Other PTX
stands for it if the tests of tests/ptx pass and no count is worse: launches, waits of the host, instructions, bytes,
registers, spills, shared memory, blocks per SM. torch's kernels count as launches only: a kernel that joins the others
and leaves fewer launches did torch's work. Where torch won, only the same code stands: other code may be faster.
A record in which torch was kept because the times could not be told apart leaves an earlier verdict: another machine,
or its host, does not take back what was proved.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu.journal import RECORDS, ROOT
from rlkernels.backend import OPS
from rlkernels.proof import WIN
from rlkernels.proof.compiled import Code, Kernels, nvcc_version, read_code

RESULT = ROOT / "rlkernels/records.json"
TESTS = ["tests/ptx/test_kernels.py", "tests/ptx/test_dtw_cuda.py"]
# of an instruction count: the last bits of random inputs differ between processors, and loops end by them
ROUNDING = 1e-3
TAKEN_OVER = 1e-2  # of the same, what torch's kernels did before, which are not counted: where fewer launches are left
Counts = dict[str, Any]


class Missing(RuntimeError):
    """A compiler that a record is of is not here."""


def triton_folder(version: str) -> str:
    """Return the folder to import this Triton from; "" for the environment's own. Raises Missing."""
    folders = [*os.environ.get("RLKERNELS_OTHER_TRITON", "").split(os.pathsep), str(ROOT / f"build/triton-{version}")]
    for folder in ["", *filter(None, folders)]:
        found = importlib.metadata.distributions(name="triton", path=[folder] if folder else sys.path)
        if any(distribution.version == version for distribution in found):
            return folder
    where = f"build/triton-{version}"
    raise Missing(f"Triton {version} is not here: pip install --no-deps --target {where} triton=={version}")


class Compilers:
    """The Triton and nvcc of a record, and what they make of the present code."""

    def __init__(self, record: dict[str, Any]):
        device = record["device"]
        self.arch, self.nvcc, self.triton = device["capability"].replace(".", ""), record["nvcc"], device["triton"]
        self._compiled: dict[str, Any] = {}
        self._counted: dict[str, Counts] = {}

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with the record's Triton and the tests' modules."""
        paths = [triton_folder(self.triton), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "RLKERNELS_OTHER_TRITON": ""}
        env.pop("TRITON_INTERPRET", None)
        return subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True)

    def ask(self, command: str, pairs: list[str]) -> dict[str, Any]:
        """Return what ``ptx.proof`` answers."""
        if any(pair.endswith(":cuda") for pair in pairs) and self.nvcc != (here := nvcc_version()):
            raise Missing(f"nvcc {self.nvcc} is not here, but {here}")
        done = self.python("-m", "ptx.proof", command, self.arch, *pairs)
        if done.returncode:
            raise RuntimeError(f"the present code does not compile: {done.stderr[-3000:]}")
        return json.loads(done.stdout)

    def compile(self, pairs: list[str]) -> dict[str, Any]:
        """Return PTX, launches and waits of the timed cases, by "op:backend"."""
        if left := [pair for pair in pairs if pair not in self._compiled]:
            self._compiled |= self.ask("compile", left)
        return self._compiled

    def count(self, pairs: list[str]) -> dict[str, Counts]:
        """Return all counts, by "op:backend"; ``wrong`` in place of them where a result is wrong."""
        if left := [pair for pair in pairs if pair not in self._counted]:
            self._counted |= self.ask("count", left)
        return self._counted

    def test(self) -> str:
        """Run the tests of the compiled kernels; return the last line if one fails."""
        done = self.python("-m", "pytest", "-q", "-m", "not slow", *TESTS)
        return "" if done.returncode == 0 else (done.stdout + done.stderr).strip().splitlines()[-1]


def compare(now: Counts, before: Counts) -> Iterator[str]:
    """Yield what is worse than in a record."""
    for name in ("launches", "waits"):
        if now[name] > before[name]:
            yield f"{name} {now[name]}, {before[name]} in the record"
    fewer = now["launches"] < before["launches"]
    for name in ("instructions", "bytes") if "instructions" in now else ():
        known = before[name] if fewer and before[name].keys() <= now[name].keys() else now[name]
        total, limit = sum(now[name][kernel] for kernel in known), sum(before[name].values())
        if total > limit * (1 + (TAKEN_OVER if fewer else ROUNDING)):
            rises = {kernel: count - before[name].get(kernel, 0) for kernel, count in now[name].items()}
            yield f"{max(rises, key=rises.__getitem__)}: {name} {total:,} in all, {limit:,} in the record"
    for kernel, found in now.get("ptxas", {}).items():
        # another kernel may need what the neediest needed
        known = [before["ptxas"][kernel]] if kernel in before["ptxas"] else before["ptxas"].values()
        for name, value in found.items():
            sign = -1 if name == "blocks per SM" else 1
            limit = max((counts[name] for counts in known), key=lambda number: sign * number)
            if sign * value > sign * limit:
                yield f"{kernel}: {name} {value:,}, {limit:,} in the record"


def changed_kernels(now: Kernels, before: Kernels) -> list[str]:
    """Return the kernels that are launched now and were not proved."""
    return [name for name, ptx in now.items() if ptx not in before.values()]


class Check:
    """Whether records stand. Compiles and counts what is needed, once."""

    def __init__(self, make: type[Compilers] = Compilers):
        self.make = make
        self.compilers: dict[tuple[str, ...], Compilers] = {}
        self.failures: dict[Compilers, str] = {}

    def prepare(self, verdicts: list[tuple[Path, dict[str, Any], str]]) -> None:
        """Compile, then count, for all these (path, record, op) at a time."""
        compiled: dict[Compilers, list[str]] = {}
        for _, record, op in verdicts:
            compiled.setdefault(self.of(record), []).extend(pairs(record, op))
        for compilers, names in compiled.items():
            compilers.compile(list(dict.fromkeys(names)))
        counted: dict[Compilers, list[str]] = {}
        for path, record, op in verdicts:
            code, compilers = read_code(path), self.of(record)
            for pair in pairs(record, op) if record["verdicts"][op]["backend"] != "torch" else ():
                before, now = code.get(op, {}).get(pair.partition(":")[2], {}), compilers.compile([pair])[pair]
                if before and pair in record.get("counts", {}) and changed_kernels(now["kernels"], before):
                    counted.setdefault(compilers, []).append(pair)
        for compilers, names in counted.items():
            compilers.count(list(dict.fromkeys(names)))

    def of(self, record: dict[str, Any]) -> Compilers:
        made = self.make(record)
        return self.compilers.setdefault((made.arch, made.triton, made.nvcc), made)

    def objections(self, record: dict[str, Any], code: Code, op: str) -> tuple[list[str], str]:
        """Return why a verdict does not stand, empty if it does, and a remark on one that does."""
        compilers, against, remark = self.of(record), list[str](), ""
        for pair in pairs(record, op):
            backend = pair.partition(":")[2]
            now, before = compilers.compile([pair])[pair], record.get("counts", {}).get(pair)
            if backend not in code.get(op, {}):
                against.append(f"{backend}: the record has no PTX of it: prove it again")
                continue
            changed = changed_kernels(now["kernels"], code[op][backend])
            what = f"{', '.join(changed)} changed"
            if record["verdicts"][op]["backend"] == "torch":
                moved = before and any(now[name] != before[name] for name in ("launches", "waits"))
                if changed or moved:
                    against.append(f"{backend}: {what if changed else 'its launches changed'}, and may be faster now")
                continue
            if changed and before is None:
                against.append(f"{backend}: {what}, and the record was not counted")
            elif changed:
                counts = compilers.count([pair])[pair]
                if "wrong" in counts:
                    against.append(f"{backend}: {what}: wrong: {counts['wrong']}")
                elif worse := [*compare(counts, before)]:
                    against.append(f"{backend}: {what}: {'; '.join(worse)}")
                elif failure := self.failure(compilers):
                    against.append(f"{backend}: {what}: tests/ptx: {failure}")
                else:
                    remark = f"{backend}: {what}, no count is worse, tests/ptx pass"
            elif before and (worse := [*compare(now, before)]):
                against.append(f"{backend}: {'; '.join(worse)}")
        return against, remark

    def failure(self, compilers: Compilers) -> str:
        """Run the tests once."""
        if compilers not in self.failures:
            self.failures[compilers] = compilers.test()
        return self.failures[compilers]


def pairs(record: dict[str, Any], op: str) -> list[str]:
    """Return "op:backend" of what a verdict rests on: the winner, or all that lost to torch."""
    verdict = record["verdicts"][op]
    backends = verdict["candidates"] if verdict["backend"] == "torch" else [verdict["backend"]]
    return [] if OPS[op].like else [f"{op}:{backend}" for backend in backends]


def is_decided(verdict: dict[str, Any]) -> bool:
    """Tell whether a kernel of ours won, or all were wrong or no faster."""
    return verdict["backend"] != "torch" or all(
        not entry["cases"] or any(case["interval"][0] >= WIN for case in entry["cases"].values())
        for entry in verdict["candidates"].values()
    )


def load(paths: list[Path]) -> list[tuple[Path, dict[str, Any]]]:
    return [(path, json.loads(path.read_text())) for path in paths]


def compose(paths: list[Path], check: Check) -> tuple[dict[str, Any], list[str]]:
    """Return what rlkernels/records.json should hold, and remarks on the verdicts that were checked.

    Raises:
        Missing: a compiler is not here.
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
    check.prepare([(*entries[0][1:], op) for (_, op), entries in newest_first.items()])
    backends: dict[str, dict[str, str]] = {}
    used, remarks = set(), []
    for (capability, op), entries in newest_first.items():
        for _, path, record in entries:
            verdict = record["verdicts"][op]
            against, remark = check.objections(record, read_code(path), op)
            lost = [f"{who}: {entry['reason']}" for who, entry in verdict["candidates"].items() if entry["reason"]]
            remarks += [f"{path.name}, {op} {text}" for text in [*against, remark, *lost] if text]
            if not against:
                backends.setdefault(capability, {})[op] = verdict["backend"]
                used.add(path.name)
                break
    return {"backends": backends, "records": sorted(used)}, remarks


def count_unchanged(paths: list[Path], check: Check) -> None:
    """Write the counts of the present code into records of the same code that lack them: later code is held to them."""
    for path, record in load(paths):
        code, counts, compilers = read_code(path), record.setdefault("counts", {}), check.of(record)
        for pair in (pair for op in record["verdicts"] for pair in pairs(record, op) if pair not in counts):
            op, _, backend = pair.partition(":")
            before = code.get(op, {}).get(backend)
            if before and not changed_kernels(compilers.compile([pair])[pair]["kernels"], before):
                print(f"{path.name}: counting {pair}", flush=True)
                found = compilers.count([pair])[pair]
                if "wrong" in found:
                    raise RuntimeError(f"{pair} is wrong: {found['wrong']}")
                counts[pair] = found
                path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Write rlkernels/records.json -> exit code."""
    argparse.ArgumentParser(
        prog="python -m bench.gpu.records", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    check, paths = Check(), sorted(RECORDS.glob("*-prove.json"))
    try:
        found, remarks = compose(paths, check)
        count_unchanged(paths, check)
    except RuntimeError as error:
        print(f"bench.gpu.records: {error}", file=sys.stderr)
        return 2
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join([*remarks, ""]), end="")
    print(f"{RESULT.relative_to(ROOT)}: {found['backends'] or 'nothing'} from {found['records'] or 'no records'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
