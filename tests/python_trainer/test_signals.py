"""A signal in a long step: the last finished step is saved at once, and a resumed run ends as an undisturbed one."""

import asyncio
import math
import os
import random
import signal
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import LORA, MAX_WAIT_S, QUIET, assert_goes_on, digits, saved, wait_for

from python_trainer.accelerators.base import Accelerator
from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.data import Rollout
from python_trainer.errors import UserError
from python_trainer.loop.checkpointer import Checkpointer
from python_trainer.loop.learner import Learner
from python_trainer.process.signals import SIGNALS, StopSignal
from python_trainer.run import last_step
from python_trainer.run.directory import read_metrics
from python_trainer.run.last_step import LastStep, copy_to_host, free_memory
from python_trainer.trainer import Trainer


@pytest.fixture
def interrupt(tmp_path):
    """Return a function that signals the run, waits for a checkpoint, and signals once more."""

    def send(number=signal.SIGTERM, checkpoint="step-000002"):
        os.kill(os.getpid(), number)
        wait_for(checkpoint, tmp_path / "run")
        os.kill(os.getpid(), number)
        time.sleep(MAX_WAIT_S)  # where another thread has sent the signal

    return send


@pytest.fixture
def reward(monkeypatch):
    """Return a function that sets what the reward does in a step, the first time it is called there."""

    def replace(function, step=3):
        current = [0]
        original = Trainer.step

        def note(self, number):
            current.append(number)
            return original(self, number)

        def judge(**columns):
            current_step = current.pop() if current[-1] == step else 0
            return (current_step and function()) or digits(**columns)

        monkeypatch.setattr(Trainer, "step", note)
        monkeypatch.setattr("conftest.digits", Mock(side_effect=judge, __name__="digits"))

    return replace


def sleeping(interrupt, number):
    return lambda: interrupt(number)


def waiting(interrupt, number):
    async def judge():
        await asyncio.to_thread(interrupt, number)

    return judge


def computing(interrupt, number):
    """Return a reward in compiled code that no signal ends: the main thread sees none."""

    def judge():
        database = sqlite3.connect(":memory:", check_same_thread=False)
        main = threading.main_thread().ident

        def send():
            os.kill(os.getpid(), number)
            wait_for("step-000002", judge.folder)
            database.interrupt()

        threading.Thread(target=send).start()
        endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT count(*) FROM c"
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            database.execute(endless).fetchone()
        signal.pthread_kill(main, number)

    return judge


@pytest.mark.parametrize(("slow", "number"), [*zip([sleeping, waiting, computing], SIGNALS, strict=True)])
def test_a_signal_in_a_reward_saves_the_last_finished_step(run, tmp_path, reward, interrupt, slow, number):
    function = slow(interrupt, number)
    function.folder = tmp_path / "run"
    reward(function)
    code, errors = run({"save": {"save_steps": 0}})
    name = signal.Signals(number).name
    assert code == 130 and saved(tmp_path / "run") == ["step-000002"]
    assert f"{name}: step 2 is saved, and the step under way goes on" in errors
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2]
    reward(lambda: None)
    assert_goes_on(run, tmp_path)


class Rehearses(Accelerator):
    """Train on a stored answer before step 3 generates."""

    def before_step(self, context):
        if context.step != 3:
            return []
        stored = {
            "logprobs": [math.nan] * 3,
            "reward": 1.0,
            "accuracy": 1.0,
            "importance_cap": 1.0,
            "success_rate": 0.5,
        }
        return [[Rollout(context.run.prompts[0], [1, 2, 3], **stored)]]


class RehearsesSettings(AcceleratorSettings):
    """Train on stored answers."""

    name = "rehearses"
    accelerator = "test_signals:Rehearses"


STORED = {"accelerators": {"enabled": ["test_signals:RehearsesSettings"]}, "save": {"save_steps": 0}}


@pytest.mark.parametrize("changes", [
    {"model": {"lora": LORA}},
    {"algorithm": {"advantage": "gae", "beta": 0.1, "num_minibatches": 2}, "critic": {"separate": True}},
    {"accelerators": {"enabled": ["rpo", "rhyme"], "rpo": {"preset": "paper"}}, "rollout": {"schedule": "history"}},
    {"parallel": "fsdp2"},
    STORED,  # the weights of the last finished step are gone, but for the copy that was made in time
])  # fmt: skip
def test_every_part_of_a_checkpoint_is_saved_at_once(run, tmp_path, reward, interrupt, changes):
    reward(interrupt)
    assert run(changes | {"save": {"save_steps": 0}})[0] == 130 and saved(tmp_path / "run") == ["step-000002"]
    reward(lambda: None)
    assert_goes_on(run, tmp_path)


