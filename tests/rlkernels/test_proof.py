"""The proof on the user's GPU, with Triton's interpreter and planted kernels in the place of real ones; its rule."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from scipy import stats
from support import lacks

import rlkernels
from rlkernels import backend, proof, verdicts
from rlkernels.__main__ import main
from rlkernels.proof import Workload, compiled, process
from rlkernels.proof.cases import attention, cases_of, rank1
from rlkernels.proof.problem import Problem, Tolerance, check, same_bits
from rlkernels.proof.worker import MAX_ROUNDS, MIN_ROUNDS, open_device, race, replay, run_timing
from rlkernels.registry import OPS

OP, CPU, CUDA = "merge_attention", torch.device("cpu"), torch.device("cuda", 0)
TINY = Workload("float32", 4, 2, 16, 32, 200, 2, 2, 20, 16)
FACTS = {"gpu": "NVIDIA X", "capability": "9.0", "driver": "580", "torch": "2", "triton": "3"}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("RLKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RLKERNELS_BACKEND", raising=False)
    monkeypatch.setattr(verdicts, "_memory", {})
    monkeypatch.setattr(verdicts, "device_facts", lambda index: FACTS)
    monkeypatch.setattr(proof, "HANG_S", 600.0)  # of a busy machine, with the interpreter
    backend.set_run_backends({})
    yield
    backend.set_run_backends({})


def prove(*ops, workload=TINY, **options):
    """Without a limit of time that a busy machine would reach."""
    lines = []
    options = {"seconds": 3000, "device": "cpu", **options}
    return proof.prove(ops, workload=workload, say=lines.append, **options), lines


def test_every_op_with_a_gpu_kernel_can_be_proven():
    assert {*proof.PROVABLE} == {name for name, op in OPS.items() if op.on_gpu and name != "dtw_topk"}
    labels = [(case.op, case.label) for case in cases_of(Workload())]
    assert len({*labels}) == len(labels)


@pytest.mark.parametrize("op", ["delta_matvec", pytest.param("add_rank1_", marks=pytest.mark.slow)])
def test_real_kernels_are_right_and_repeat(op):
    if reason := backend.unavailable(op, "triton", torch.device("cpu")):
        lacks(reason)
    result, lines = prove(op)
    assert result["left_out"] == {} and result["device"]["gpu"] == "cpu"
    candidates = result["verdicts"][op]["candidates"]
    assert candidates.keys() == {"cpu", "triton"}
    for entry in candidates.values():
        assert not entry["reason"] or "times as long" in entry["reason"]
        for result in entry["cases"].values():
            assert result["interval"][0] <= result["ratio"] <= result["interval"][1]
    assert sum("right, twice the same bits" in line for line in lines) == 2 * 2
    assert not list(verdicts.folder().glob("*")), "a dry run stores nothing"


REASONS = {
    "merge_attention": "small: the process died with code -9",
    "write_kv": "small: hung for 20 s",
    "dtw": "small: wrong: an error of 0.3, allowed 0.0001",
    "delta_matvec": "small: MemoryError: no room for 40 GiB",
    "add_rank1_": "small: two runs on the same inputs give other bits",
    "sample_tokens": "times as long as plain torch in large",
    "verify_drafts": "large: the process died with code -9",
    "token_logprobs": "large: wrong",
    "top1_delta": "",
}


@pytest.mark.slow
def test_what_misbehaves_does_not_win_and_the_reason_is_kept(monkeypatch):
    monkeypatch.setattr(proof, "HANG_S", 20.0)
    result, lines = prove(*REASONS, cases="planted:cases_of")
    assert not result["left_out"]
    for op, reason in REASONS.items():
        verdict = result["verdicts"][op]
        triton = verdict["candidates"]["triton"]
        assert reason in triton["reason"] and triton["wins"] == (not reason), op
        others = {name: entry for name, entry in verdict["candidates"].items() if name != "triton"}
        assert all(entry["wins"] and entry["cases"]["large"]["interval"][1] < proof.WIN for entry in others.values())
        assert verdict["backend"] == next(iter(others), "torch") or not reason
    assert any("hung for 20 s" in line for line in lines) and any("of plain torch's time" in line for line in lines)


def test_without_a_context_nothing_is_proven(monkeypatch):
    """As in exclusive mode, or where other programs have the memory."""
    monkeypatch.setenv("PLANTED_PARENT", str(os.getpid()))
    result, _ = prove(OP, cases="planted:cases_of")
    assert result["verdicts"] == {}
    assert result["left_out"][OP].startswith("not proven: RuntimeError: all CUDA-capable devices are busy")


@pytest.mark.parametrize(("start", "limit", "reason"), [
    ("import sys; sys.exit('no module named numpy')", 60.0, "the process died with code 1: no module named numpy"),
    ("import time; time.sleep(60)", 1.0, "hung for 1 s and was killed"),
])  # fmt: skip
def test_a_worker_that_does_not_start_is_no_finding_about_a_kernel(monkeypatch, start, limit, reason):
    monkeypatch.setattr(proof, "WORKER_CODE", start)
    monkeypatch.setattr(process, "START_S", limit)
    result, _ = prove(OP)
    assert result["verdicts"] == {} and result["left_out"] == {OP: f"not proven: {reason}"}


ONE_JOB = """
import sys
for text in ('{"ok": true}', '{"ok": true, "answered": 1}'):
    print("@" + text, flush=True)
    sys.stdin.readline()
