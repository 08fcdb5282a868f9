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
    candidate = "triton" if chosen == "torch" else chosen
    verdict = {"op": op, "backend": chosen, "workload": "w", "date": date, "candidates": {candidate: entry}}
    device = {"gpu": "NVIDIA X", "capability": capability, "triton": "3.6.0"}
    return {"device": device, "verdicts": {op: verdict}, "left_out": {}}


class Machine:
    """Stand in for the compilers: ``kernels`` is the present code, ``counts`` what it needs."""

    def __init__(self):
        self.kernels = dict(CODE)
        self.counts = json.loads(json.dumps(COUNTS))
        self.failure = ""

    def __call__(self, record):
        self.arch = record["device"]["capability"]
        self.triton = record["device"]["triton"]
        self.nvcc = record["nvcc"]
        return self

    def compile(self, pairs):
        launches = {name: self.counts[name] for name in ("launches", "waits")}
        return {pair: {"kernels": self.kernels, **launches} for pair in pairs}

    def count(self, pairs):
        return dict.fromkeys(pairs, self.counts)

    def test(self):
        return self.failure


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def composed(tmp_path, machine):
    """Return a function that writes a record by name, and composes all records written so far."""

    def write(name, record, code=CODE):
        path = tmp_path / f"{name}-prove.json"
        ((op, verdict),) = record["verdicts"].items()
        write_record(path, record, {op: dict.fromkeys(verdict["candidates"], code)} if code else {})
        return compose_again()

    def compose_again():
        return compose(sorted(tmp_path.glob("*-prove.json")), Check(machine))

    write.compose_again = compose_again
    write.folder = tmp_path
    return write


def test_the_newest_record_that_stands_counts(composed):
    assert composed("a", result())[0] == {"backends": {"9.0": {OP: "triton"}}, "records": ["a-prove.json"]}
    assert composed("b", result("dtw", "cuda", capability="8.0"))[0]["backends"]["8.0"] == {"dtw": "cuda"}
    composition, remarks = composed("c", result(chosen="torch", date="2026-01-03", reason="1.20 times as long"))
    assert composition["backends"]["9.0"] == {OP: "torch"}
    assert "c-prove.json, grouped_attention triton: 1.20" in remarks[-1]

    undecided = result(chosen="torch", date="2026-01-04", reason="0.96 times as long")
    undecided["verdicts"][OP]["candidates"]["triton"]["cases"] = {"a": {"interval": [0.93, 0.99]}}
    assert composed("d", undecided)[0]["backends"]["9.0"] == {OP: "torch"} and not is_decided(undecided["verdicts"][OP])
    composition, _ = composed("c", result(date="2026-01-03"))
    assert composition["backends"]["9.0"] == {OP: "triton"}

    changed_code = CODE | {"_key_kernel": "sub;"}
    composition, remarks = composed("c", result(chosen="torch", date="2026-01-03"), changed_code)
    assert composition["backends"]["9.0"] == {OP: "triton"}
    assert "c-prove.json, grouped_attention triton: _key_kernel changed, and may be faster now" in remarks
    composition, remarks = composed("e", result(date="2026-01-05"), None)
    assert "e-prove.json, grouped_attention triton: the record has no PTX of it: prove it again" in remarks


def test_other_code_stands_for_what_was_proved_if_it_is_right_and_no_count_is_worse(composed, machine, capsys):
    assert composed("a", result())[0]["backends"]
    machine.kernels["_key_kernel"] = "sub;"
    composition, (remark,) = composed.compose_again()
    assert not composition["backends"]
    assert remark == "a-prove.json, grouped_attention triton: _key_kernel changed, and the record was not counted"

    machine.kernels = dict(CODE)
    (path,) = composed.folder.glob("*.json")
    count_unchanged([path], Check(machine))
    assert json.loads(path.read_text())["counts"] == {PAIR: COUNTS} and PAIR in capsys.readouterr().out
    for kernels in ({"_query_kernel": "mov;", "_key_kernel": "sub;"}, {"_query_kernel": "mov;", "_new_kernel": "sub;"}):
        machine.kernels = kernels
        composition, (remark,) = composed.compose_again()
        assert composition["backends"] == {"9.0": {OP: "triton"}} and "no count is worse, tests/ptx pass" in remark
    machine.failure = "1 failed, 60 passed"
    composition, (remark,) = composed.compose_again()
    assert not composition["backends"] and remark.endswith("_new_kernel changed: tests/ptx: 1 failed, 60 passed")
    machine.counts["wrong"] = "an error of 1, allowed 0.1"
    assert composed.compose_again()[1][0].endswith("_new_kernel changed: wrong: an error of 1, allowed 0.1")
    count_unchanged([path], Check(machine))
    assert json.loads(path.read_text())["counts"] == {PAIR: COUNTS}, "of other code nothing is written"


