"""Trainers in separate processes that take turns: one step or one evaluation at a time.

So a slow hour of the machine hits all of them alike. A waiting trainer takes no processor time.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from python_trainer.errors import Interrupted
from python_trainer.run.callbacks import Callback


class Turns(Callback):
    """The trainer's end of the pipe, as a callback: a turn ends after each step and after each evaluation."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.waiting_s = 0.0

    def end_turn(self, report: Any = None) -> None:
        """Send a report of the finished turn, and wait for the next."""
        start = time.perf_counter()
        try:
            self.connection.send(report)
            self.connection.recv()
        except (EOFError, BrokenPipeError):  # the other process has ended; a later one resumes from the checkpoint
            os._exit(1)
        self.waiting_s += time.perf_counter() - start

    def clock(self) -> float:
        """Return seconds of this process: on a CPU its CPU time, on a GPU the time of its turns."""
        return time.perf_counter() - self.waiting_s if torch.cuda.is_available() else time.process_time()

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.end_turn()

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.end_turn()


class Worker:
    """A process that trains turn by turn. Its first turn starts it.

    Args:
        train: called in the process with :class:`Turns` and ``arguments``.
    """

    def __init__(self, train: Callable[..., None], *arguments: Any):
        context = multiprocessing.get_context("forkserver")  # loads torch and the trainer once for all of them
        context.set_forkserver_preload(["bench._turns", "python_trainer.trainer", train.__module__])
        self.connection, self._worker_connection = context.Pipe()
        work = (self._worker_connection, train, torch.get_num_threads(), arguments)
        self.process = context.Process(target=_work, args=work, daemon=True)

    def turn(self) -> bool:
        """Let the process take a turn, and set ``self.report`` to what it sent; return False if it has finished.

        Raises:
            RuntimeError: the process failed, and printed the reason.
        """
        if self.process.pid is None:
            self.process.start()
            self._worker_connection.close()
        else:
            self.connection.send(None)
        try:
            self.report = self.connection.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode:
                raise RuntimeError(f"a trainer ended with exit code {self.process.exitcode}") from None
            return False
        return True

    def finish(self) -> None:
        """Let the process finish its step, save and end; one that cannot save ends at once."""
        self.process.terminate()
        with suppress(RuntimeError):
            while self.turn():
                pass

    def stop(self) -> None:
        """Kill the process between two turns."""
        if self.process.pid is not None:
            self.process.kill()
            self.process.join()


def _work(connection: Connection, train: Callable[..., None], threads: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    with suppress(Interrupted):  # after saving
        train(Turns(connection), *arguments)