"""


def test_a_worker_that_dies_after_its_answer_is_no_finding_about_the_next_job():
    worker = process.Worker([sys.executable, "-c", ONE_JOB.replace("readline()", "readline() or exit()")], os.environ)
    for _ in range(2):
        assert worker.ask({}, 60.0, time.monotonic() + 60.0) == {"ok": True, "answered": 1}
        worker.process.kill()
        worker.process.wait()
    worker.close()


def test_no_time_and_no_gpu_leave_everything_out():
    result, _ = prove(OP, "dtw", seconds=0)
    assert result["verdicts"] == {} and set(result["left_out"].values()) == {"no time left of 0 s"}
    if not torch.cuda.is_available():
        result = rlkernels.prove(["dtw"])
        assert not result["verdicts"] and "no CUDA device; --device cpu (device='cpu')" in result["left_out"]["dtw"]
    for options, message in [
        ({"ops": ["rope"]}, "ops must be out of paged_attention, .* got rope"),
        ({"device": "gpu"}, "device must be one that torch knows, .* got 'gpu'"),
        ({"seconds": math.nan}, "seconds must be between 0 and inf, got nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            rlkernels.prove(**options)


def test_nobody_listens_to_a_proof(monkeypatch):
    """As where its output goes to ``head``: it ends, and is no finding about an op."""
    say = Mock(side_effect=BrokenPipeError)
    monkeypatch.setattr(proof.Prover, "prove_op", lambda self, op: self.say(op))
    with pytest.raises(BrokenPipeError):
        proof.prove([OP, "dtw"], device="cpu", say=say)
    say.assert_called_once_with(OP)


def test_a_process_that_outlives_sigkill_ends_the_proof(monkeypatch):
    """As one does that waits in a driver: nothing more is started on the device."""
    started = []
    monkeypatch.setattr(proof.Prover, "prove_op", lambda self, op: started.append(op) or self.worker.close())
    lost = Mock(side_effect=process.DeviceLost("a process is still there"))
    monkeypatch.setattr(process.Worker, "close", lost)
    result, _ = prove(OP, "dtw")
    assert started == [OP] and len(result["left_out"]) == 2 and "still there" in result["left_out"]["dtw"]


def test_what_waits_is_not_recorded(monkeypatch):
    """A recording that CUDA refuses would spoil the later ones of its process; torch finds a wait before."""
    modes = [0]
    recorded = []

    def waits():
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    stand_ins = {
        "Stream": Mock, "current_stream": Mock, "stream": nullcontext, "CUDAGraph": Mock, "synchronize": str,
        "graph": lambda graph, pool: nullcontext(recorded.append(graph)),
        "get_sync_debug_mode": lambda: modes[-1], "set_sync_debug_mode": modes.append,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert replay(waits) is waits and recorded == [] and modes == [0, "error", 0]
    launches = Mock()
    assert replay(launches) is recorded[0].replay and launches.call_count == 3 and modes[-1] == 0


@pytest.mark.parametrize(("device", "index"), [("cuda:1", 1), ("cuda", 0)])
def test_the_device_that_a_worker_proves_is_the_current_one(monkeypatch, device, index):
    """Events and graphs are of the current device: elsewhere they would time launches, without the kernels."""
    monkeypatch.setattr(torch.cuda, "set_device", chosen := Mock())
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=lambda *_, **__: chosen.assert_called_once_with(index)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2, 4))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limited := Mock())
    open_device(torch.device(device))
    limited.assert_called_once_with(0.4, torch.device(device))


def test_interval_of_the_median():
    assert proof.interval([0.5, 0.4, 0.6]) == (0.5, 0.4, 0.6)
    middle, low, high = proof.interval([i / 100 for i in range(41)])
    assert middle == 0.2 and (low, high) == (0.13, 0.27)  # 14th and 28th of 41


@pytest.mark.parametrize("rounds", [MIN_ROUNDS, 7, 9, 21, MAX_ROUNDS])
def test_the_interval_holds_the_median_in_95_of_100_cases_and_is_no_wider(rounds):
    """The number of ratios below the median is binomial."""
    _, low, high = proof.interval(range(rounds))
    below = stats.binom(rounds, 0.5)
    assert below.cdf(high) - below.cdf(low) >= 0.95 > below.cdf(high - 1) - below.cdf(low + 1)


def verdict(op=OP, chosen="triton", workload="w"):
    entry = {"reason": "", "wins": True, "cases": {"large": {"ratio": 0.5, "interval": [0.4, 0.6]}}}
    return {"op": op, "backend": chosen, "workload": workload, "candidates": {"triton": entry}}


def test_verdicts_are_kept_by_op_device_and_workload(monkeypatch):
    verdicts.store(verdict(), 0)
    verdicts.store(verdict(workload="v"), 0)
    verdicts.store(verdict("dtw", "cuda"), 0)
    monkeypatch.setattr(verdicts, "_memory", {})  # another process
    assert [v["workload"] for v in verdicts.load(OP, 0)] == ["v", "w"] and not verdicts.load(OP, 0, "x")
    assert verdicts.load("dtw", 0, "w") == [verdict("dtw", "cuda")]
    for name in FACTS:
        monkeypatch.setattr(verdicts, "device_facts", lambda index, name=name: {**FACTS, name: "other"})
        assert not verdicts.load(OP, 0)
    monkeypatch.setattr(verdicts, "device_facts", lambda index: FACTS)
    monkeypatch.setattr(verdicts, "sources", lambda op: "changed")
    assert not verdicts.load(OP, 0)


def test_the_winner_has_won_every_workload():
    assert verdicts.winner([]) is None and verdicts.winner([verdict(), verdict()]) == "triton"
    assert verdicts.winner([verdict(), verdict(chosen="torch")]) == "torch"


@pytest.mark.parametrize("text", ["", "\xff\xfe", "{", "[]", "{}", '{"op": 5}',
                                  json.dumps({**verdict(), "backend": "gone"}),
                                  json.dumps({**verdict(), "candidates": []}),
                                  json.dumps({**verdict(), "candidates": {"triton": {"wins": True}}})])  # fmt: skip
def test_a_damaged_cache_is_ignored_and_that_of_another_owner(monkeypatch, text):
    verdicts.store(verdict(), 0)
    (file,) = verdicts.folder().glob("*.json")
    monkeypatch.setattr(verdicts, "_memory", {})
    file.write_text(text, encoding="latin1")
    assert verdicts.load(OP, 0) == []
    verdicts.store(verdict(), 0)
    monkeypatch.setattr(verdicts, "_memory", {})
    assert verdicts.load(OP, 0) == [verdict()]
    monkeypatch.setattr(verdicts, "_memory", {})
    monkeypatch.setattr(os, "getuid", lambda: -1)  # as of a file of another owner
    assert verdicts.load(OP, 0) == []


def test_where_nothing_can_be_written_verdicts_live_in_memory(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLKERNELS_CACHE", str(tmp_path / "file" / "below"))
    verdicts.store(verdict(), 0)
    assert verdicts.load(OP, 0) == [verdict()]
    monkeypatch.delenv("RLKERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert verdicts.folder() == tmp_path / "xdg/rlkernels/verdicts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verdicts.folder() == tmp_path / ".cache/rlkernels/verdicts"


WRITER = """
import sys
from rlkernels import verdicts
verdicts.device_facts = lambda index: {"gpu": "NVIDIA X"}
for number in range(60):
    candidates = {sys.argv[1]: {"cases": {}, "reason": str(number)}}
    verdicts.store({"op": "dtw", "backend": "torch", "workload": "w", "candidates": candidates}, 0)
