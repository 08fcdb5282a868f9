"""From the records of proofs to what ``auto`` takes on a GPU that nobody proved on."""

import json

import pytest

from bench.gpu import records
from bench.gpu.records import compose, files, is_decided
from rlkernels import backend
from rlkernels.proof import write_record

OP = "grouped_attention"


def result(op=OP, chosen="triton", date="2026-01-02", capability="9.0", reason=""):
    entry = {"reason": reason, "wins": not reason, "cases": {}}
    verdict = {"op": op, "backend": chosen, "workload": "w", "date": date, "candidates": {"triton": entry}}
    return {"device": {"gpu": "NVIDIA X", "capability": capability}, "verdicts": {op: verdict}, "left_out": {}}


@pytest.fixture
def composed(tmp_path):
    """Writes records by name -> what comes of all that were written."""

    def write(name, found, change=lambda record: None):
        path = tmp_path / f"{name}-prove.json"
        write_record(path, found)
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))
        return compose(sorted(tmp_path.glob("*-prove.json")))

    return write


def test_the_newest_record_of_the_present_sources_counts(composed):
    assert composed("a", result())[0] == {"backends": {"9.0": {OP: "triton"}}, "records": ["a-prove.json"]}
    assert composed("b", result("dtw", "cuda", capability="8.0"))[0]["backends"]["8.0"] == {"dtw": "cuda"}
    found, complaints = composed("c", result(chosen="torch", date="2026-01-03", reason="1.20 times as long"))
    assert found["backends"]["9.0"] == {OP: "torch"}
    assert "c-prove.json, grouped_attention triton: 1.20" in complaints[-1]

    unclear = result(chosen="torch", date="2026-01-04", reason="0.96 times as long")
    unclear["verdicts"][OP]["candidates"]["triton"]["cases"] = {"a": {"interval": [0.93, 0.99]}}
    assert composed("d", unclear)[0]["backends"]["9.0"] == {OP: "torch"} and not is_decided(unclear["verdicts"][OP])
    found, complaints = composed("c", result(date="2026-01-03"))
    assert found["backends"]["9.0"] == {OP: "triton"}

    def of_other_code(record):
        record["sources"]["rlkernels/prefix_cache/triton_grouped.py"] = "0"

    found, complaints = composed("c", result(chosen="torch", date="2026-01-03"), of_other_code)
    assert found["backends"]["9.0"] == {OP: "triton"}
    assert "c-prove.json, grouped_attention: changed since: rlkernels/prefix_cache/triton_grouped.py" in complaints


def test_a_cuda_kernel_is_all_that_is_compiled_for_it(composed):
    found = files("dtw", "cuda")
    assert {"csrc/cuda/dtw.cu", "rlkernels/similarity/alignment.py"} <= found and any(".h" in name for name in found)
    assert "csrc/cuda/dtw.cu" not in files("dtw", "triton")

    def without_sources(record):  # as of an installed wheel
        record["sources"] = {name: value for name, value in record["sources"].items() if "csrc" not in name}

    assert composed("a", result("dtw", "cuda"), without_sources)[0]["backends"] == {}


def test_what_the_package_says_is_what_the_records_say():
    """Run ``python -m bench.gpu.records`` where this fails."""
    found, _ = compose(sorted(records.RECORDS.glob("*-prove.json")))
    assert json.loads(records.RESULT.read_text()) == found
    assert found["backends"] == backend.RECORDS