@pytest.mark.parametrize(("place", "step"), [("generate", 2), ("evaluate_if_due", 3), ("evaluate_if_due", 4)])
def test_a_signal_elsewhere_in_a_step(run, tmp_path, monkeypatch, interrupt, place, step):
    """In a long rollout, in an evaluation and in that at the end."""
    changes = {"save": {"save_steps": 0}, "evaluation": {"eval_steps": 3}}
    checkpoint = f"step-{step:06d}"
    original = getattr(Trainer, place)

    def take_long(self, *arguments, **options):
        if self.state.step == step:
            interrupt(checkpoint=checkpoint)
        return original(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, place, take_long)
        assert run(changes)[0] == 130 and saved(tmp_path / "run") == [checkpoint]
    assert_goes_on(run, tmp_path)
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("run", "whole")]
    assert samples[0] == samples[1]


@pytest.mark.parametrize(("room", "message"), [(1 << 40, "step 2 is saved"), (0, "no step is saved")])
def test_an_error_after_an_update_on_stored_answers(run, reward, monkeypatch, room, message):
    monkeypatch.setattr(last_step, "free_memory", lambda: room)
    reward(lambda: 1 / 0)
    code, error = run(STORED)
    assert code == 2 and message in error


def test_a_signal_in_an_update_lets_it_end(run, tmp_path, monkeypatch):
    """Then the step is saved, while it is evaluated."""
    original = Learner.update

    def update(self, rollouts, number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, rollouts, number)

    def evaluate(self):
        wait_for("step-000003", tmp_path / "run")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Learner, "update", update)
    monkeypatch.setattr(Trainer, "evaluate_if_due", lambda self, **_: evaluate(self) if self.state.step == 3 else {})
    assert run({"save": {"save_steps": 0}})[0] == 130
    assert saved(tmp_path / "run") == ["step-000003"]


def test_a_copy_without_room_lets_the_step_end(run, tmp_path, monkeypatch, reward):
    monkeypatch.setattr(last_step, "free_memory", lambda: 0)
    reward(lambda: os.kill(os.getpid(), signal.SIGTERM))
    code, errors = run({"save": {"save_steps": 0}})
    assert code == 0 and saved(tmp_path / "run") == ["step-000003"]
    assert "under way" not in errors and "SIGTERM: stopped after step 3, which is saved" in errors


def test_a_copy_takes_a_quarter_of_the_free_memory(monkeypatch):
    tensors = {"model": {"w": torch.ones(3)}, "critic": None}
    for free, ranks, fits in ((48, 1, True), (47, 1, False), (95, 2, False), (96, 2, True)):
        monkeypatch.setattr(last_step, "free_memory", lambda free=free: free)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert (copy_to_host(tensors) is not None) == fits
    copy = copy_to_host(tensors)
    tensors["model"]["w"].zero_()
    assert copy["model"]["w"].tolist() == [1.0] * 3 and copy["critic"] is None
    monkeypatch.undo()
    assert 0 < free_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_free_memory_of_a_control_group(monkeypatch, tmp_path):
    group = tmp_path / Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
    group.mkdir(exist_ok=True, parents=True)
    monkeypatch.setattr(last_step, "CGROUP", tmp_path)
    for limit, free in (("3000\n", 1000), ("max\n", free_memory())):
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text("2000\n")
        assert free_memory() == pytest.approx(free, rel=0.5)


def test_the_checkpoint_of_the_step_takes_the_place_of_the_early_one(run, tmp_path, reward):
    """The early checkpoint costs no other one: those that save_total_limit spares are there."""
    checkpoints = []

    def interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for("step-000005", tmp_path / "run")
        checkpoints.extend(saved(tmp_path / "run"))

    reward(interrupt, step=6)
    assert run({"max_steps": 8, "save": {"save_steps": 2}})[0] == 0
    assert checkpoints == ["step-000002", "step-000004", "step-000005"]
    assert saved(tmp_path / "run") == ["step-000004", "step-000006"]