"""


def test_two_processes_write_at_once(monkeypatch):
    monkeypatch.setattr(verdicts, "device_facts", lambda index: {"gpu": "NVIDIA X"})
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name]) for name in "ab"]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        seen += len(verdicts.load("dtw", 0))  # a file that was half-written would be none
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0] and seen > 0
    (stored_verdict,) = verdicts.load("dtw", 0)
    assert verdicts.summary(stored_verdict) in ("a: 59", "b: 59") and len(list(verdicts.folder().iterdir())) == 1


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A GPU as far as the choice of a backend looks at it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(backend, "unavailable", lambda op, name, device: None if name != "cpu" else "a GPU")
    monkeypatch.setattr(backend, "RECORDS", {})
    backend._warn_unproved.cache_clear()
    backend.clear_choices()


def choice(op=OP):
    backend.clear_choices()
    return backend.choose(op, CUDA), backend.gpu_choice(op, 0)[1]


@pytest.mark.usefixtures("on_a_gpu")
def test_order_of_precedence(monkeypatch):
    with pytest.warns(UserWarning, match="python -m rlkernels prove"):
        assert choice() == ("torch", "default")
    monkeypatch.setattr(backend, "RECORDS", {"9.0": {OP: "triton"}, "8.0": {OP: "torch"}})
    assert choice() == ("triton", "record")
    monkeypatch.setattr(backend, "RECORDS", {"9.0": {OP: "triton", "dtw": "cuda", "dtw_topk": "triton"}})
    assert choice("dtw_topk") == ("cuda", "record"), "it runs the kernels of dtw"
    verdicts.store(verdict(chosen="torch"), 0)
    assert choice() == ("torch", "verdict")
    backend.set_run_backends({OP: "cuda"})
    assert choice() == ("cuda", "run")
    monkeypatch.setenv("RLKERNELS_BACKEND", "triton")
    monkeypatch.setattr(backend, "_check_environment", str)
    assert choice()[0] == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    row = rlkernels.info()["ops"][OP]
    assert (row["cuda"], row["from"]) == ("triton", "environment")
    assert backend.choose(OP, torch.device("cuda"), "torch") == "torch", "an explicit choice comes first"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_choice_of_the_run_that_cannot_work_is_told():
    backend.set_run_backends({OP: "cpu"})
    with pytest.warns(UserWarning, match=f"torch runs {OP}, though the run chose cpu: a GPU"):
        assert choice() == ("torch", "default")


@pytest.mark.usefixtures("on_a_gpu")
def test_a_regime_has_a_verdict_of_its_own_or_that_of_the_op(monkeypatch):
    regime = f"{OP}/many"
    monkeypatch.setitem(OPS, regime, OPS[OP])
    monkeypatch.setattr(backend, "RECORDS", {"9.0": {OP: "triton"}})
    assert choice(regime) == ("triton", "record")
    monkeypatch.setattr(backend, "RECORDS", {"9.0": {OP: "triton", regime: "torch"}})
    assert choice(regime) == ("torch", "record") and choice() == ("triton", "record")
    verdicts.store(verdict(chosen="cuda"), 0)
    assert choice(regime) == ("cuda", "verdict"), "of this machine, before a record of another"
    verdicts.store(verdict(regime), 0)
    assert choice(regime) == ("triton", "verdict") and choice() == ("cuda", "verdict")
    backend.set_run_backends({OP: "torch"})
    assert choice(regime) == ("torch", "run")


def add_rank1(columns):
    rlkernels.add_rank1_(torch.zeros(3000, columns), torch.zeros(3000), torch.zeros(columns), 1.0)


def compare(*shape):
    rlkernels.dtw(torch.zeros(shape), torch.zeros(shape))


def attend(*queries):
    attention.paged([3, 4], queries, (2, 1, 16), 8, torch.float32, CPU).call("auto")


def write(tokens):
    attention.write(tokens, (1, 8), 16, torch.float32, CPU).call("auto")


@pytest.mark.parametrize(("call", "sizes", "regime"), [
    (add_rank1, [2796], "add_rank1_"), (add_rank1, [2797], "add_rank1_/large"),
    (compare, [2, 5], "dtw"), (compare, [2, 5, 1], "dtw"), (compare, [2, 5, 2], "dtw/wide"),
    (attend, [1, 1], "paged_attention"), (attend, [1, 0], "paged_attention"),
    (attend, [2, 1], "paged_attention/prefill"),
    (write, [2048], "write_kv"), (write, [2049], "write_kv/many"),
])  # fmt: skip
def test_regimes_are_chosen_by_their_own_verdict(monkeypatch, call, sizes, regime):
    """Large weights; steps of several features; more than a query a sequence; many tokens."""
    asked = []
    monkeypatch.setattr(backend, "choose", lambda op, device, backend="auto": asked.append(op) or "torch")
    call(*sizes)
    assert asked == [regime]


@pytest.fixture
def clock(monkeypatch):
    """Plant the seconds of each backend in the worker's answers; return them."""
    seconds = dict.fromkeys(("torch", "triton", "triton/crossing", "cuda"), 2.0)

    def ask(self, job, hear=None):
        judged = {"right": True, "error": 0.0, "allowed": 1.0, "repeats": True}
        names = job.get("backends", [])
        times = {name: [seconds[name]] * 9 for name in [*names, "torch"]}
        return {"ok": True, **judged, "judged": dict.fromkeys(names, judged), "times": times}

    monkeypatch.setattr(proof.Prover, "ask", ask)
    monkeypatch.setattr(backend, "unavailable", lambda op, name, device: "no CPU" if name == "cpu" else None)
    return seconds


