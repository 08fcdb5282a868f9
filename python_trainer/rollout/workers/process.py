"""The inside of a rollout worker: a PagedEngine that answers messages between its forward passes."""

import errno
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from python_trainer.data import Request
from python_trainer.errors import kind_of
from python_trainer.model.policy import set_matmul_precision
from python_trainer.rollout.decoding import Decoding
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import new_rollouts
from python_trainer.rollout.ordering import Work, left, share
from python_trainer.rollout.paged.engine import PagedEngine, Session
from python_trainer.rollout.workers import messages as m
from python_trainer.rollout.workers.weights import SharedWeights
from rlkernels import RolloutHistory

OUT_OF_MEMORY = errno.ENOMEM  # exit code where there is not even the memory to say so


@dataclass(frozen=True)
class Setup:
    """What every worker is made with."""

    weights: SharedWeights
    engine: dict[str, Any]  # arguments of PagedEngine
    threads: int
    matmul_precision: str


def serve(connection: Connection, setup: Setup) -> None:
    """Runs until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a group gets them together; the trainer decides what follows
        signal.signal(number, signal.SIG_IGN)
    try:
        torch.set_num_threads(setup.threads)
        set_matmul_precision("highest")  # until the engine has checked the model
        engine = PagedEngine(setup.weights.attach(), **setup.engine)
        set_matmul_precision(setup.matmul_precision)
        connection.send(m.Ready(engine.max_positions, engine.limited_by, engine.vocab_size, engine.room))
        RolloutWorker(connection, engine).run()
    except (EOFError, ConnectionError):
        pass  # the trainer has ended
    except Exception as error:
        try:
            _tell(connection, error)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


def _tell(connection: Connection, error: Exception) -> None:
    kind = kind_of(error)
    if kind is None:
        message = m.Failed(traceback.format_exc(), RuntimeError)
    elif kind is MemoryError:
        message = m.Failed("".join(str(error).splitlines()[:1]), kind)
    else:
        message = m.Failed(str(error), kind)
    with suppress(OSError):  # nobody may be left to be told
        connection.send(message)


class Inbox:
    """The messages of a connection, each taken out of it by a thread as it comes.

    Left in the connection they would fill it while this process sends: it and the trainer, each waiting for the other
    to read, would wait for ever.
    """

    def __init__(self, connection: Connection):
        self._connection, self._found = connection, queue.SimpleQueue[Any]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._found.put(self._connection.recv())
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            self._found.put(error)

    def __bool__(self) -> bool:
        return not self._found.empty()

    def get(self) -> Any:
        """The next message, once it is there; raises what ended the connection."""
        found = self._found.get()
        if isinstance(found, Exception):
            raise found
        return found


@dataclass
class Assignment:
    """What a worker knows of one answer besides the engine's sample."""

    number: int
    request: Request
    expected: float
    moved: bool  # came from another worker, and stays