def test_launches_may_change_in_favour_of_a_verdict_only(composed, machine):
    composed("a", result())
    composed("b", result("write_kv", "torch"))
    count_unchanged([*composed.folder.glob("*.json")], Check(machine))
    machine.counts["launches"] += 1
    composition, remarks = composed.compose_again()
    assert composition["backends"] == {"9.0": {"write_kv": "torch"}}, "a kernel that lost is slower now"
    assert remarks == ["a-prove.json, grouped_attention triton: launches 5, 4 in the record"]
    machine.counts["launches"] -= 2
    composition, remarks = composed.compose_again()
    assert composition["backends"] == {"9.0": {OP: "triton"}}, "where torch won, ours may win with fewer launches"
    assert remarks == ["b-prove.json, write_kv triton: launches or waits less, and may be faster now"]


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
    improved = {"launches": 2, "waits": 0, "instructions": {"_one_kernel": 30_000}, "bytes": {"_one_kernel": 900},
              "ptxas": {"_one_kernel": ptxas}}  # fmt: skip
    assert [*compare(COUNTS, COUNTS)] == [*compare(COUNTS | improved, COUNTS)] == []


def test_a_kernel_that_does_what_torch_did_is_no_more_work():
    """torch's kernels are not counted; a kernel that leaves as many launches, or replaces ours, is."""
    added_kernel = {name: COUNTS[name] | {"_new_kernel": 10**6} for name in ("instructions", "bytes")}
    rebalanced = {"instructions": {kernel: count * 1.009 for kernel, count in COUNTS["instructions"].items()}}
    for change in (added_kernel, rebalanced):
        assert [*compare(COUNTS | change | {"launches": 2}, COUNTS)] == []
    replaced = {name: {"_new_kernel": 10**6} for name in added_kernel}
    for change in (added_kernel, rebalanced, replaced | {"launches": 2}):
        assert [*compare(COUNTS | change, COUNTS)]


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
    """Return a function that makes one of ``EDITS`` in a copy of the package.

    It returns whether a record of the unchanged code stands, and the remarks.
    """
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    root = tmp_path / "root"
    package = records.ROOT / "rlkernels"
    root.mkdir()
    for name in ("tests", "csrc"):
        (root / name).symlink_to(records.ROOT / name)
    shutil.copytree(package, root / "rlkernels", ignore=shutil.ignore_patterns("_C*", "__pycache__"))
    monkeypatch.setattr(records, "ROOT", root)
    record = result("write_kv")
    path = tmp_path / "a-prove.json"
    import triton

    record["device"]["triton"] = triton.__version__
    compiled = Compilers(record | {"nvcc": None}).compile(["write_kv:triton"])["write_kv:triton"]
    write_record(path, record, {"write_kv": {"triton": compiled["kernels"]}})
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
        composition, remarks = compose([path], check)
        return bool(composition["backends"]), " ".join(remarks)

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
        composition, remarks = compose(sorted(records.RECORDS.glob("*-prove.json")), Check())
    except Missing as missing:
        lacks(str(missing))
    print("\n".join(remarks))
    assert json.loads(records.RESULT.read_text()) == composition
    assert composition["backends"] == backend.RECORDS


def test_every_verdict_that_counts_was_counted():
    """Otherwise the next change of its kernels voids it; ``python -m bench.gpu.records`` counts."""
    composition = json.loads(records.RESULT.read_text())
    records_read = records.load([records.RECORDS / name for name in composition["records"]])
    for capability, backends in composition["backends"].items():
        for op, chosen in backends.items():
            pair = f"{op}:{chosen if chosen != 'torch' else 'triton'}"
            of_gpu = [record for _, record in records_read if record["device"]["capability"] == capability]
            assert any(pair in record.get("counts", {}) for record in of_gpu), op
