"""From the records of proofs to what ``auto`` takes on a GPU that nobody proved on."""

import json
import shutil
from types import SimpleNamespace

import pytest
from support import lacks

from bench.gpu import records
from bench.gpu.cases import LARGE
from bench.gpu.records import (
    Check,
    Compilers,
    Missing,
    asked_name,
    compare,
    compose,
    count_unchanged,
    is_decided,
    merge,
)
from rlkernels import backend
from rlkernels.proof import fastest, write_record
from rlkernels.proof.compiled import write_code
from rlkernels.registry import OPS

OP, PAIR = "grouped_attention", "grouped_attention:triton"
CODE = {"_query_kernel": "mov;", "_key_kernel": "add;"}
PTXAS = {"registers": 128, "spilled bytes": 0, "shared bytes": 49_152, "blocks per SM": 2}
COUNTS = {
    "launches": 4, "waits": 1, "instructions": {"_query_kernel": 10_000, "_key_kernel": 20_000},
    "bytes": {"_query_kernel": 1000, "_key_kernel": 0}, "ptxas": {"_query_kernel": PTXAS, "_key_kernel": PTXAS},
}  # fmt: skip


def result(op=OP, chosen="triton", date="2026-01-02", capability="9.0", reason=""):
    ratio = 1.2 if chosen == "torch" else 0.5
    entry = {"reason": reason, "wins": not reason, "cases": {"a": {"ratio": ratio, "interval": [ratio] * 2}}}
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
        return compose(records.paths_of(tmp_path), Check(machine))

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


MANY, PREFILL = "65536 tokens, 8 x 128", "suffix prefill: 8 x 512 queries on 2048 keys"
WIDE = "64 x 64, length 512 x 16 dimensions"


@pytest.fixture
def timed(composed):
    """Return a function that writes rows with planted seconds by provider, and composes all records."""

    def write(op, shape, seconds, name="rows", date="2026-01-02", code=None, **kinds):
        path = composed.folder / f"{name}.jsonl"
        entries = [{"kind": "call", "date": date}, {"kind": "device", "capability": "9.0", "triton": "3.6.0"}]
        for kind, times in {"row": seconds, **kinds}.items():
            for provider, time in times.items():
                row = {"kind": kind, "op": op, "shape": shape, "provider": provider, "ok": time is not None}
                entries.append(row | {records.FIGURES[kind]: time})
        path.write_text("".join(map(records.line, entries)))
        if code:
            write_code(path, {asked_name(op, shape): dict.fromkeys(code, CODE)})
        composition, remarks = composed.compose_again()
        return composition["backends"].get("9.0", {}), remarks

    return write


@pytest.mark.parametrize(("seconds", "chosen"), [
    ({"triton": 1.0, "torch": 2.0}, "triton"), ({"triton": 2.0, "torch": 1.0}, "torch"),
    ({"triton": 1.0, "torch": 2.0, "torch SDPA": 0.1}, "triton"),  # which auto cannot take
    ({"triton": 0.98, "torch": 1.0}, "torch"), ({"triton": None, "torch": 1.0}, "torch"),
])  # fmt: skip
def test_a_proof_decides_nothing_where_rows_by_a_planted_clock_show_torch_ahead(composed, timed, seconds, chosen):
    composed("a", result())
    assert timed(OP, "n", seconds)[0] == {OP: chosen}
    newer, _ = timed(OP, "n", {"triton": 1.0, "torch": 2.0}, name="newer", date="2026-01-03")
    assert newer == {OP: "triton"}, "the newest rows count"


def test_a_replay_counts_in_place_of_a_call(composed, timed):
    composed("a", result("merge_attention"))
    calls = {"triton": 2.0, "torch": 1.0}
    assert timed("merge_attention", "n", calls)[0] == {"merge_attention": "torch"}
    assert timed("merge_attention", "n", calls, replay={"triton": 1.0, "torch": 2.0})[0] == {
        "merge_attention": "triton"
    }