@pytest.mark.parametrize("fastest", ["torch", "triton", "triton/crossing"])
def test_the_fastest_variant_by_a_planted_clock_wins_and_runs(monkeypatch, clock, fastest):
    clock[fastest] = 1.0
    result, _ = prove("tree_attention")
    verdict = result["verdicts"]["tree_attention"]
    assert verdict["backend"] == fastest and verdict["candidates"].keys() == {"triton", "triton/crossing"}
    monkeypatch.setattr(backend, "RECORDS", {"9.0": {"tree_attention": verdict["backend"]}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choice("tree_attention") == (fastest, "record")
    verdicts.store({**verdict, "workload": "w"}, 0)
    monkeypatch.setattr(backend, "RECORDS", {})
    assert choice("tree_attention") == (fastest, "verdict")


@pytest.mark.parametrize("fastest", ["torch", "triton", "cuda"])
def test_the_fastest_by_a_planted_clock_wins(clock, fastest):
    clock[fastest] = 1.0
    result, _ = prove("dtw", "dtw/wide")
    assert {verdict["backend"] for verdict in result["verdicts"].values()} == {fastest}


def test_an_op_that_runs_the_kernels_of_another_is_checked_and_chosen_with_it(monkeypatch):
    asked = []

    def ask(self, job, hear=None):
        asked.append((job["kind"], job["op"]))
        return {"ok": True, "right": job["op"] != "dtw_topk", "error": 1.0, "allowed": 0.1, "repeats": True}

    monkeypatch.setattr(proof.Prover, "ask", ask)
    monkeypatch.setattr(backend, "unavailable", lambda op, name, device: None if name == "triton" else "not here")
    result, _ = prove("dtw_topk", "dtw")
    assert result["verdicts"].keys() == {"dtw"} and {*asked} == {("check", "dtw"), ("check", "dtw_topk")}
    assert "wrong: an error of 1, allowed 0.1" in result["verdicts"]["dtw"]["candidates"]["triton"]["reason"]


@pytest.mark.usefixtures("on_a_gpu")
def test_the_library_says_once_what_to_run_and_never_proves():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for op in (OP, "dtw", OP):
            assert choice(op) == ("torch", "default")
    assert len([w for w in caught if "python -m rlkernels prove" in str(w.message)]) == 1


@pytest.mark.usefixtures("on_a_gpu")
def test_what_a_verdict_names_must_run_here(monkeypatch):
    verdicts.store(verdict(), 0)
    monkeypatch.setattr(backend, "unavailable", lambda op, name, device: "triton is not installed")
    assert choice() == ("torch", "default")


def test_a_compiled_function_takes_the_verdict(monkeypatch):
    """What is looked up, in files, is no part of the graph."""
    monkeypatch.setattr(backend, "_gpu_candidates", lambda op, index: [(json.loads('"triton"'), "verdict")])
    monkeypatch.setattr(backend, "unavailable", lambda op, name, device: None)
    backend.clear_choices()
    torch.compiler.reset()

    def scale(x):
        return x * (2 if backend._gpu_backend(OP, 0) == "triton" else 3)

    assert torch.compile(scale, fullgraph=True, backend="eager")(torch.ones(1)) == 2


@pytest.mark.usefixtures("on_a_gpu")
def test_what_has_a_verdict_is_not_proved_again(monkeypatch):
    workload = Workload().digest()
    verdicts.store(verdict(workload=workload), 0)
    made = []
    monkeypatch.setattr(proof.Prover, "prove_op", lambda self, op: made.append(op) or verdict(op, "torch", workload))
    results = proof.prove([OP, "dtw"], say=str)["verdicts"]
    assert made == ["dtw"] and results[OP]["backend"] == "triton" and results["dtw"]["backend"] == "torch"
    assert backend.choose("dtw", CUDA) == "torch" and backend.choose(OP, CUDA) == "triton"
    assert proof.prove([OP], say=str, again=True)["verdicts"][OP]["backend"] == "torch"
    with pytest.raises(ValueError, match="the index of device must be between 0 and 0, got 7"):
        proof.prove([OP], device="cuda:7")


def test_command(monkeypatch, capsys, tmp_path):
    left_out = dict.fromkeys(["dtw", "dtw_topk"], "no time left of 5 s")
    result = {"device": FACTS, "verdicts": {OP: verdict()}, "left_out": left_out}
    monkeypatch.setattr("rlkernels.proof.cli.prove", asked := Mock(return_value=result))
    record, code = tmp_path / "records/x.json", {OP: {"triton": {"_merge_kernel": "ret;"}}}
    monkeypatch.setattr("rlkernels.proof.cli.compile_candidates", lambda *_: code)
    assert main(["prove", "--ops", OP, "dtw", "--seconds", "5", "--record", str(record)]) == 1
    (ops,), options = asked.call_args
    assert ops == [OP, "dtw"] and options["seconds"] == 5 and not options["again"]
    printed = capsys.readouterr().out
    assert "triton: 0.50 of the time of plain torch" in printed and "no time left of 5 s: dtw, dtw_topk\n" in printed
    written = json.loads(record.read_text())
    assert written["verdicts"][OP]["backend"] == "triton" and compiled.read_code(record) == code
    monkeypatch.undo()
    assert main(["prove", "--ops", "rope"]) == 2
    assert "rlkernels prove: ops must be out of" in capsys.readouterr().err
    assert main(["prove", "--device", "cpu", "--seconds", "0", "--record", str(tmp_path)]) == 2
    assert "rlkernels prove: [Errno 21] Is a directory" in capsys.readouterr().err


def test_comments_and_layout_are_no_change(tmp_path):
    def of(text, name="x.py"):
        (tmp_path / name).write_text(text)
        return verdicts.digest(tmp_path / name)

    assert of("x = 1") == of("x = (1)  # as before\n") == of('"""About."""\nx = 1') != of("x = 2")
    assert of("x = 1", "_C.so") != of("x = (1)", "_C.so")


def test_the_sources_of_an_op_are_its_folder():
    for op in proof.PROVABLE:
        folders = {path.parent.name for path in verdicts.python_files(op)}
        shared = {"sampling"} if OPS[op].folder == "rank1" else set()
        assert folders == {"rlkernels", OPS[op].folder} | shared, op


def gate(exact, plain=None, floor=1e-6):
    return Tolerance(Problem(lambda backend: exact if plain is None else plain, lambda: exact, floor=floor))


def passes(verdict):
    error, allowed = verdict
    return error <= allowed


def test_rule_is_twice_the_error_of_plain_torch():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain, close, far = (torch.tensor([1.0, 2.0 + e]) for e in (0.01, 0.019, 0.021))
    assert passes(gate(exact, plain).judge(close)) and not passes(gate(exact, plain).judge(far))


@pytest.mark.parametrize("ours", [
    torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf]), torch.ones(3), torch.ones(2, dtype=torch.float64),
    (torch.ones(2), torch.ones(2)),
])  # fmt: skip
def test_wrong_values_shapes_and_dtypes_fail(ours):
    assert not passes(gate(torch.ones(2)).judge(ours))


