"""The GPU command, as far as it runs without one."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import worker
from bench.gpu.cases import CASES, HOST_ONLY, attention, rivals
from bench.gpu.problem import Problem, check, compare
from rlkernels.backend import OPS
from rlkernels.prefix_cache import GroupedLayout, reference

CPU = torch.device("cpu")


def test_every_op_with_a_gpu_backend_is_checked_and_timed():
    for name, op in OPS.items():
        if (op.triton or op.cuda) and name not in HOST_ONLY:
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


def test_dry_run_leaves_a_record(tmp_path, capsys):
    path = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--no-build", "--no-tests", "--seconds", "0.001", "--output", str(path)]
    assert command.main([*arguments, "--ops", "keyed_uniform", "merge_attention"]) == 0
    record = json.loads(path.read_text())
    assert record["finished"] and record["commit"] and record["device"]["copy_bandwidth_bytes_s"] > 0
    checked = {(c["op"], c["backend"]): c["ok"] for c in record["checks"]}
    assert checked[("keyed_uniform", "cpu")] and checked[("merge_attention", "torch")]
    assert {row["op"] for row in record["timings"]} == {"keyed_uniform", "merge_attention"}
    assert "0 failed" in capsys.readouterr().out


def test_budget_that_is_used_up_names_what_was_left_out(tmp_path):
    path = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--no-build", "--no-tests", "--budget-seconds", "0", "--output", str(path)]
    assert command.main([*arguments, "--ops", "keyed_uniform"]) == 0
    record = json.loads(path.read_text())
    assert not record["finished"] and any("check keyed_uniform" in line for line in record["left_out"])


def test_dead_and_hanging_workers_are_reported_and_replaced():
    worker = command.Worker({"PATH": "/nowhere"})
    dead = worker.ask({"kind": "check", "device": "cpu", "op": "no_such_op", "case": "", "backend": "cpu"}, 60)
    assert not dead["ok"] and "StopIteration" in dead["message"]
    hung = worker.ask({"kind": "facts", "device": "cpu"}, 0.01)
    assert not hung["ok"] and "hung" in hung["message"]
    worker.close()


@pytest.mark.parametrize(("with_cuda", "codes", "ok"), [(True, [0], [True]), (True, [1, 0], [False, True]),
                                                        (False, [0], [True]), (False, [1], [False])])  # fmt: skip
def test_build_goes_on_without_the_cuda_part(monkeypatch, with_cuda, codes, ok):
    without = []

    def run(arguments, env, **_):
        without.append(env.get("RLKERNELS_NO_CUDA") == "1")
        return SimpleNamespace(returncode=codes[len(without) - 1], stdout="what the compiler said")

    monkeypatch.delenv("RLKERNELS_NO_CUDA", raising=False)
    monkeypatch.setattr(command.subprocess, "run", run)
    out = command.build("cpu", with_cuda=with_cuda)
    assert without == ([False, True] if with_cuda else [True])[: len(codes)]
    assert [out["ok"], *([out["without_cuda"]["ok"]] if "without_cuda" in out else [])] == ok
    assert out["ok"] or out["log"] == "what the compiler said"


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
    ready = worker.rivals(Problem(problem.call, rivals={"broken": lambda: torch.zeros(2) @ torch.zeros(3)}))
    assert "RuntimeError" in ready["broken"].reason
