"""A rank that is stopped, late or cut off is named by the others, and a limit ends their waiting."""

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support import ROOT

from python_trainer import __main__ as program
from python_trainer.distributed import watch
from python_trainer.distributed.watch import BEATS, Watch

LIMIT = "; a process that waits 600 s (ddp_timeout) ends the run"


def place(rank, size=3, entered=5, waits=True):
    return SimpleNamespace(rank=rank, size=size, entered=entered, waits=waits)


def lines(watch, signs, turns):
    """Return lines of so many turns, in each of which every rank has a sign by ``signs``: (number, entered)."""
    messages = []
    for turn in range(turns):
        watch.signs = [sign(turn) for sign in signs]
        messages.append(watch.turn())
    return messages


def alive(turn):
    return turn, 5


def stopped(turn):
    return 7, 4


def late(turn):
    return turn, 4


def test_a_stopped_rank_is_named_once_a_minute_by_the_first_of_the_others():
    message = "process 0 of 3 has sent no sign of life for {} s: stopped, or out of reach" + LIMIT
    messages = lines(Watch(place(1), None, 600), [stopped, alive, alive], 2 * BEATS + 1)
    assert watch.BEAT * BEATS == 60
    assert messages == [None] * BEATS + [message.format(60)] + [None] * (BEATS - 1) + [message.format(120)]
    assert not any(lines(Watch(place(2), None, 600), [stopped, alive, alive], 2 * BEATS + 1))
    (two_ranks,) = filter(None, lines(Watch(place(2), None, 600), [stopped, stopped, alive], BEATS + 1))
    assert two_ranks.startswith("processes 0, 1 of 3 have sent no sign of life for 60 s")


def test_a_late_rank_is_named_where_others_wait_for_it():
    """Its reward function hangs: it lives, and does not come."""
    message = "the others have waited {} s for process 1 of 3, still at work" + LIMIT
    messages = lines(Watch(place(0), None, 600), [alive, late, alive], 2 * BEATS + 1)
    assert messages == [None] * BEATS + [message.format(60)] + [None] * (BEATS - 1) + [message.format(120)]
    for other_place in (place(2), place(1, entered=4, waits=False), place(0, waits=False)):
        assert not any(lines(Watch(other_place, None, 600), [alive, late, alive], 2 * BEATS))


def test_nobody_is_named_while_all_come():
    ranks = place(0)
    working = Watch(ranks, None, 600)
    for turn in range(3 * BEATS):
        ranks.entered = 5 + turn  # in each turn another collective
        working.signs = [(turn, ranks.entered), (turn, ranks.entered - 1), (turn, ranks.entered)]
        assert working.turn() is None and not working.finding


def test_a_store_that_does_not_answer_accuses_no_rank_but_its_host():
    (message,) = filter(None, lines(Watch(place(1), None, 600), [stopped] * 3, BEATS + 1))
    assert message.startswith("the store, on the host of process 0, has not answered for 60 s")


def test_a_rank_that_goes_on_after_a_stop_accuses_nobody():
    """The others have sent many signs in the meantime; its own clock has had one turn."""
    own_watch = Watch(place(0), None, 600)
    assert not any(lines(own_watch, [alive] * 3, 3))
    own_watch.signs = [(3, 5), (4000, 5), (4000, 5)]
    assert own_watch.turn() is None


STOPPED = """
import os, signal, sys
from datetime import timedelta
import torch.distributed as dist
from python_trainer import __main__ as program
from python_trainer.distributed import start, watch

watch.BEAT, watch.BEATS = 0.25, 4

def call(args):
    with start("ddp", "cpu", timeout=300.0) as ranks:
        ranks.gather(None)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))  # not before both have come
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        ranks.gather(None)

from python_trainer.command_line import commands
commands.parse_arguments = lambda argv: type("Arguments", (), {"call": call})
sys.stdout.flush()
os._exit(program.main())
"""


@pytest.mark.slow  # two processes import torch
def test_a_rank_that_is_stopped_holds_the_others_no_longer_than_the_limit():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen([sys.executable, "-c", STOPPED], env={**env, "RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        errors = processes[0].communicate(timeout=300)[1]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    *notes, error = [line for line in errors.splitlines() if not line.startswith("[")]  # torch's own
    assert processes[0].returncode == 2, errors
    # on a busy machine the rank may be named as late before it is stopped
    assert any(note.startswith("note: process 1 of 2 has sent no sign of life for ") for note in notes), errors
    assert all("process 1 of 2" in note for note in notes), errors
    assert error.startswith(
        "error: process 0 of 2: another process did not come within ddp_timeout; process 1 of 2 has"
    )


@pytest.mark.parametrize("text", [
    "[unbound_buffer.cc:129] Timed out waiting 2000ms for send operation to complete",
    "Application timeout caused pair closure",
    "wait timeout after 2000ms, keys: /default_pg/0//cpu//0/0",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)",
])  # fmt: skip
def test_the_end_of_waiting_is_told_in_one_line(text):
    """Check both messages of gloo, the store's and NCCL's."""
    assert program.explain(RuntimeError(text)) == "another process did not come within ddp_timeout"