@pytest.mark.parametrize("problem", [
    rank1.top1(8, 5, torch.float32, CPU), rank1.top1_many([(8, 5)], torch.float32, CPU),
])  # fmt: skip
def test_nan_in_any_part_of_a_triplet_fails(problem):
    right = problem.call("torch")
    assert passes(problem.judge(right, right))
    for i, part in enumerate(right):
        assert not passes(problem.judge([*right[:i], part * math.nan, *right[i + 1 :]], right))


def test_equal_integers_pass_and_others_fail():
    ids = torch.tensor([1, 2, 3])
    judge = gate((ids, torch.ones(1)), floor=1.0)
    assert judge.judge((ids, torch.ones(1))) == (0.0, 0.0) and not passes(judge.judge((ids + 1, torch.ones(1))))


def test_large_outputs_are_compared_piece_by_piece(monkeypatch):
    monkeypatch.setattr("rlkernels.proof.problem.COMPARED_ELEMENTS", 3)
    exact = torch.arange(10.0)
    exact[4], exact[8] = math.nan, math.inf
    assert gate(exact).judge(exact.clone()) == (0.0, pytest.approx(9e-6))
    for place in (0, 5, 9):
        wrong = exact.clone()
        wrong[place] += 0.5
        assert gate(exact).judge(wrong)[0] == 0.5
    assert gate(exact).judge(exact.nan_to_num())[0] == math.inf
    assert gate(exact).judge(exact.masked_fill(exact == 9, math.nan))[0] == math.inf


