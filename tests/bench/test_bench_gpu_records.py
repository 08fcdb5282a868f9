"""From the records of proofs to what ``auto`` takes on a GPU that nobody proved on."""

import json
import shutil
from types import SimpleNamespace

import pytest
from support import lacks

from bench.gpu import records
from bench.gpu.records import Check, Compilers, Missing, compare, compose, count_unchanged, is_decided
from rlkernels import backend
from rlkernels.proof import write_record

OP, PAIR = "grouped_attention", "grouped_attention:triton"
CODE = {"_query_kernel": "mov;", "_key_kernel": "add;"}
PTXAS = {"registers": 128, "spilled bytes": 0, "shared bytes": 49_152, "blocks per SM": 2}
COUNTS = {
    "launches": 4, "waits": 1, "instructions": {"_query_kernel": 10_000, "_key_kernel": 20_000},
    "bytes": {"_query_kernel": 1000, "_key_kernel": 0}, "ptxas": {"_query_kernel": PTXAS, "_key_kernel": PTXAS},
}  # fmt: skip


def result(op=OP, chosen="triton", date="2026-01-02", capability="9.0", reason=""):
    entry = {"reason": reason, "wins": not reason, "cases": {}}
    ours = "triton" if chosen == "torch" else chosen
    verdict = {"op": op, "backend": chosen, "workload": "w", "date": date, "candidates": {ours: entry}}
    device = {"gpu": "NVIDIA X", "capability": capability, "triton": "3.6.0"}
    return {"device": device, "verdicts": {op: verdict}, "left_out": {}}


class Machine:
    """Compilers, as far as the check of records asks them: ``now`` is the present code, ``counts`` what it needs."""

    def __init__(self):
        self.now, self.counts, self.failure = dict(CODE), json.loads(json.dumps(COUNTS)), ""

    def __call__(self, record):
        self.arch, self.triton, self.nvcc = record["device"]["capability"], record["device"]["triton"], record["nvcc"]
        return self

    def compile(self, pairs):
        launches = {name: self.counts[name] for name in ("launches", "waits")}
        return {pair: {"kernels": self.now, **launches} for pair in pairs}

    def count(self, pairs):
        return dict.fromkeys(pairs, self.counts)

    def test(self):
        return self.failure


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def composed(tmp_path, machine):
    """Writes records by name -> what comes of all that were written."""

    def write(name, found, code=CODE):
        path = tmp_path / f"{name}-prove.json"
        ((op, verdict),) = found["verdicts"].items()
        write_record(path, found, {op: dict.fromkeys(verdict["candidates"], code)} if code else {})
        return again()

    def again():
        return compose(sorted(tmp_path.glob("*-prove.json")), Check(machine))

    write.again, write.folder = again, tmp_path
    return write


def test_the_newest_record_that_stands_counts(composed):
    assert composed("a", result())[0] == {"backends": {"9.0": {OP: "triton"}}, "records": ["a-prove.json"]}
    assert composed("b", result("dtw", "cuda", capability="8.0"))[0]["backends"]["8.0"] == {"dtw": "cuda"}
    found, remarks = composed("c", result(chosen="torch", date="2026-01-03", reason="1.20 times as long"))
    assert found["backends"]["9.0"] == {OP: "torch"}
    assert "c-prove.json, grouped_attention triton: 1.20" in remarks[-1]

    unclear = result(chosen="torch", date="2026-01-04", reason="0.96 times as long")
    unclear["verdicts"][OP]["candidates"]["triton"]["cases"] = {"a": {"interval": [0.93, 0.99]}}
    assert composed("d", unclear)[0]["backends"]["9.0"] == {OP: "torch"} and not is_decided(unclear["verdicts"][OP])
    found, _ = composed("c", result(date="2026-01-03"))
    assert found["backends"]["9.0"] == {OP: "triton"}

    other = CODE | {"_key_kernel": "sub;"}
    found, remarks = composed("c", result(chosen="torch", date="2026-01-03"), other)
    assert found["backends"]["9.0"] == {OP: "triton"}
    assert "c-prove.json, grouped_attention triton: _key_kernel changed, and may be faster now" in remarks
    found, remarks = composed("e", result(date="2026-01-05"), None)
    assert "e-prove.json, grouped_attention triton: the record has no PTX of it: prove it again" in remarks


