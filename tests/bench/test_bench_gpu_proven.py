"""From records of a GPU to what ``auto`` takes on one."""

import copy
import json

import pytest
import torch

import rlkernels.backend
from bench.gpu import proven
from bench.gpu.cases import CASES, TESTS
from bench.gpu.plan import MODEL_OPS, SANITIZED, SANITIZERS
from rlkernels.backend import OPS, choose

OP = "grouped_attention"
CUDA = torch.device("cuda")


def row(op, provider, shape, seconds, **more):
    return {"kind": "row", "of": "time", "op": op, "provider": provider, "shape": shape, "ok": True,
            "median_s": seconds, **more}  # fmt: skip


def a_record(op=OP, backend="triton", date="2026-01-02", capability="9.0"):
    """Of a GPU on which a backend of an op has won everything."""
    entries = [
        {
            "kind": "call",
            "gpu": "NVIDIA X",
            "commit": "abc",
            "date": date,
            "sanitizer": True,
            "sources": proven.sources(),
        },
        {"kind": "device", "ok": True, "capability": capability},
    ]
    for case in CASES:
        if case.op == op and not case.timed:
            entries.append({"kind": "check", "op": op, "case": case.label, "backend": backend, "ok": True})
        elif case.op == op:
            times = {backend: 1.0, "torch": 2.0, "torch SDPA": 1.5}
            entries += [row(op, name, case.label, seconds) for name, seconds in times.items()]
            entries.append({"kind": "done", "job": f"time {op}: {case.label}"})
    entries += [{"kind": "tests", "file": file, "ok": True} for file in TESTS[op]]
    for part in MODEL_OPS:
        entries += [{**row(part, who, who, s), "of": "model"} for who, s in (("default", 3.0), ("triton", 2.0))]
    (group,) = (group for group, ops in SANITIZED.items() if op in ops)
    entries += [{"kind": "sanitize", "op": group, "case": t, "ok": True, "message": "clean"} for t in SANITIZERS]
    return [*entries, {"kind": "end", "left_s": 300.0}]


def test_a_backend_that_wins_everything_is_proven():
    assert proven.passed(a_record()) == {OP: ("triton",)}
    assert proven.passed(a_record("dtw", "cuda")) == {"dtw": ("cuda",)}


def first(entries, kind, **values):
    return next(e for e in entries if e["kind"] == kind and all(e.get(k) == v for k, v in values.items()))


def in_a_model(entries):
    return first(entries, "row", of="model", op="train", provider="triton")


@pytest.mark.parametrize(("change", "why"), [
    (lambda e: e.remove(first(e, "check")), "not done"),
    (lambda e: first(e, "check").update(ok=False), "wrong"),
    (lambda e: e.remove(first(e, "done")), "not timed to its end"),
    (lambda e: e.remove(first(e, "row", provider="triton")), "wrong"),
    (lambda e: first(e, "row", provider="triton").update(ok=False), "wrong"),
    (lambda e: first(e, "row", provider="triton").update(ok=False, missing="hung for 60 s"), "hung for 60 s"),
    (lambda e: first(e, "row", provider="torch").update(median_s=0.9), "1.11 times as long as torch"),
    (lambda e: first(e, "row", provider="torch SDPA").update(median_s=0.5), "2.00 times as long as torch SDPA"),
    (lambda e: e.remove(first(e, "tests")), "not run"),
    (lambda e: first(e, "tests").update(ok=False), "failed"),
    (lambda e: first(e, "sanitize").update(ok=False, message="exit code 9: 1 error"), "exit code 9: 1 error"),
    (lambda e: e.remove(first(e, "sanitize", case="racecheck")), "racecheck: not run"),
    (lambda e: in_a_model(e).update(median_s=6.0), "2.00 times as long as the default"),
    (lambda e: e.remove(in_a_model(e)), "model, train: not measured"),
    (lambda e: [e.remove(r) for r in list(e) if r.get("provider", "")[:5] == "torch"], "nobody to compare with"),
])  # fmt: skip
def test_what_keeps_a_backend_from_being_proven(change, why):
    entries = copy.deepcopy(a_record())
    change(entries)
    assert proven.passed(entries) == {}
    assert {why in reason for reason in proven.objections(entries, OP, "triton")} == {True}


@pytest.mark.parametrize("values", [{"sanitizer": False}, {"left_s": 20.0}])
def test_where_the_sanitizer_could_not_run_it_is_said(records, values):
    """Where it is not installed, or the time was up before its turn."""
    entries = [{**e, **{k: v for k, v in values.items() if k in e}} for e in a_record() if e["kind"] != "sanitize"]
    assert records("a", entries)["won"] == {"9.0": {OP: ["triton"]}}
    _, complaints = proven.compose(sorted(proven.RECORDS.glob("*.jsonl")))
    assert f"9.0 {OP} triton: proven, but not sanitized by memcheck, racecheck" in complaints
    records("a", a_record())
    _, complaints = proven.compose(sorted(proven.RECORDS.glob("*.jsonl")))
    assert not [line for line in complaints if OP in line]