def test_a_launcher_that_writes_nothing_fails():
    right = torch.ones(4096)
    for output in (lambda: torch.empty(4096), lambda: torch.empty(4096, dtype=torch.int64)):
        problem = Problem(lambda backend, output=output: right if backend == "torch" else output())
        assert not passes(check(problem, "cuda", CPU)[0])
    state = torch.zeros(4096)
    reset = Problem(
        lambda backend: state.fill_(1) if backend == "torch" else state, reset=lambda: state.fill_(math.nan)
    )
    assert not passes(check(reset, "cuda", CPU)[0])


@pytest.mark.parametrize(("a", "b", "equal"), [
    ([0.0], [-0.0], False), ([math.inf], [torch.finfo(torch.float32).max], False), ([math.nan], [1.0], False),
    ([math.nan, 2.0], [-math.nan, 2.0], True), ([1], [1], True), ([1], [2], False), ([True], [False], False),
    ([1], [1.0], False),
])  # fmt: skip
def test_same_bits(a, b, equal):
    assert same_bits([torch.tensor(a)], [torch.tensor(b)]) == equal
    assert same_bits([torch.tensor(a[-1])], [torch.tensor(b[-1])]) == equal or len(a) > 1
    assert not same_bits([torch.tensor(a)], [torch.tensor(a)] * 2)


