"""The GPU command, as far as it runs without one."""

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch
from rich.console import Console

from bench import Row
from bench.gpu import __main__ as command
from bench.gpu import worker
from bench.gpu.cases import CASES, HOST_ONLY, attention, rivals
from bench.gpu.problem import GpuCase, Problem, check, compare
from bench.gpu.proven import passed
from bench.gpu.record import Record
from rlkernels.backend import OPS
from rlkernels.prefix_cache import GroupedLayout, reference

CPU = torch.device("cpu")


def test_every_op_that_runs_on_a_gpu_is_checked_and_timed():
    for name in OPS.keys() - set(HOST_ONLY):
        assert any(case.op == name and not case.timed for case in CASES), f"no small case for {name}"
        assert any(case.op == name and case.timed for case in CASES), f"no timed case for {name}"
    assert {case.op for case in CASES} <= OPS.keys()
    assert len({(case.op, case.label) for case in CASES}) == len(CASES)


def test_rule_is_twice_the_error_of_plain_torch():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain, close, far = (torch.tensor([1.0, 2.0 + e]) for e in (0.01, 0.019, 0.021))
    for ours, passes in ((close, True), (far, False)):
        error, allowed = compare(ours, plain, exact, floor=1e-6)
        assert (error <= allowed) == passes


@pytest.mark.parametrize(
    "ours",
    [
        torch.tensor([1.0, math.nan]),
        torch.tensor([1.0, math.inf]),
        torch.ones(3),
        torch.ones(2, dtype=torch.float64),
        (torch.ones(2), torch.ones(2)),
    ],
)
def test_wrong_values_shapes_and_dtypes_fail(ours):
    error, allowed = compare(ours, torch.ones(2), torch.ones(2), floor=1e-6)
    assert error > allowed


def test_equal_integers_pass_and_others_fail():
    ids = torch.tensor([1, 2, 3])
    assert compare((ids, torch.ones(1)), (ids, torch.ones(1)), (ids, torch.ones(1)), 0.0) == (0.0, 0.0)
    error, allowed = compare((ids + 1, torch.ones(1)), (ids, torch.ones(1)), (ids, torch.ones(1)), 1.0)
    assert error > allowed


def test_a_launcher_that_writes_nothing_fails():
    right = torch.ones(4096)
    for output in (lambda: torch.empty(4096), lambda: torch.empty(4096, dtype=torch.int64)):
        problem = Problem(lambda backend, output=output: right if backend == "torch" else output())
        error, allowed = check(problem, "cuda", CPU)
        assert error > allowed
    state = torch.zeros(4096)
    reset = Problem(
        lambda backend: state.fill_(1) if backend == "torch" else state, reset=lambda: state.fill_(math.nan)
    )
    error, allowed = check(reset, "cuda", CPU)
    assert error > allowed


def dry_run(path, *arguments):
    """Runs the command without a build and tests -> (exit code, record)."""
    options = ["--device", "cpu", "--no-build", "--no-tests", "--seconds", "0.001", "--output", str(path)]
    return command.main([*options, "--commit", "abc", *arguments]), json.loads(path.read_text())


class Answers:
    """In place of the worker: answers with what it is given, by job."""

    def __init__(self, **found):
        self.asked, self.found = [], found

    def __call__(self, env):
        return self

    def ask(self, job, seconds):
        self.asked.append(job)
        answer = self.found.get(job["kind"], {"ok": True})
        return dict(answer(job) if callable(answer) else answer)

    def close(self):
        pass


def rows(job):
    return {"rows": [asdict(Row(job["op"], "torch", job["case"], median_s=1.0))]}


def test_dry_run_leaves_a_record(tmp_path, capsys):
    code, record = dry_run(tmp_path / "record.json", "--ops", "keyed_uniform", "merge_attention")
    assert code == 0 and record["commit"] == "abc" and record["device"]["copy_bandwidth_bytes_s"] > 0
    checked = {(c["op"], c["backend"]): c["ok"] for c in record["checks"]}
    assert checked[("keyed_uniform", "cpu")] and checked[("merge_attention", "torch")]
    assert {row["op"] for row in record["timings"]} == {"keyed_uniform", "merge_attention"}
    assert not record["finished"] and not any("merge_attention" in line for line in record["left_out"])
    assert "0 failed" in capsys.readouterr().out