def test_a_rival_that_is_wrong_or_missing_need_not_be_beaten():
    entries = a_record()
    rival = first(entries, "row", provider="torch SDPA")
    rival.update(ok=False, median_s=None, missing="no such package")
    assert proven.passed(entries) == {OP: ("triton",)}


def test_the_default_that_does_not_fit_is_beaten():
    entries = a_record()
    default = first(entries, "row", of="model", op="train", provider="default")
    default.update(ok=False, median_s=None, missing="OutOfMemoryError: CUDA out of memory")
    assert proven.passed(entries) == {OP: ("triton",)}


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Writes records -> what comes of all that were written."""
    monkeypatch.setattr(proven, "RECORDS", tmp_path)

    def write(name, entries):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
        return proven.compose(sorted(tmp_path.glob("*.jsonl")))[0]

    return write


def test_the_newest_record_of_the_present_source_decides(records):
    assert records("a", a_record()) == {"won": {"9.0": {OP: ["triton"]}}, "records": ["a.jsonl"]}
    assert records("b", a_record("dtw", "cuda", "2026-01-01", "8.0"))["won"] == {"9.0": {OP: ["triton"]},
                                                                              "8.0": {"dtw": ["cuda"]}}  # fmt: skip
    lost = a_record(date="2026-01-03")
    first(lost, "tests").update(ok=False)
    assert OP not in records("c", lost)["won"].get("9.0", {})
    # of other code: neither for nor against
    for entry in lost:
        if "sources" in entry:
            entry["sources"] = {OP: {"triton": "0"}}
    assert records("c", lost)["won"]["9.0"] == {OP: ["triton"]}
    changed = a_record()
    changed[0]["sources"][OP]["triton"] = "0"
    assert OP not in records("a", changed)["won"].get("9.0", {})


def test_the_source_is_what_is_compiled(tmp_path, monkeypatch):
    folder = tmp_path / "rlkernels" / "prefix_cache"
    folder.mkdir(parents=True)
    monkeypatch.setattr(proven, "ROOT", tmp_path)
    (folder / "__init__.py").write_text("def op():\n    from rlkernels.prefix_cache import kernels")
    (folder / "kernels.py").write_text("import triton\nimport rlkernels.prefix_cache.sizes")
    (folder / "beside.py").write_text("")

    def written(text):
        (folder / "sizes.py").write_text(text)
        return proven.source(OP, "triton")

    plain = written("x = 1")
    assert written("x = (1)  # as before\n") == written('"""Of what."""\nx = 1') == plain != written("x = 2")
    assert {path.stem for path in proven.files(OP, "triton")} == {"__init__", "kernels", "sizes"}


def test_the_source_of_a_cuda_op_is_all_that_registers_and_launches_it():
    found = {path.relative_to(proven.ROOT).as_posix() for path in proven.files("dtw", "cuda")}
    assert {"csrc/ops/similarity_cuda.cpp", "csrc/cuda/dtw.cu", "csrc/include/dtw_lane.h", "setup.py"} <= found
    assert {"rlkernels/similarity/alignment.py", "rlkernels/similarity/gpu.py"} <= found
    assert "rlkernels/similarity/triton_kernels.py" not in found
    assert proven.without_comments("a; // b\nc /* d\n*/  e") == "a; c e"


def test_what_the_package_says_is_what_the_records_say():
    """Run ``python -m bench.gpu.proven`` where this fails."""
    found, _ = proven.compose(sorted(proven.RECORDS.glob("*.jsonl")))
    assert json.loads(proven.RESULT.read_text()) == found
    assert found["won"] == rlkernels.backend.PROVEN


def test_auto_takes_what_won_on_this_architecture(monkeypatch):
    monkeypatch.setattr(rlkernels.backend, "PROVEN", {"9.0": {OP: ["triton"]}})
    assert choose(OP, CUDA) == "torch"  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for major, expected in ((9, "triton"), (8, "torch")):
        properties = type("Properties", (), {"major": major, "minor": 0})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert choose(OP, CUDA) == expected and choose("dtw", CUDA) == "torch"
        assert choose(OP, torch.device("cpu")) == "cpu"
    monkeypatch.setitem(OPS, OP, OPS[OP].__class__(triton=True, proven=()))
    assert choose(OP, CUDA) == "torch"


def test_records_must_be_of_this_device_and_commit(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in a_record()))
    assert len(proven.read_record(path, "NVIDIA X", "abc")) > 5
    for device, commit in (("NVIDIA Y", "abc"), ("NVIDIA X", "abd")):
        with pytest.raises(ValueError, match="is of NVIDIA X at abc, not of"):
            proven.read_record(path, device, commit)
    for text, message in (("{\n{}", "line 1"), ("[]\n", "is no entry"), ('{"kind": "row"}\n', "is no record"),
                          ("", "is empty")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            proven.read_record(path, "NVIDIA X", "abc")