def test_runs_must_repeat_to_the_bit():
    runs = iter(range(9))
    moving = Problem(lambda backend: torch.full((3,), 1.0 + (backend != "torch") * 1e-7 * next(runs)), floor=1e-3)
    verdict, repeats = check(moving, "cuda", CPU)
    assert passes(verdict) and not repeats
    still = Problem(lambda backend: torch.tensor([math.nan, 1.0]))
    assert check(still, "cuda", CPU)[1]


def test_backends_are_timed_in_turns_and_wrong_ones_are_not():
    order, messages = [], []

    def call(backend):
        order.append(backend)
        return torch.ones(2) * (1.5 if backend == "triton" else 1)

    times = race(Problem(call), ["cuda", "torch"], CPU, 0.0)
    assert times.keys() == {"cuda", "torch"} and len(times["cuda"]) == len(times["torch"]) == MIN_ROUNDS
    switches = sum(a != b for a, b in itertools.pairwise(order))
    assert switches >= 2 * MIN_ROUNDS + 1  # once each to find how often a sample calls, then the rounds
    case = attention.Case("merge_attention", "planted", lambda device: Problem(call), timed=True)
    answer = run_timing(case, ["cuda", "triton"], CPU, 0.0, messages.append)
    assert answer["judged"]["cuda"]["right"] and not answer["judged"]["triton"]["right"]
    assert answer["times"].keys() == {"cuda", "torch"}
    assert [message["begin"] for message in messages[:4]] == ["torch", "cuda", "triton", ""]
    assert messages[4:] == [{"round": number} for number in range(MIN_ROUNDS)]


def test_caches_hold_nan_wherever_no_kernel_may_read():
    pages = attention.Pages(5, 4, 1, 2, torch.float32, CPU)
    table = pages.table([6, 1])
    key, value = pages.finished()
    assert table.shape == (2, 3) and (table[:, 2] == -1).all() and table[1, 1] == -1
    for cache in (key, value):
        assert cache.isfinite().all(-1).sum() == 7
        assert cache[table[0, 1], 2:].isnan().all()