def test_an_early_checkpoint_that_cannot_be_written_is_told(run, tmp_path, monkeypatch, reward):
    failed = threading.Event()

    def write(self, contents, learned, ranks):
        if threading.current_thread() is threading.main_thread():
            return original(self, contents, learned, ranks)
        failed.set()
        raise UserError("checkpoint step-000002 cannot be written: No space left on device")

    original = Checkpointer._write_checkpoint
    monkeypatch.setattr(Checkpointer, "_write_checkpoint", write)
    reward(lambda: os.kill(os.getpid(), signal.SIGTERM) or (failed.wait(MAX_WAIT_S) and None))
    code, errors = run({"save": {"save_steps": 0}})
    assert code == 0 and "No space left on device" in errors and saved(tmp_path / "run") == ["step-000003"]


def test_signals_to_a_forked_process_end_it_alone(run, tmp_path, reward):
    """Send the signals by which multiprocessing ends its workers."""
    codes = []

    def judge():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    reward(judge)
    code, errors = run()
    assert code == 0 and codes == [-signal.SIGTERM] and "SIGTERM" not in errors
    assert saved(tmp_path / "run") == ["step-000002", "step-000004"]


@pytest.fixture
def in_a_terminal():
    """Set SIGHUP as a terminal leaves it; under nohup it is ignored, and stays so."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler)


def test_a_closed_terminal_stops_nothing(run, tmp_path, reward, in_a_terminal):
    reward(lambda: os.kill(os.getpid(), signal.SIGHUP))
    code, errors = run()
    assert code == 0 and "SIGHUP: the terminal is closed, and the run goes on" in errors
    assert saved(tmp_path / "run") == ["step-000002", "step-000004"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_the_handlers_of_others_come_back(in_a_terminal):
    handlers = [signal.getsignal(number) for number in (*SIGNALS, signal.SIGHUP)]
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    with StopSignal():
        assert signal.getsignal(signal.SIGHUP) != handlers[-1]
    assert signal.set_wakeup_fd(-1) == writer.fileno()
    assert [signal.getsignal(number) for number in (*SIGNALS, signal.SIGHUP)] == handlers
    reader.close()
    writer.close()


def test_a_trainer_in_another_thread_goes_without_signals(make_config, tmp_path):
    with ThreadPoolExecutor(1) as thread:
        thread.submit(Trainer(make_config(max_steps=1), tmp_path / "run", console=QUIET).run).result()
    assert saved(tmp_path / "run") == ["step-000001"]


class Rank:
    """A rank whose sections wait for the other ranks in their midst, as a collective does."""

    def __init__(self, store, number, ranks):
        self.last = LastStep(store, number, len(ranks.names))
        self.random = random.Random(f"{ranks.seed}/{number}")
        self.ranks = ranks
        self.ended = threading.Event()
        self.copied = None

    def train(self):
        for step in range(1, STEPS + 1):
            time.sleep(self.random.random() / 500)
            with self.last.section():
                self.ranks.barrier.wait(MAX_WAIT_S)
                time.sleep(self.random.random() / 500)
                self.last.note({"step": step})
            with self.last.section(writes=True):
                self.ranks.barrier.wait(MAX_WAIT_S)
        self.ended.set()

    def act(self):
        time.sleep(self.random.random() * STEPS / 500)
        with self.last.copied(lambda: {"step": torch.tensor(self.last.contents["step"])}, self.ended) as copied:
            self.copied = copied


STEPS = 12


@pytest.mark.parametrize("seed", range(8))
def test_ranks_agree_on_a_step_wherever_each_of_them_is(monkeypatch, seed):
    """No rank waits for another one for ever: the barrier would tell."""
    monkeypatch.setattr(last_step, "POLL", 0.001)
    store = dist.HashStore()
    size = 3
    ranks = SimpleNamespace(seed=seed, names=range(size), barrier=threading.Barrier(size))
    all_ranks = [Rank(store, number, ranks) for number in range(size)]
    with ThreadPoolExecutor(2 * size) as threads:
        for future in [threads.submit(f) for rank in all_ranks for f in (rank.train, rank.act)]:
            future.result()
    steps = {rank.copied and (rank.copied[0]["step"], int(rank.copied[1]["step"])) for rank in all_ranks}
    assert len(steps) == 1, steps
    (step,) = steps
    assert step is None or step[0] == step[1]