def test_next_call_does_what_the_record_lacks(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    worker = Answers(time=rows)
    monkeypatch.setattr(command, "Worker", worker)
    monkeypatch.setattr(command, "test_files", list)
    jobs = command.plan("cpu", 0.001)
    _, first = dry_run(path, "--ops", "keyed_uniform")
    assert not first["finished"] and len(first["left_out"]) == len(jobs) - 3  # cpu, torch, timed
    assert "check merge_attention on torch: 1023 x 7 x 64" in first["left_out"]
    assert "time merge_attention: 1023 x 7 x 64" in first["left_out"]
    _, second = dry_run(path)
    assert second["finished"] and second["left_out"] == [] and second["started"] == first["started"]
    assert second["checks"][: len(first["checks"])] == first["checks"] and second["seconds"] >= first["seconds"]
    done = [job for job in worker.asked if job["kind"] != "facts"]
    assert len(done) == len(jobs) and all(job in jobs for job in done)
    assert dry_run(path)[1]["checks"] == second["checks"] and worker.asked[len(jobs) + 2 :] == [worker.asked[0]]
    # of other code, or of code that no commit names, nothing is kept
    assert len(dry_run(path, "--ops", "keyed_uniform", "--commit", "abd")[1]["checks"]) == 2
    for commit in ("abd-dirty", "unknown"):
        path.write_text(json.dumps({**second, "commit": commit}))
        assert len(dry_run(path, "--ops", "keyed_uniform", "--commit", commit)[1]["checks"]) == 2


def test_failed_timings_have_a_list_of_their_own(tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.json"
    monkeypatch.setattr(
        command, "Worker", Answers(time={"ok": False, "message": "the process died with code -11: [/]"})
    )
    code, record = dry_run(path, "--ops", "merge_attention")
    assert code == 1 and all("backend" in found for found in record["checks"])
    assert [(found["op"], found["message"][-3:]) for found in record["failed_timings"]] == [("merge_attention", "[/]")]
    assert "failed: time merge_attention: 1023 x 7 x 64" in capsys.readouterr().out
    assert "merge_attention" not in passed({**record, "checks": [{**c, "backend": "triton"} for c in record["checks"]]})


def test_what_the_end_of_the_budget_cuts_is_left_out(tmp_path, monkeypatch):
    hung = {"ok": False, "hung": True, "message": "hung for 40 s and was killed"}
    monkeypatch.setattr(command, "Worker", Answers(check=hung))
    code, record = dry_run(tmp_path / "record.json", "--budget-seconds", "60", "--ops", "keyed_uniform")
    assert code == 0 and record["checks"] == [] and "check keyed_uniform on cpu: 2053" in record["left_out"]
    code, record = dry_run(tmp_path / "other.json", "--budget-seconds", "900", "--ops", "keyed_uniform")
    assert code == 1 and [found["ok"] for found in record["checks"]] == [False, False]  # its own limit: it hangs


def test_budget_that_is_used_up_names_what_was_left_out(tmp_path):
    code, record = dry_run(tmp_path / "record.json", "--budget-seconds", "0")
    assert code == 0 and not record["finished"] and record["device"] == {}
    assert any("check keyed_uniform" in line for line in record["left_out"])
    assert "tests tests/rlkernels/triton/test_rank1.py" in record["left_out"]


def test_tests_are_recorded_file_by_file(tmp_path, monkeypatch):
    """In a run whose tests are of three kinds: right, wrong, and cut by the end of the budget."""
    sources = {
        "right": "def test(): assert True",
        "wrong": "def test_what_fails(): assert False",
        "endless": "import time\ndef test(): time.sleep(600)",
    }
    for name, source in sources.items():
        (tmp_path / f"test_{name}.py").write_text(source)
    files = {name: str(tmp_path / f"test_{name}.py") for name in sources}
    monkeypatch.setattr(command, "test_files", lambda: list(files.values()))
    monkeypatch.setattr(command, "TESTS_S", 0.0)
    record = Record(tmp_path / "record.json", checks=[], timings=[], failed_timings=[], tests={})
    real = command.run
    monkeypatch.setattr(
        command,
        "run",
        lambda arguments, env, seconds: real(arguments, env, 2 if files["endless"] in arguments else seconds),
    )
    command.run_tests(record, dict(os.environ), time.monotonic() + 600)
    assert command.close(record, [], Console()) == 1
    found = json.loads(record.path.read_text())
    assert found["left_out"] == [f"tests {files['endless']}"] and not found["finished"]
    assert {file: test["ok"] for file, test in found["tests"].items()} == {files["right"]: True, files["wrong"]: False}
    assert (
        "1 failed" in found["tests"][files["wrong"]]["closing"]
        and "1 passed" in found["tests"][files["right"]]["closing"]
    )
    assert any("test_what_fails" in line for line in found["tests"][files["wrong"]]["failures"])
    # what was tested is not tested again; too little time to begin another
    monkeypatch.setattr(command, "TESTS_S", 20.0)
    monkeypatch.setattr(command, "run", None)
    command.run_tests(record, {}, time.monotonic() + 10)
    assert record.data["tests"].keys() == found["tests"].keys()


def test_tests_of_the_gpu_need_few_packages():
    """A GPU machine may lack what only the trainer needs."""
    imported = set()
    shared = [f"tests/{name}.py" for name in ("conftest", "support", "aot_example", "rank1_cases")]
    for file in [*command.test_files(), *shared, "tests/rlkernels/triton/conftest.py"]:
        imported |= set(re.findall(r"^(?:from|import) (\w+)", (command.ROOT / file).read_text(), re.MULTILINE))
    ours = {"rlkernels", "support", "aot_example", "rank1_cases"}
    assert imported - ours - sys.stdlib_module_names <= {"torch", "triton", "pytest"}


def test_dead_and_hanging_workers_are_reported_and_replaced():
    worker = command.Worker({"PATH": "/nowhere"})
    dead = worker.ask({"kind": "check", "device": "cpu", "op": "no_such_op", "case": "", "backend": "cpu"}, 60)
    assert not dead["ok"] and "StopIteration" in dead["message"]
    hung = worker.ask({"kind": "facts", "device": "cpu"}, 0.01)
    assert not hung["ok"] and hung["hung"] and "hung" in hung["message"]
    gone = worker.process = subprocess.Popen(
        ["sh", "-c", "exit 7"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    gone.wait()
    late = worker.ask({"kind": "facts", "device": "cpu"}, 60)
    assert not late["ok"] and "hung" not in late and "died with code 7" in late["message"]
    worker.close()


@pytest.mark.parametrize(("with_cuda", "codes", "ok"), [(True, [0], [True]), (True, [1, 0], [False, True]),
                                                        (False, [0], [True]), (False, [1], [False]),
                                                        (True, [None], [False])])  # fmt: skip
def test_build_goes_on_without_the_cuda_part(monkeypatch, with_cuda, codes, ok):
    without = []

    def run(arguments, env, seconds):
        without.append(env.get("RLKERNELS_NO_CUDA") == "1")
        assert 0 < seconds <= 100
        return codes[len(without) - 1], "what the compiler said"

    monkeypatch.delenv("RLKERNELS_NO_CUDA", raising=False)
    monkeypatch.setattr(command, "run", run)
    out = command.build("cpu", 100, with_cuda=with_cuda)
    assert without == ([False, True] if with_cuda else [True])[: len(codes)]
    assert [out["ok"], *([out["without_cuda"]["ok"]] if "without_cuda" in out else [])] == ok
    assert out["ok"] or out["log"] == "what the compiler said"


def test_a_command_is_cut_with_all_that_it_started(tmp_path):
    mark = tmp_path / "late"
    script = f"(sleep 1; touch {mark}) & echo begun; wait"
    assert command.run(["sh", "-c", script], dict(os.environ), 0.1) == (None, "cut after 0 s")
    time.sleep(1.2)
    assert not mark.exists()
    assert command.run(["sh", "-c", "echo said; exit 3"], dict(os.environ), 60) == (3, "said\n")


def test_unknown_op_and_missing_gpu_are_named(capsys):
    with pytest.raises(SystemExit):
        command.main(["--ops", "no_such_op"])
    assert "no op named no_such_op" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            command.main([])
        assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("queries", [1, 5])
def test_rivals_compute_the_same_attention(queries):
    query = torch.randn(3, queries, 4, 16)
    key, value = torch.randn(2, 3, 24, 2, 16)
    expected = torch.cat([
        reference.attend(q, k, v, 0.3, reference.causal(queries, 24, CPU))[0] for q, k, v in zip(query, key, value)
    ])  # fmt: skip
    for make in rivals.attention(query, key, value, 0.3, compiled=False).values():
        torch.testing.assert_close(make()(), expected)


def test_rivals_of_training():
    layout = GroupedLayout([6, 6], [3, 3, 3], [0, 2, 3])
    query, grad = torch.randn(2, layout.num_tokens, 4, 16)
    key, value = torch.randn(2, layout.num_tokens, 2, 16)
    rivals.grouped(query, key, value, grad, layout, 0.3)["torch SDPA, every prefix repeated"]()()
    at = torch.arange(layout.num_tokens)
    mask = rivals.sees(layout, CPU)(0, 0, at[:, None], at)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    parts = (t.transpose(0, 1) for t in (query, key, value))
    masked = torch.nn.functional.scaled_dot_product_attention(*parts, mask, scale=0.3).transpose(0, 1)
    torch.testing.assert_close(masked, reference.grouped_attention(query, key, value, layout, 0.3))


def test_timed_attention_has_rivals():
    problem = attention.shared([16] * 2, 3, [8], 1, (4, 2, 16), 8, torch.float32, CPU)
    assert problem.rivals.keys() == {"triton, not shared", "torch SDPA", "torch FlexAttention"}
    torch.testing.assert_close(problem.rivals["torch SDPA"]()(), problem.call("torch")[0])


def test_a_provider_that_fails_is_named_and_the_others_are_timed(monkeypatch):
    def call(backend):
        if backend == "torch":
            raise RuntimeError("out of memory")
        return torch.ones(3)

    case = GpuCase("merge_attention", "small", lambda device: Problem(call, rivals={"peer": lambda: torch.zeros}))
    monkeypatch.setattr(worker.backends, "unavailable", lambda op, backend, device: None)
    found = {row["provider"]: row for row in worker.run_timing(case, CPU, 0.001)}
    assert found["cpu"]["median_s"] > 0 and found["cpu"]["match"] == "" and found["torch"]["median_s"] is None
    assert "out of memory" in found["torch"]["missing"] and "TypeError" in found["peer"]["missing"]

    def broken(device):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(worker, "settled", broken)  # the device answers nothing any more: the process has to end
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.run_timing(case, CPU, 0.001)
