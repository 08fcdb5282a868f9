"""The GPU command without a GPU: also with providers that misbehave, with a kill, and with a process that stays."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from pretend_gpu import pretended
from rich.console import Console
from support import run_python

from bench import Row
from bench.gpu import counters
from bench.gpu import session as command
from bench.gpu.build import Build, run
from bench.gpu.cases import CASES, LARGE, SANITIZED
from bench.gpu.journal import ROOT, read
from bench.gpu.presets import Peaks
from bench.gpu.summary import summary
from bench.gpu.worker import run_contest
from rlkernels.proof import process
from rlkernels.proof.cases import SMALL, attention, logits
from rlkernels.proof.problem import Case
from rlkernels.registry import ALL, OPS


def test_every_op_with_a_gpu_kernel_is_timed_and_sanitized():
    assert all(case.timed for case in LARGE)
    assert len({(case.op, case.label) for case in CASES}) == len(CASES)
    assert sorted(op for ops in SANITIZED.values() for op in ops) == sorted(op.name for op in ALL if op.on_gpu)


def test_the_proof_comes_first_of_all_that_needs_the_extension():
    jobs = command.plan(CASES, "cuda", 0.5, sanitizer=True)
    kinds = [job["kind"] for job in jobs]
    early_jobs = [job for job in jobs[: kinds.index("prove")] if job["kind"] == "time"]
    assert early_jobs[0]["op"] == "grouped_attention" and not any(OPS[job["op"]].cuda for job in early_jobs)
    assert [job["stage"] for job in jobs] == sorted((job["stage"] for job in jobs), key=STAGES.index)
    assert {job["stage"] for job in jobs} == {*STAGES}
    assert {job["kind"] for job in jobs} == command.LIMITS_S.keys() | {"prove"}
    assert len({command.name_of(job) for job in jobs}) == len(jobs)
    timed_jobs = [j for j in jobs if j["kind"] == "time"]
    assert sorted((j["op"], j["case"]) for j in timed_jobs if not j["late"]) == sorted((c.op, c.label) for c in LARGE)
    dry = command.plan(CASES, "cpu", 0.5, sanitizer=False)
    first = {case.op: case.label for case in reversed(SMALL)}
    assert {j["op"]: j["case"] for j in dry if j["kind"] == "time"} == first


def test_decisions_name_files_of_the_project():
    named_files = re.findall(r"[\w/.]+\.(?:py|json|md)\b", " ".join(stage.decision for stage in command.STAGES))
    assert named_files and all((ROOT / file).exists() for file in named_files)


STAGES = [stage.name for stage in command.STAGES]
OPTIONS = ["--rehearse", "--seconds", "0.001", "--commit", "abc"]
QUICK = ("--no-build", "--no-tests")


def dry_run(path, *options, without=QUICK, cases="bench.gpu.cases:CASES"):
    """Run the command without a build and tests; return the exit code and the entries of the record."""
    return command.main([*OPTIONS, *without, "--output", str(path), *options], cases), read(path)


ROW = {**asdict(Row("", "torch", "")), "ok": True, "median_s": 1.0}


def of(entries, kind):
    return [e for e in entries if e["kind"] == kind]


@pytest.fixture
def answering(monkeypatch):
    """Return a function that answers jobs by kind, with rows or a message, and lists them; skip proof and counters."""
    for part in ("prove", "count"):
        monkeypatch.setattr(command.Session, part, lambda self, job: self.finish(job))

    def make(**answers):
        jobs = []

        def ask(job, limit, end, hear):
            jobs.append(job)
            answer = answers.get(job["kind"], [])
            if not isinstance(answer, list):
                return answer
            for row in answer:
                hear({"row": row | {"op": job["op"], "shape": job["case"]}})
            return {"ok": True}

        monkeypatch.setattr(command, "Worker", Mock(return_value=Mock(ask=ask)))
        return jobs

    return make


@pytest.mark.slow
def test_dry_run_leaves_a_record_and_one_of_the_proof(tmp_path, capsys):
    path = tmp_path / "record.jsonl"
    code, entries = dry_run(path, "--ops", "merge_attention", "write_kv")
    assert code == 0 and entries[0]["commit"] == "abc" and of(entries, "device")[0]["copy_bandwidth_bytes_s"] > 0
    timed = {(r["op"], r["provider"]): r for r in of(entries, "row")}
    assert timed["write_kv", "cpu"]["ok"] and timed["merge_attention", "triton"]["median_s"] > 0
    assert of(entries, "prove")[0]["ok"] and "merge_attention" in of(entries, "prove")[0]["said"]
    proof = json.loads((tmp_path / "record-prove.json").read_text())
    assert proof["verdicts"].keys() | proof["left_out"].keys() == {"merge_attention", "write_kv"}
    assert entries[-1]["finished"] and "0 failed" in capsys.readouterr().out


def test_next_call_does_what_the_record_lacks(tmp_path, monkeypatch, answering):
    path = tmp_path / "record.jsonl"
    answered_jobs = answering(time=[ROW], model=[ROW])
    monkeypatch.setattr(command.Session, "test", lambda self, job: self.finish(job))
    jobs = command.plan(CASES, "cpu", 0.001, sanitizer=False)
    _, first_entries = dry_run(path, "--ops", "add_rank1_")
    assert first_entries[-1]["finished"] and [job["op"] for job in answered_jobs[1:]] == ["add_rank1_"]
    _, second_entries = dry_run(path)
    assert second_entries[-1]["finished"] and second_entries[-1]["left_out"] == []
    assert second_entries[: len(first_entries)] == first_entries
    job_names = sorted(command.name_of(job) for job in answered_jobs)
    planned_jobs = [job for job in jobs if job["kind"] not in ("prove", "tests", "counters")]
    ops = ("add_rank1_", *command.REHEARSED)
    expected_jobs = [job for job in planned_jobs if job["kind"] != "time" or job["op"] in ops]
    assert job_names == sorted(command.name_of(job) for job in expected_jobs)
    num_jobs = len(answered_jobs)
    dry_run(path)
    assert len(answered_jobs) == num_jobs
    # rows of other code, or of code that no commit names, are not reused; the file keeps a copy
    assert len(of(dry_run(path, "--ops", "add_rank1_", "--commit", "abd")[1], "row")) == 1
    assert read(path.with_name("record.jsonl.before"))[0]["commit"] == "abc"
    for commit in ("abd-dirty", "unknown"):
        path.write_text("".join(json.dumps({**e, "commit": commit}) + "\n" for e in second_entries))
        assert len(of(dry_run(path, "--ops", "add_rank1_", "--commit", commit)[1], "row")) == 1


def test_seconds_that_a_stage_leaves_over_go_to_later_ones(tmp_path, answering):
    """All stages before the tests fit into a call."""
    before_tests = command.STAGES[: STAGES.index("tests")]
    assert sum(stage.seconds for stage in before_tests) <= command.BUDGET_S
    answering(time=[ROW])
    _, entries = dry_run(tmp_path / "record.jsonl", "--stages", "facts", "ops", "--budget-seconds", "3000")
    starts = {e["stage"]: e["seconds"] for e in of(entries, "stage") if "decision" in e}
    seconds = {stage.name: 6.0 * stage.seconds for stage in command.STAGES}  # a rehearsal has more time
    assert starts["facts"] == pytest.approx(seconds["facts"], abs=5)
    assert starts["ops"] == pytest.approx(seconds["facts"] + seconds["ops"], abs=5)


def test_inputs_that_cannot_be_made_are_tried_once(tmp_path, answering):
    jobs = answering(time={"ok": False, "message": "the process died with code 7: [/]"})
    code, entries = dry_run(tmp_path / "record.jsonl", "--ops", "top1_delta")
    (row,) = of(entries, "row")
    assert code == 1 and row["provider"] == "the inputs and the reference" and "code 7: [/]" in row["missing"]
    assert sum(job["kind"] == "time" for job in jobs) == 1
    assert {"kind": "done", "job": "time top1_delta: 257 x 1023"} in entries


def test_a_rival_that_is_not_installed_is_no_failure(tmp_path, answering, capsys):
    message = "flashinfer is not installed"
    missing_row = ROW | {"provider": "FlashInfer", "ok": None, "median_s": None, "missing": message}
    answering(time=[ROW, missing_row])
    code, entries = dry_run(tmp_path / "record.jsonl", "--ops", "top1_delta")
    output = " ".join(capsys.readouterr().out.split())
    assert code == 0 and entries[-1]["failed"] == [] and not of(entries, "row")[1]["ok"]
    assert "FlashInfer flashinfer is not installed" in output and "FAILED" not in output


def test_what_the_end_of_the_budget_cuts_is_left_out(tmp_path, answering):
    answering(time={"ok": False, "cut": True})
    code, entries = dry_run(tmp_path / "record.jsonl", "--ops", "delta_matvec")
    assert code == 0 and not of(entries, "row")
    assert "time delta_matvec: 257 x 1023" in entries[-1]["left_out"]


JOB = {"stage": "tests", "kind": "tests", "op": "all", "case": "files", "device": "cpu"}


@pytest.mark.slow
def test_tests_are_recorded_file_by_file(tmp_path, monkeypatch, answering):
    """Run tests of three kinds: a right one, a wrong one, and one that hangs."""
    files = {name: str(tmp_path / f"test_{name}.py") for name in ("right", "wrong", "endless")}
    Path(files["right"]).write_text("def test(): assert True")
    Path(files["wrong"]).write_text("def test_what_fails(): assert False")
    Path(files["endless"]).write_text("import time\ndef test(): time.sleep(600)")
    monkeypatch.setattr(command, "test_files", lambda: list(files.values()))
    monkeypatch.setattr(command, "plan", lambda *_: [JOB])
    monkeypatch.setattr(command, "LEAST_TESTS_S", 0.0)
    monkeypatch.setattr(command, "FEW_TESTS", "test")
    monkeypatch.setattr(command, "FEW_FILES", 3)
    monkeypatch.setitem(command.LIMITS_S, "tests", 100.0)
    monkeypatch.setattr(command, "run", lambda c, env, s: run(c, env, 2 if files["endless"] in c else s))
    answering()
    path = tmp_path / "record.jsonl"
    code, entries = dry_run(path, without=("--no-build",))
    assert code == 1
    tests = {Path(test["file"]).stem.removeprefix("test_"): test for test in of(entries, "tests")}
    assert {name: test["ok"] for name, test in tests.items()} == {"right": True, "wrong": False, "endless": False}
    assert "1 failed" in tests["wrong"]["closing"] and "1 passed" in tests["right"]["closing"]
    assert "cut after 2 s" in tests["endless"]["closing"]
    assert any("test_what_fails" in line for line in tests["wrong"]["failures"])
    # a tested file is not tested again, also where the others were not tested
    path.write_text("".join(line for line in path.open() if '"done"' not in line and "test_right" not in line))
    rerun = Mock(return_value=(0, "1 passed"))
    monkeypatch.setattr(command, "run", rerun)
    code, entries = dry_run(path, without=("--no-build",))
    assert code == 1 and entries[-1]["finished"] and [c.args[0][3] for c in rerun.mock_calls] == [files["right"]]


def test_sanitizer_is_judged_by_its_exit_code(tmp_path, monkeypatch, answering):
    answers = {"memcheck": (0, "6 calls\n"), "racecheck": (9, "ERROR: 1 hazard\n")}
    sanitizer = Mock(side_effect=lambda arguments, env, seconds: answers[arguments[2]])
    monkeypatch.setattr(command, "run", sanitizer)
    answering()
    jobs = [
        job for job in command.plan(CASES, "cuda", 1, True) if job["kind"] == "sanitize" and job["op"] == "similarity"
    ]
    monkeypatch.setattr(command, "plan", lambda *_: jobs)
    code, entries = dry_run(tmp_path / "record.jsonl")
    verdicts = {e["case"]: e for e in of(entries, "sanitize")}
    assert code == 1 and verdicts["memcheck"]["ok"] and verdicts["memcheck"]["message"] == "clean: 6 calls"
    assert not verdicts["racecheck"]["ok"] and "hazard" in verdicts["racecheck"]["log"]
    commands = [arguments[: arguments.index(sys.executable)] for (arguments, *_), _ in sanitizer.call_args_list]
    memcheck = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]
    racecheck = ["compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9"]
    # a call that torch and Triton try out and survive is no error
    assert commands == [memcheck, racecheck]


def test_sanitized_process_calls_the_kernels():
    output = run_python("-m", "bench.gpu.sanitized", "delta_matvec", TRITON_INTERPRET="1")
    calls = [f"delta_matvec on triton: {shape}" for shape in ("257 x 1023", "1 x 1 float32")]
    assert output.splitlines() == [*calls, "2 calls"]


SHARED = ("accuracy", "conftest", "op_calls", "paged_problems", "rank1_cases", "sampling_cases", "support")


def test_tests_of_the_gpu_need_few_packages():
    """A GPU machine may lack what only the trainer needs."""
    imported = set()
    helper_files = [f"tests/{name}.py" for name in SHARED]
    proof = [path.relative_to(command.ROOT) for path in (command.ROOT / "rlkernels/proof").rglob("*.py")]
    for file in [*command.test_files(), *helper_files, "tests/rlkernels/triton/conftest.py", *proof]:
        imported |= set(re.findall(r"^(?:from|import) (\w+)", (command.ROOT / file).read_text(), re.MULTILINE))
    imported -= {"rlkernels", "bench", *SHARED, *sys.stdlib_module_names}
    assert imported <= {"torch", "triton", "pytest", "numpy", "yaml"}


SETUP = """
import os, sys
without = os.environ.get("RLKERNELS_NO_CUDA") == "1"
print("what the compiler said, without CUDA" if without else "what the compiler said", flush=True)
sys.exit({without} if without else {with_cuda})
"""


@pytest.mark.parametrize(("with_cuda", "codes", "ok"), [(True, (0, 1), [True]), (True, (1, 0), [False, True]),
                                                        (False, (1, 0), [True]), (False, (0, 1), [False])])  # fmt: skip
def test_build_goes_on_without_the_cuda_part(tmp_path, monkeypatch, with_cuda, codes, ok):
    (tmp_path / "setup.py").write_text(SETUP.format(with_cuda=codes[0], without=codes[1]))
    monkeypatch.setattr("bench.gpu.build.ROOT", tmp_path)
    monkeypatch.delenv("RLKERNELS_NO_CUDA", raising=False)
    build = Build("cpu", with_cuda=with_cuda)
    assert build.done(120)
    result = build.found
    assert [result["ok"], *([result["without_cuda"]["ok"]] if "without_cuda" in result else [])] == ok
    assert result["ok"] or "what the compiler said" in result["log"]
    build.stop()


def test_build_that_is_not_done_in_time_is_ended(tmp_path, monkeypatch):
    (tmp_path / "setup.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr("bench.gpu.build.ROOT", tmp_path)
    build = Build("cpu")
    assert not build.done(0.2) and not build.found
    build.stop()
    assert build.process.poll() is not None


@pytest.mark.parametrize("is_done", [True, False])
def test_a_slow_build_is_waited_for_half_of_the_time_at_most(tmp_path, monkeypatch, answering, is_done):
    build = Mock(found={"ok": True, "seconds": 1.0})
    build.done.return_value = is_done
    start = Mock(return_value=build)
    jobs = answering(time=[ROW], model=[ROW])
    proved_jobs = []
    monkeypatch.setattr(command, "Build", start)
    monkeypatch.setattr(command, "extension_error", lambda: "it is missing")
    monkeypatch.setattr(command.Session, "prove", lambda self, job: proved_jobs.append(job))
    code, entries = dry_run(tmp_path / "record.jsonl", "--budget-seconds", "100", without=("--no-tests",))
    assert code == 0
    start.assert_called_once_with("cpu")
    *waits, last_call = build.mock_calls
    assert last_call == call.stop() and all(0 <= wait.args[0] <= 50 for wait in waits)
    assert len(of(entries, "build")) == is_done == len(proved_jobs)
    # jobs that need no extension did not wait; those that need it are left for the next call
    timed_ops = [job["op"] for job in jobs if job["kind"] == "time"]
    assert timed_ops[0] == "grouped_attention" and {*timed_ops} == {*command.REHEARSED}
    left_out = entries[-1]["left_out"]
    assert any(line.startswith("prove") for line in left_out) and not any(line.startswith("model") for line in left_out)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pid):
    deadline = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_command_is_cut_with_all_that_it_started():
    code, output = run(["sh", "-c", "sleep 600 & echo $!; wait"], dict(os.environ), 2.0)
    child, *note = output.splitlines()
    assert code is None and note == ["", "cut after 2 s"]
    wait_for_end(int(child))
    assert run(["sh", "-c", "echo said; exit 3"], dict(os.environ), 60) == (3, "said\n")


def test_unknown_op_and_missing_gpu_are_named(capsys):
    with pytest.raises(SystemExit):
        command.main(["--ops", "no_such_op"])
    assert "no op named no_such_op" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            command.main([])
        assert "no CUDA device" in capsys.readouterr().err


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Return a function that runs the command on the cases of tests/planted.py, without the proof."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]), prepend=os.pathsep)
    monkeypatch.setenv("PLANTED_PID", str(tmp_path / "pid"))
    monkeypatch.setattr(command.Session, "prove", lambda self, job: self.finish(job))
    return partial(dry_run, cases="planted:TIMED")


def rows(entries):
    return {(e["shape"], e["provider"]): e for e in of(entries, "row")}


@pytest.mark.slow
def test_who_dies_hangs_or_is_wrong_is_named_and_the_others_are_timed(tmp_path, monkeypatch, planted, capsys):
    path = tmp_path / "record.jsonl"
    monkeypatch.setitem(command.LIMITS_S, "time", 20.0 / 6)
    ops = ("merge_attention", "write_kv", "delta_matvec", "add_rank1_")
    code, entries = planted(path, "--ops", *ops)
    results = rows(entries)
    for shape in ("dies", "hangs", "wrong", "fails"):
        for name in ("cpu", "torch"):
            row = results[shape, name]
            assert row["ok"] and row["median_s"] > 0 and row["error"] == 0
    assert "died with code -9" in results["dies", "triton"]["missing"]
    assert results["hangs", "triton"]["missing"] == "hung for 20 s and was killed"
    assert "no room for 40 GiB" in results["fails", "triton"]["missing"]
    wrong_row = results["wrong", "triton"]
    assert not wrong_row["ok"] and "median_s" not in wrong_row and wrong_row["error"] == pytest.approx(0.3)
    assert wrong_row["allowed"] < 1e-3 and code == 1 and len(entries[-1]["failed"]) == 4
    output = " ".join(capsys.readouterr().out.split())
    assert "failed: time merge_attention dies triton: the process died" in output
    # a second call does no job again
    monkeypatch.setattr(command.Session, "work", lambda self, jobs: jobs and pytest.fail(f"{jobs}"))
    assert planted(path, "--ops", *ops)[0] == 1 and len(read(path)) == len(entries) + 2  # call and end


SLOW = ("token_logprobs", "sample_tokens", "verify_drafts", "top1_delta")


@pytest.mark.slow
def test_killed_call_leaves_its_rows_and_the_next_one_goes_on(tmp_path, planted):
    path = tmp_path / "record.jsonl"
    script = "import sys; from bench.gpu.session import main; sys.exit(main(sys.argv[1:], 'planted:TIMED'))"
    options = [*OPTIONS, *QUICK, "--output", str(path), "--ops", *SLOW]
    command_process = subprocess.Popen([sys.executable, "-c", script, *options], cwd=ROOT)
    while not (path.exists() and sum('"row"' in text for text in path.read_text().splitlines()) >= 4):
        assert command_process.poll() is None
        time.sleep(0.05)
    command_process.send_signal(signal.SIGKILL)
    command_process.wait(timeout=30)
    worker_pid = int((tmp_path / "pid").read_text())
    wait_for_end(worker_pid)  # a worker that outlived the command would keep the device from the next one
    first_entries = read(path)
    assert 4 <= len(of(first_entries, "row")) < 12 and "end" not in {e["kind"] for e in first_entries}
    with path.open("a") as file:
        file.write('{"kind": "row", "of": "ti')  # the line that the kill cut
    code, entries = planted(path, "--ops", *SLOW)
    assert code == 0 and entries[: len(first_entries)] == first_entries
    timed_rows = sorted((e["op"], e["provider"]) for e in of(entries, "row"))
    assert timed_rows == sorted(itertools.product(SLOW, ("cpu", "triton", "torch")))
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_end_of_the_budget_is_not_a_failure(tmp_path, planted):
    code, entries = planted(tmp_path / "record.jsonl", "--ops", "token_logprobs", "--budget-seconds", "0")
    assert code == 0 and not rows(entries) and "time token_logprobs: slow" in entries[-1]["left_out"]


@pytest.mark.slow
def test_process_that_outlives_sigkill_ends_the_call(tmp_path, monkeypatch, planted):
    """Keep a process that waits in a driver: nothing more is started, and nothing waits for ever."""
    kill_process = process.kill
    killed_processes = []

    def kill(running):
        killed_processes.append(running)
        kill_process(running)

    monkeypatch.setattr(process, "kill", kill)
    monkeypatch.setitem(command.LIMITS_S, "time", 20.0 / 6)
    code, entries = planted(tmp_path / "record.jsonl", "--ops", "write_kv", "delta_matvec")
    assert code == 1 and "still runs" in entries[-1]["lost"] and len(killed_processes) == 1
    assert ("wrong", "cpu") not in rows(entries) and "time delta_matvec: wrong" in entries[-1]["left_out"]


def test_decode_is_timed_by_replay_too_and_rivals_with_their_copies():
    case = Case("paged_attention", "4 of 40", partial(attention.paged, [40] * 4, [1] * 4, (4, 2, 16), 8, torch.float32))
    messages = []
    timed_rows = [["4 of 40", "triton"]]
    for late in (False, True):  # compiled providers come last
        assert run_contest(case, torch.device("cpu"), 0.01, timed_rows, messages.append, late) == {"ok": True}
        timed_rows += [["4 of 40", message["row"]["provider"]] for message in messages if "row" in message]
    order = [message["row"]["provider"] for message in messages if "row" in message]
    assert order == ["cpu", "torch", "torch SDPA", "torch varlen", "FlashInfer", "flash-attn", "torch FlexAttention"]
    rows = {message["row"]["provider"]: message["row"] for message in messages if "row" in message}
    replays = {message["replay"]["provider"]: message["replay"] for message in messages if "replay" in message}
    assert rows["torch SDPA"]["copy_s"] > 0 and "copy_s" not in rows["torch"]
    assert replays["torch SDPA"]["replay_s"] > 0 and replays["cpu"]["ok"]
    # a rival that is not installed, or has no code for the device, is no failure, and its row says why
    assert rows["FlashInfer"]["ok"] is None and rows["FlashInfer"]["missing"] == "flashinfer is not installed"
    assert rows["torch varlen"]["ok"] is None and "torch varlen" not in replays
    entries = [{"kind": "row", **row} for row in rows.values()]
    entries += [{"kind": "replay", **replay} for replay in replays.values()]
    (line,) = summary(entries)
    assert line.startswith("paged_attention, 4 of 40: ") and "torch SDPA " in line and ", replayed " in line


def test_sampling_is_timed_as_engines_do_it():
    """A wait for bad rows, which no rival has, would keep it out of a CUDA graph."""
    with pretended() as waits:
        problem = logits.sample(3, 40, torch.float32, [(1.0, 1.0, 0)], torch.device("cuda"))
        waits.clear()
        problem.call("torch")
        assert not waits.total()


def test_peaks_are_of_their_own_run(monkeypatch):
    peak = [9]  # of the run before
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: peak.__setitem__(0, 2))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak[0])
    peaks = Peaks(torch.device("cuda"))
    peaks.note("generation")
    peak[0] = 5
    peaks.note("the update")
    assert peaks.phases == {"generation": 2, "the update": 5}


def test_counters_are_read_from_the_report():
    """Read the CSV that Nsight Compute writes after messages of its own."""
    text = """==PROF== Connected to process 7
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","python3","127.0.0.1","_decode_kernel","1","7","(128, 1, 1)","(256, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","134,217,728"
"0","7","python3","127.0.0.1","_decode_kernel","1","7","(128, 1, 1)","(256, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","42,016"
"1","7","python3","127.0.0.1","_merge_kernel","1","7","(128, 1, 1)","(256, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","n/a"
"""  # noqa: E501
    assert counters.read(text) == [
        {"kernel": "_decode_kernel", "dram__bytes_read.sum": 134217728.0, "gpu__time_duration.sum": 42016.0},
        {"kernel": "_merge_kernel", "gpu__time_duration.sum": None},
    ]
    assert counters.read("==ERROR== no permission\n") == []


def test_a_proof_that_leaves_ops_out_goes_on_in_the_next_call(tmp_path, monkeypatch):
    args = command.parse([*OPTIONS, "--output", str(tmp_path / "record.jsonl")])
    args.rehearse = False
    session = command.Session(args, "bench.gpu.cases:CASES", Console(quiet=True))
    monkeypatch.setattr(command, "run", prover := Mock(side_effect=[(1, "no time left"), (0, "")]))
    job = {"kind": "prove", "op": "all", "case": "a step"}
    for done in (False, True):
        session.prove(job)
        assert session.journal.done(command.name_of(job)) == done
    assert ["--again" in call_args.args[0] for call_args in prover.call_args_list] == [True, False]


def test_a_mistake_of_a_stage_leaves_the_others(tmp_path, monkeypatch, answering):
    answering(time=[ROW])
    monkeypatch.setattr(command.Session, "count", lambda self, job: {}["no such metric"])
    code, entries = dry_run(tmp_path / "record.jsonl", "--stages", "ops", "counters", "sharded")
    (mistake,) = of(entries, "mistake")
    assert code == 1 and "no such metric" in mistake["message"] and mistake["job"].startswith("counters")
    started_stages = [e["stage"] for e in of(entries, "stage") if "decision" in e]
    assert started_stages == ["ops", "sharded", "counters"] and all(e["decision"] for e in of(entries, "stage")[::2])


@pytest.mark.slow
def test_rehearsal_of_all_stages(tmp_path):
    """Run every stage: each leaves its rows, but those that need CUDA's kernels or compute-sanitizer."""
    path = tmp_path / "record.jsonl"
    options = [*OPTIONS, "--output", str(path), "--budget-seconds", "3000"]
    subprocess.run([sys.executable, "-m", "bench.gpu.session", *options], cwd=ROOT, check=True)
    entries = read(path)
    assert entries[-1]["failed"] == [] and not of(entries, "mistake")
    assert [e["stage"] for e in of(entries, "stage") if "took_s" in e] == STAGES[:-1]
    results = {(e["of"], e["op"], e["provider"]) for e in of(entries, "row") if e["ok"]}
    assert {op for kind, op, _ in results if kind == "time"} == {*command.REHEARSED}
    arms = {provider for kind, _, provider in results if kind == "update"}
    assert arms >= {"TRL", "rlkernels", "TRL, compiled layers", "rlkernels, compiled layers"}
    assert ("preset", "preset", "python_trainer") in results and ("sharded", "fsdp2", "python_trainer") in results
    assert {op for kind, op, _ in results if kind == "model"} and of(entries, "replay")
    assert of(entries, "prove")[0]["ok"] and of(entries, "counted")[0]["ok"]
    assert all(e["ok"] for e in of(entries, "tests")) and of(entries, "tests")