def test_rows_choose_a_kernel_for_a_regime_by_its_ptx(composed, machine, timed):
    composed("a", result("write_kv", "torch"))
    seconds = {"triton": 0.2, "torch": 0.9}
    backends, remarks = timed("write_kv", MANY, seconds)
    assert backends == {"write_kv": "torch"}, "kernels may be others now"
    assert remarks == ["write_kv/many triton: the record has no PTX of it: prove it again, in rows.jsonl"]
    proved = {"write_kv": "torch", "write_kv/many": "triton"}
    assert timed("write_kv", MANY, seconds, code=["triton"])[0] == proved

    (path,) = composed.folder.glob("*.jsonl")
    count_unchanged([path], Check(machine))
    count_unchanged([path], Check(machine))
    counted = [entry for entry in records.read(path) if entry["kind"] == "counts"]
    assert counted == [{"kind": "counts", "pair": f"write_kv/many:triton:{MANY}", "counts": COUNTS}]
    machine.counts["launches"] -= 1
    assert composed.compose_again()[0]["backends"]["9.0"] == proved
    machine.counts["launches"] += 2
    assert composed.compose_again()[0]["backends"]["9.0"] == {"write_kv": "torch"}

    machine.counts["launches"] -= 1
    timed("write_kv", MANY, seconds)  # without counts
    machine.kernels["_key_kernel"] = "sub;"
    composed("a", result("write_kv", "torch"), machine.kernels)
    assert composed.compose_again()[0]["backends"]["9.0"] == {"write_kv": "torch"}


def test_rows_where_torch_is_ahead_need_no_ptx(composed, timed):
    composed("a", result("paged_attention"))
    backends, remarks = timed("paged_attention", PREFILL, {"triton": 0.83, "torch": 0.61})
    assert backends == {"paged_attention": "triton", "paged_attention/prefill": "torch"}
    assert remarks == [f"rows.jsonl, paged_attention/prefill triton: 1.36 times as long as plain torch in {PREFILL}"]


@pytest.mark.parametrize(("code", "chosen"), [
    (["triton", "cuda"], "triton"), (["triton"], "triton"), (["cuda"], "cuda"), ([], None),
])  # fmt: skip
def test_of_several_kernels_the_fastest_whose_ptx_is_known_runs(composed, timed, code, chosen):
    composed("a", result("dtw", "cuda"))
    backends, _ = timed("dtw", WIDE, {"cuda": 0.12, "triton": 0.09, "torch": 2.4}, code=code)
    assert backends == {"dtw": "cuda", **({"dtw/wide": chosen} if chosen else {})}


def test_cases_of_rows_ask_by_the_name_of_their_regime():
    assert asked_name("write_kv", MANY) == "write_kv/many" and asked_name("dtw", WIDE) == "dtw/wide"
    assert asked_name("paged_attention", PREFILL) == "paged_attention/prefill"
    names = {asked_name(case.op, case.label) for case in LARGE}
    assert names == {name for name, op in OPS.items() if op.on_gpu}


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
        composition, remarks = compose(records.paths_of(records.RECORDS), Check())
    except Missing as missing:
        lacks(str(missing))
    print("\n".join(remarks))
    assert json.loads(records.RESULT.read_text()) == composition
    assert composition["backends"] == backend.RECORDS


def test_auto_takes_the_fastest_backend_of_the_records_that_count():
    composition = json.loads(records.RESULT.read_text())
    counted = [record for _, record in records.load(records.RECORDS / name for name in composition["records"])]
    for capability, backends in composition["backends"].items():
        for op, chosen in backends.items():
            of_gpu = [record for record in counted if record["device"]["capability"] == capability]
            candidates = merge(record["verdicts"][op] for record in of_gpu if op in record["verdicts"])
            assert chosen == fastest(candidates), op


def test_every_verdict_that_counts_was_counted():
    """Otherwise the next change of its kernels voids it; ``python -m bench.gpu.records`` counts."""
    composition = json.loads(records.RESULT.read_text())
    records_read = records.load([records.RECORDS / name for name in composition["records"]])
    for capability, backends in composition["backends"].items():
        for op, chosen in backends.items():
            pair = f"{op}:{chosen if chosen != 'torch' else 'triton'}"
            of_gpu = [record for _, record in records_read if record["device"]["capability"] == capability]
            counted = [name for record in of_gpu for name in record.get("counts", {})]
            is_proved = any("shapes" not in record["verdicts"].get(op, {"shapes": []}) for record in of_gpu)
            if is_proved or chosen != "torch":  # rows where torch is ahead need none
                assert any(f"{name}:".startswith(f"{pair}:") for name in counted), op