def test_other_code_stands_for_what_was_proved_if_it_is_right_and_no_count_is_worse(composed, machine, capsys):
    assert composed("a", result())[0]["backends"]
    machine.now["_key_kernel"] = "sub;"
    found, (remark,) = composed.again()
    assert not found["backends"]
    assert remark == "a-prove.json, grouped_attention triton: _key_kernel changed, and the record was not counted"

    machine.now = dict(CODE)
    (path,) = composed.folder.glob("*.json")
    count_unchanged([path], Check(machine))
    assert json.loads(path.read_text())["counts"] == {PAIR: COUNTS} and PAIR in capsys.readouterr().out
    for now in ({"_query_kernel": "mov;", "_key_kernel": "sub;"}, {"_query_kernel": "mov;", "_new_kernel": "sub;"}):
        machine.now = now
        found, (remark,) = composed.again()
        assert found["backends"] == {"9.0": {OP: "triton"}} and "no count is worse, tests/ptx pass" in remark
    machine.failure = "1 failed, 60 passed"
    found, (remark,) = composed.again()
    assert not found["backends"] and remark.endswith("_new_kernel changed: tests/ptx: 1 failed, 60 passed")
    machine.counts["wrong"] = "an error of 1, allowed 0.1"
    assert composed.again()[1][0].endswith("_new_kernel changed: wrong: an error of 1, allowed 0.1")
    count_unchanged([path], Check(machine))
    assert json.loads(path.read_text())["counts"] == {PAIR: COUNTS}, "of other code nothing is written"


def test_one_launch_more_voids_a_record_of_the_same_kernels(composed, machine):
    composed("a", result())
    composed("b", result("write_kv", "torch"))
    count_unchanged([*composed.folder.glob("*.json")], Check(machine))
    machine.counts["launches"] += 1
    found, remarks = composed.again()
    assert not found["backends"]
    assert remarks == ["a-prove.json, grouped_attention triton: launches 5, 4 in the record",
                       "b-prove.json, write_kv triton: its launches changed, and may be faster now"]  # fmt: skip
    machine.counts["launches"] -= 2
    found, remarks = composed.again()
    assert found["backends"] == {"9.0": {OP: "triton"}}, "where torch won, ours may win with fewer launches"


@pytest.mark.parametrize(("change", "message"), [
    ({"waits": 2}, "waits 2, 1 in the record"),
    ({"instructions": {"_key_kernel": 21_000, "_query_kernel": 9_500}},
     "_key_kernel: instructions 30,500 in all, 30,000 in the record"),
    ({"instructions": {"_one_kernel": 30_031}}, "_one_kernel: instructions 30,031 in all, 30,000 in the record"),
    ({"bytes": {"_query_kernel": 1000, "_key_kernel": 2}}, "_key_kernel: bytes 1,002 in all, 1,000 in the record"),
    ({"ptxas": {"_key_kernel": PTXAS | {"registers": 136}}}, "_key_kernel: registers 136, 128 in the record"),
    ({"ptxas": {"_key_kernel": PTXAS | {"spilled bytes": 8}}}, "_key_kernel: spilled bytes 8, 0 in the record"),
    ({"ptxas": {"_new_kernel": PTXAS | {"shared bytes": 50_000}}},
     "_new_kernel: shared bytes 50,000, 49,152 in the record"),
    ({"ptxas": {"_key_kernel": PTXAS | {"blocks per SM": 1}}}, "_key_kernel: blocks per SM 1, 2 in the record"),
])  # fmt: skip
def test_what_is_worse_is_named(change, message):
    assert [*compare(COUNTS | change, COUNTS)] == [message]


def test_less_is_not_worse():
    ptxas = {"registers": 64, "spilled bytes": 0, "shared bytes": 0, "blocks per SM": 8}
    better = {"launches": 2, "waits": 0, "instructions": {"_one_kernel": 30_000}, "bytes": {"_one_kernel": 900},
              "ptxas": {"_one_kernel": ptxas}}  # fmt: skip
    assert [*compare(COUNTS, COUNTS)] == [*compare(COUNTS | better, COUNTS)] == []


def test_a_kernel_that_does_what_torch_did_is_no_more_work():
    """torch's kernels are not counted; but one that leaves as many launches, or replaces ours, is."""
    more = {name: COUNTS[name] | {"_new_kernel": 10**6} for name in ("instructions", "bytes")}
    moved = {"instructions": {kernel: count * 1.009 for kernel, count in COUNTS["instructions"].items()}}
    assert (
        [*compare(COUNTS | more | {"launches": 2}, COUNTS)]
        == [*compare(COUNTS | moved | {"launches": 2}, COUNTS)]
        == []
    )
    alone = {name: {"_new_kernel": 10**6} for name in more}
    for worse in (more, moved, alone | {"launches": 2}):
        assert [*compare(COUNTS | worse, COUNTS)]