class RolloutWorker:
    """Serves one connection with one engine."""

    def __init__(self, connection: Connection, engine: PagedEngine):
        self.connection, self.inbox, self.engine = connection, Inbox(connection), engine
        self.history = RolloutHistory()
        self.tasks: dict[Decoding, Assignment] = {}
        self.spread = 0.0  # of answers about their expected length

    def run(self) -> None:
        while True:
            message = self.inbox.get()
            if isinstance(message, m.Begin):
                self.connection.send(self.generate(message))
            elif isinstance(message, m.Updated):
                self.engine.policy_updated()
            elif isinstance(message, m.Measure):
                self.connection.send(self.engine.pass_seconds(message.sequences, message.tokens))

    def generate(self, begin: m.Begin) -> m.Ended:
        """Generates what comes until it is told to end."""
        before, cpu, busy = self.engine.stats, time.process_time(), 0.0
        self.engine.drafter, self.spread = self._drafter(begin.drafts), begin.spread
        session = Session(self.engine, begin.sampling)
        with closing(session), session.running():
            while self._listen(session, begin.overhead):
                started = time.perf_counter()
                done = session.step()
                busy += time.perf_counter() - started
                if done:
                    answers = [(self.tasks.pop(sample).number, sample.rollout) for sample in done]
                    self.connection.send(m.Done(answers, self._left(session)))
        self.engine.drafter = None
        stats = {name: count - before[name] for name, count in self.engine.stats.items()}
        return m.Ended(stats, time.process_time() - cpu, busy)

    def _drafter(self, drafts: m.HistoryUpdate | None) -> Drafter | None:
        if drafts is None:
            return None
        if drafts.history is not None:
            self.history = RolloutHistory.from_bytes(torch.frombuffer(bytearray(drafts.history), dtype=torch.uint8))
        for answer in drafts.news:
            self.history.add(answer.prompt_ids, answer.response_ids, reward=answer.reward, epoch=answer.epoch)
        return Drafter(self.history, max_tokens=drafts.max_tokens, pass_overhead=drafts.pass_overhead)

    def _listen(self, session: Session, overhead: float) -> bool:
        """Handles what has come, and waits for more while there is nothing to do -> False at the end of the call."""
        while not session.busy or self.inbox:
            message = self.inbox.get()
            if isinstance(message, m.End):
                return False
            if isinstance(message, m.Add):
                for piece in message.pieces:
                    self._add(session, piece)
            elif isinstance(message, m.Give):
                pieces = self._give(session, overhead)
                self.connection.send(m.Given(pieces, self._left(session)))
        return True

    def _add(self, session: Session, piece: m.Piece) -> None:
        rollouts = new_rollouts(piece.request, self.engine.policy_version) if piece.begun is None else [piece.begun]
        for j, sample in enumerate(session.add(piece.request, rollouts)):
            self.tasks[sample] = Assignment(piece.number + j, piece.request, piece.expected, piece.begun is not None)

    def _give(self, session: Session, overhead: float) -> list[m.Piece]:
        """Takes out what another worker should do: whole requests that wait, else answers that have begun."""
        scheduler = session.scheduler
        fresh = [job for job in scheduler.waiting if not any(sample.drawn for sample in job.samples)]
        if fresh:
            works = [self._work(job.samples) + Work(0.0, len(job.tokens)) for job in fresh]
            waiting = {sample for job in fresh for sample in job.samples}
            kept = self._work([sample for sample in self.tasks if sample not in waiting])
            # they wait for a place: one more answer means more passes, and so tokens are what counts
            chosen: list[Sequence[Decoding]] = [fresh[i].samples for i in share(works, kept, overhead=0.0)]
        else:
            begun = [sample for sample in scheduler.running if not self.tasks[sample].moved]
            works, staying = [self._work([sample]) for sample in begun], set(begun)
            kept = self._work([sample for sample in self.tasks if sample not in staying])
            chosen = [[begun[i]] for i in share(works, kept, overhead, [float(s.length) for s in begun])]
        pieces = [self._piece(samples) for samples in chosen]
        gone = {sample for samples in chosen for sample in samples}
        scheduler.withdraw(gone)
        for sample in gone:
            del self.tasks[sample]
        return pieces

    def _piece(self, samples: Sequence[Decoding]) -> m.Piece:
        first, task = samples[0], self.tasks[samples[0]]
        request = Request(
            task.request.prompt_ids, task.request.prefix_ids, len(samples), task.request.max_new_tokens, first.sample_id
        )
        return m.Piece(task.number, request, task.expected, first.rollout if first.drawn else None)

    def _work(self, samples: Sequence[Decoding]) -> Work:
        """What these answers still need."""
        needs = [left(self.tasks[s].expected, s.drawn, s.max_new_tokens, self.spread) for s in samples]
        return Work(max(needs, default=0.0), sum(needs))

    def _left(self, session: Session) -> Work:
        prompts = sum(len(job.tokens) for job in session.scheduler.waiting)
        return self._work(list(self.tasks)) + Work(0.0, prompts)
