"""The GPU command with providers that die, hang and are wrong, killed in its midst, and with a device that is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from test_bench_gpu import OPTIONS, dry_run

from bench.gpu import __main__ as command
from bench.gpu.journal import ROOT, read
from rlkernels.proof import process

run = partial(dry_run, cases="planted:TIMED")
SLOW = ("token_logprobs", "sample_tokens", "verify_drafts", "top1_delta")


@pytest.fixture(autouse=True)
def planted(monkeypatch, tmp_path):
    """Workers find the cases of tests/planted.py, and nothing is proved."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PLANTED_PID", str(tmp_path / "pid"))
    monkeypatch.setattr(command.Session, "prove", lambda self, job: self.finish(job))


def rows(entries):
    return {(e["shape"], e["provider"]): e for e in entries if e["kind"] == "row"}


@pytest.mark.slow
def test_who_dies_hangs_or_is_wrong_is_named_and_the_others_are_timed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.jsonl"
    monkeypatch.setitem(command.LIMITS_S, "time", 20.0)
    ops = ("merge_attention", "write_kv", "delta_matvec", "add_rank1_")
    code, entries = run(path, "--ops", *ops)
    found = rows(entries)
    for shape in ("dies", "hangs", "wrong", "fails"):
        for name in ("cpu", "torch"):
            assert found[shape, name]["ok"] and found[shape, name]["median_s"] > 0 and found[shape, name]["error"] == 0
    assert "died with code -9" in found["dies", "triton"]["missing"]
    assert found["hangs", "triton"]["missing"] == "hung for 20 s and was killed"
    assert "no room for 40 GiB" in found["fails", "triton"]["missing"]
    wrong = found["wrong", "triton"]
    assert not wrong["ok"] and "median_s" not in wrong and wrong["error"] == pytest.approx(0.3)
    assert wrong["allowed"] < 1e-3 and code == 1 and len(entries[-1]["failed"]) == 4
    printed = " ".join(capsys.readouterr().out.split())
    assert "failed: time merge_attention dies triton: the process died" in printed
    # what was found is not looked for again
    monkeypatch.setattr(command.Session, "work", lambda self, jobs: jobs and pytest.fail(f"{jobs}"))
    assert run(path, "--ops", *ops)[0] == 1 and len(read(path)) == len(entries) + 2  # call and end


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_killed_call_leaves_its_rows_and_the_next_one_goes_on(tmp_path):
    path = tmp_path / "record.jsonl"
    script = "import sys; from bench.gpu.__main__ import main; sys.exit(main(sys.argv[1:], 'planted:TIMED'))"
    killed = subprocess.Popen([sys.executable, "-c", script, *OPTIONS, "--output", str(path), "--ops", *SLOW], cwd=ROOT)
    while not (path.exists() and sum('"row"' in text for text in path.read_text().splitlines()) >= 4):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=30)
    worker, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 30
    while alive(worker):  # it goes with the command: it would keep the device from the next one
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kept = read(path)
    assert 4 <= sum(e["kind"] == "row" for e in kept) < 12 and "end" not in {e["kind"] for e in kept}
    with path.open("a") as file:
        file.write('{"kind": "row", "of": "ti')  # a line that was being written
    code, entries = run(path, "--ops", *SLOW)
    assert code == 0 and entries[: len(kept)] == kept
    assert {e["provider"] for e in entries if e["kind"] == "row"} == {"cpu", "triton", "torch"}
    assert len({(e["op"], e["provider"]) for e in entries if e["kind"] == "row"}) == 12
    assert sum(e["kind"] == "row" for e in entries) == 12
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_end_of_the_budget_is_not_a_failure(tmp_path):
    code, entries = run(tmp_path / "record.jsonl", "--ops", "token_logprobs", "--budget-seconds", "0")
    assert code == 0 and not rows(entries) and "time token_logprobs: slow" in entries[-1]["left_out"]


@pytest.mark.slow
def test_process_that_outlives_sigkill_ends_the_call(tmp_path, monkeypatch):
    """As one does that waits in a driver. Nothing more is started, and nothing waits for ever."""
    really, ended = process.kill, []

    def kill(running):
        ended.append(running)
        really(running)

    monkeypatch.setattr(process, "kill", kill)
    monkeypatch.setitem(command.LIMITS_S, "time", 20.0)
    code, entries = run(tmp_path / "record.jsonl", "--ops", "write_kv", "delta_matvec")
    assert code == 1 and "still there" in entries[-1]["lost"] and len(ended) == 1
    assert ("wrong", "cpu") not in rows(entries) and "time delta_matvec: wrong" in entries[-1]["left_out"]