def test_compilers_that_are_not_here_are_named(monkeypatch):
    record = result("dtw", "cuda") | {"nvcc": "11.0.1"}
    record["device"]["triton"] = "0.1"
    with pytest.raises(Missing, match=r"pip install --no-deps --target build/triton-0\.1 triton==0\.1"):
        Compilers(record).compile([PAIR])
    with pytest.raises(Missing, match=r"nvcc 11\.0\.1 is not here"):
        Compilers(record).compile(["dtw:cuda"])
    monkeypatch.setattr(records, "RECORDS", SimpleNamespace(glob=lambda _: []))
    monkeypatch.setattr(records, "compose", lambda *_: Compilers(record).compile([PAIR]))
    monkeypatch.setattr("sys.argv", ["records"])
    assert records.main() == 2


KERNEL = "rlkernels/prefix_cache/triton_kernels.py"
LOAD = "x = tl.load(rows + (token * row_token + head * row_head)[:, None] + dim[None, :] * row_dim, mask=mask)"
STORE = "tl.store(cache + to[:, None] + dim[None, :] * cache_dim, x.to(cache.dtype.element_ty), mask=mask)"
LAUNCH = "    if triton_interpreted():\n        key, value"
EDITS = {  # of the kernel that writes keys and values: what is replaced
    "names": {
        "_write_kernel": "_write_pages",
        LOAD: "# of T rows\n    " + LOAD.replace("x =", "numbers ="),
        STORE: STORE.replace("x.to", "numbers.to"),
        "@triton.jit\ndef _write_rows": "# rows\n\n\n@triton.jit\ndef _write_rows",
        "    token, head = row": '    """Write."""\n    token, head = row',
    },
    "another instruction": {STORE: STORE.replace("mask=mask", 'mask=mask, cache_modifier=".cg"')},
    "one store more": {STORE: f"{STORE}\n    tl.debug_barrier()\n    {STORE}"},
    "one launch more": {LAUNCH: "    slots = slots.clone()\n" + LAUNCH},
}


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Makes one of ``EDITS`` in a copy of the package -> whether a record of the unchanged code stands, and remarks."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    root, package = tmp_path / "root", records.ROOT / "rlkernels"
    root.mkdir()
    for name in ("tests", "csrc"):
        (root / name).symlink_to(records.ROOT / name)
    shutil.copytree(package, root / "rlkernels", ignore=shutil.ignore_patterns("_C*", "__pycache__"))
    monkeypatch.setattr(records, "ROOT", root)
    record, path = result("write_kv"), tmp_path / "a-prove.json"
    import triton

    record["device"]["triton"] = triton.__version__
    made = Compilers(record | {"nvcc": None}).compile(["write_kv:triton"])["write_kv:triton"]
    write_record(path, record, {"write_kv": {"triton": made["kernels"]}})
    count_unchanged([path], Check())

    checks = {}

    def edit(change, failure=""):
        text = (package.parent / KERNEL).read_text()
        for old, new in EDITS[change].items():
            assert old in text
            text = text.replace(old, new)
        (root / KERNEL).write_text(text)
        monkeypatch.setattr(Compilers, "test", lambda self: failure)
        check = checks.setdefault(change, Check())
        check.failures.clear()
        found, remarks = compose([path], check)
        return bool(found["backends"]), " ".join(remarks)

    return edit


@pytest.mark.slow
def test_a_record_stands_until_the_compiler_makes_something_worse(edited):
    assert edited("names") == (True, "")
    stands, remarks = edited("another instruction")
    assert stands and "_write_kernel changed, no count is worse, tests/ptx pass" in remarks
    stands, remarks = edited("another instruction", failure="1 failed")
    assert not stands and remarks.endswith("_write_kernel changed: tests/ptx: 1 failed")
    stands, remarks = edited("one store more")
    assert not stands and "_write_kernel: instructions" in remarks and "_write_kernel: bytes" in remarks
    stands, remarks = edited("one launch more")
    assert not stands and remarks == "a-prove.json, write_kv triton: launches 2, 1 in the record"


@pytest.mark.slow
def test_what_the_package_says_is_what_the_records_say(monkeypatch):
    """Run ``python -m bench.gpu.records`` where this fails."""
    monkeypatch.setattr(Compilers, "test", lambda self: "")  # they run beside this one
    try:
        found, remarks = compose(sorted(records.RECORDS.glob("*-prove.json")), Check())
    except Missing as missing:
        lacks(str(missing))
    print("\n".join(remarks))
    assert json.loads(records.RESULT.read_text()) == found
    assert found["backends"] == backend.RECORDS


def test_every_verdict_that_counts_was_counted():
    """Otherwise the next change of its kernels voids it; ``python -m bench.gpu.records`` counts."""
    found = json.loads(records.RESULT.read_text())
    loaded = records.load([records.RECORDS / name for name in found["records"]])
    for capability, backends in found["backends"].items():
        for op, chosen in backends.items():
            assert any(
                f"{op}:{chosen if chosen != 'torch' else 'triton'}" in record.get("counts", {})
                for _, record in loaded
                if record["device"]["capability"] == capability
            ), op
