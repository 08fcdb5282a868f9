"""WorkerPool: the engine interface over several processes, each with a PagedEngine on the same weights.

Noise is keyed by sample id and position, so answers do not depend on who generates them, or on moving between two
workers in their midst; they are those of one engine, up to rounding of the model's own numbers.
"""

import multiprocessing
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import torch

from python_trainer.data import Request, Rollout
from python_trainer.errors import NotFinite, UserError
from python_trainer.rollout.drafting import Drafter, pass_overhead
from python_trainer.rollout.engine import Engine, SamplingParams, check_requests, check_sampling, new_rollouts
from python_trainer.rollout.ordering import (
    LengthHistory,
    Work,
    balance,
    expectations,
    expected_lengths,
    in_turn,
    remember,
)
from python_trainer.rollout.paged.engine import STATS
from python_trainer.rollout.workers import messages as m
from python_trainer.rollout.workers.process import OUT_OF_MEMORY, Setup, serve
from python_trainer.rollout.workers.weights import SharedWeights
from rlkernels import RolloutHistory

MEASURED_SEQUENCES = (1, 8, 32)  # of decoding passes, for what a pass costs on top of its tokens
PATIENCE = 5.0  # seconds that a worker gets to end by itself


@dataclass(frozen=True)
class Report:
    """What one worker did since it had nothing to do."""

    answers: int  # that it finished
    stats: dict[str, float]  # as of ``PagedEngine.stats``
    cpu_s: float
    busy_s: float  # wall time in forward passes


class WorkerPool(Engine):
    """Rollouts by ``workers`` processes on one machine; the interface is that of :class:`PagedEngine`.

    Requests with the same prompt stay on one worker, so what they share is computed once. Without ``lengths`` they are
    dealt out in turn and stay. With them the longest come first, work is balanced by expected length, and a worker
    that has nothing left takes waiting requests of the slowest one, or running answers where computing them anew costs
    less than waiting (:func:`python_trainer.rollout.ordering.share`).

    Weights are one copy in shared memory; ``policy_updated`` copies the model's there. With a drafter, every worker
    has a history of its own that is fed the same answers.

    Args:
        model: as of PagedEngine, on the CPU.
        workers: processes.
        lengths: of earlier answers; None: no scheduling.
        threads: of each worker; by default this process's, divided among them.
        matmul_precision: as ``model.matmul_precision`` of the settings.
        options: further arguments of PagedEngine; ``memory_bytes`` is for each worker.

    Raises:
        UserError: the model is not one that PagedEngine can run or that can be shared; from any call: a worker died.
        MemoryError: from any call: a worker has no memory left.
        NotFinite: the policy cannot be sampled from.
    """

    def __init__(
        self,
        model: Any,
        *,
        workers: int,
        lengths: LengthHistory | None = None,
        threads: int | None = None,
        matmul_precision: str = "highest",
        **options: Any,
    ):
        super().__init__()
        if workers < 1:
            raise UserError(f"workers must be at least 1, got {workers}")
        self.workers, self.lengths = workers, lengths
        self.reports: list[Report] = []
        self.moved = 0  # answers that changed their worker
        self.weights = SharedWeights(model)
        threads = threads or max(torch.get_num_threads() // workers, 1)
        self._setup = Setup(self.weights, options, threads, matmul_precision)
        self._stats: dict[str, float] = dict.fromkeys(STATS, 0)
        self._overhead: float | None = None
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._told: tuple[RolloutHistory | None, int] = None, 0  # the history that workers have, and its answers
        self._work_in_hand: Division | None = None  # while there is something to generate
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["python_trainer.rollout.workers.process"])  # one import for all of them
        self._told = None, 0
        self._finish = Finalize(self, _end, args=(self._connections, self._processes), exitpriority=10)
        for number in range(self.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self._setup), name=f"rollout-{number}", daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the connection
            self._connections.append(ours)
            self._processes.append(process)
        ready = [self._receive(worker, m.Ready) for worker in range(self.workers)]
        self.limits: m.Ready = ready[0]
        self.max_positions, self.limited_by = self.limits.max_positions, self.limits.limited_by

    def close(self) -> None:
        """Ends the processes, whatever they are doing; the next call starts new ones."""
        self._work_in_hand = None
        self._finish()

    def _send(self, worker: int, message: Any) -> None:
        try:
            self._connections[worker].send(message)
        except OSError:
            self._receive(worker, m.Ended)  # says why it ended

    def _receive(self, worker: int, *kinds: type) -> Any:
        """The next message of a worker that is one of ``kinds``."""
        while True:
            try:
                message = self._connections[worker].recv()
            except (EOFError, OSError):
                raise self._died(worker) from None
            if isinstance(message, m.Failed):
                self.close()
                # what would come up in one process too names none of them
                who = "" if message.error in (UserError, NotFinite) else f"rollout worker {worker} of {self.workers}: "
                raise message.error(who + message.message)
            if isinstance(message, kinds):
                return message

    def _died(self, worker: int) -> UserError:
        process = self._processes[worker]
        process.join(PATIENCE)
        code = process.exitcode
        how = f"was ended with exit code {code}"
        if code == OUT_OF_MEMORY:
            how = "ran out of memory"
        elif code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}" + (
                " (out of memory?)" if -code == signal.SIGKILL else ""
            )
        self.close()
        return UserError(f"rollout worker {worker} of {self.workers} (process {process.pid}) {how}")

    def _awake(self) -> None:
        if not self._finish.still_active():
            self._connections, self._processes = [], []
            self._start()

    @property
    def stats(self) -> dict[str, float]:
        """Sums over all workers, of what ``PagedEngine.stats`` counts."""
        return dict(self._stats)

    def policy_updated(self) -> None:
        """The weights have changed: the workers get them, and use nothing computed before.

        Raises:
            RuntimeError: workers are generating; they would read weights that are half old and half new.
        """
        if self._work_in_hand is not None:
            raise RuntimeError("policy_updated comes when all that was submitted is generated")
        super().policy_updated()
        self.weights.push()
        if self._finish.still_active():
            for worker in range(self.workers):
                self._send(worker, m.Updated())

    def pass_seconds(self, sequences: int, tokens: int) -> float:
        """Time of a forward pass over so many new tokens of each of so many sequences, on one worker."""
        self._awake()
        self._send(0, m.Measure(sequences, tokens))
        return float(self._receive(0, float))

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        """As of :class:`Engine`; also raises UserError where a worker died."""
        self._awake()
        known, division = self.limits, self._work_in_hand
        check_sampling(sampling, has_tokenizer=self._setup.engine.get("tokenizer") is not None)
        check_requests(requests, max_positions=known.max_positions, vocab_size=known.vocab_size, room=known.room)
        if self.lengths and self._overhead is None:
            self._overhead = pass_overhead({n: self.pass_seconds(n, 1) for n in MEASURED_SEQUENCES})
        if division is not None and division.sampling != sampling:
            raise UserError(f"sampling must be {division.sampling} until all is generated, got {sampling}")
        try:
            self._work_in_hand = division = division or Division(self, sampling)
            rollouts = division.add(requests, self.policy_version)
            self._end_if_done(division)
        except BaseException:
            self._give_up()
            raise
        self._ready += [rollout for rollout in rollouts if rollout.finish_reason]  # without room for a token
        return rollouts

    def _work(self, count: int) -> list[Rollout]:
        division = self._work_in_hand
        if division is None:
            return []
        try:
            done = division.poll(count)
            self._end_if_done(division)
        except BaseException:
            self._give_up()
            raise
        return done

    def _end_if_done(self, division: "Division") -> None:
        if not any(division.missing):
            self.reports, self._work_in_hand = division.end(), None

    def _give_up(self) -> None:
        """Workers may be in the midst of anything."""
        self._ready = []
        self.close()

    def _drafts(self) -> m.HistoryUpdate | None:
        """What the workers' histories lack."""
        drafter = self.drafter
        if drafter is None:
            return None
        if type(drafter) is not Drafter:
            raise UserError(f"rollout.workers above 1 knows drafts of Drafter only, got {type(drafter).__name__}")
        seen = drafter.history.stats
        total, (history, told) = seen["rollouts"] + seen["evicted"], self._told
        missing, news = total - told, [answer for answer in drafter.news if len(answer.response_ids)]
        whole = history is not drafter.history or missing not in (0, len(news))
        self._told = drafter.history, total
        return m.HistoryUpdate(
            drafter.history.to_bytes().numpy().tobytes() if whole else None,
            news if missing and not whole else [],
            drafter.max_tokens,
            drafter.pass_overhead,
        )


class Division:
    """What is being generated: who works on what, and what has come back."""

    def __init__(self, pool: WorkerPool, sampling: SamplingParams):
        self.pool, self.sampling = pool, sampling
        self.submitted: list[tuple[Sequence[Request], list[Rollout]]] = []
        self.rollouts: list[Rollout] = []
        self.missing = [0] * pool.workers  # answers that each worker still owes
        self.finished = [0] * pool.workers
        self.loads = [Work()] * pool.workers  # as expected
        self.asked: dict[int, int] = {}  # donor -> the worker that its work is for
        self.barren: set[int] = set()  # have nothing to give that would be worth moving
        self.overhead = pool._overhead or 0.0
        begin = m.Begin(sampling, self.overhead, pool.lengths.spread if pool.lengths else 0.0, pool._drafts())
        for worker in range(pool.workers):
            pool._send(worker, begin)

    def add(self, requests: Sequence[Request], policy_version: int) -> list[Rollout]:
        """Deals requests out -> their rollouts."""
        first = len(self.rollouts)
        rollouts = [rollout for request in requests for rollout in new_rollouts(request, policy_version)]
        self.rollouts += rollouts
        self.submitted.append((requests, rollouts))
        for worker, pieces in enumerate(self._deal(requests, first)):
            self._add(worker, pieces)
        return rollouts

    def poll(self, count: int) -> list[Rollout]:
        """Waits until so many rollouts are finished, or all -> those."""
        numbers = {connection: worker for worker, connection in enumerate(self.pool._connections)}
        done: list[Rollout] = []
        while self.asked or any(self.missing):
            if len(done) >= count and any(self.missing):
                break
            self._ask()
            for connection in wait(list(numbers)):
                done += self._take(numbers[connection])  # type: ignore[index]
        return done

    def end(self) -> list[Report]:
        """When all is there: tells the workers -> what each of them did."""
        pool, reports = self.pool, list[Report]()
        for worker in range(pool.workers):
            pool._send(worker, m.End())
        for worker in range(pool.workers):
            ended = pool._receive(worker, m.Ended)
            reports.append(Report(self.finished[worker], ended.stats, ended.cpu_s, ended.busy_s))
            for name, count in ended.stats.items():
                pool._stats[name] += count
        if pool.lengths is not None:
            for requests, rollouts in self.submitted:
                remember(pool.lengths, requests, rollouts)
        return reports

    def _deal(self, requests: Sequence[Request], number: int) -> list[list[m.Piece]]:
        """Pieces by worker, in the order in which they begin; ``number`` is that of the first rollout."""
        pool = self.pool
        lengths = expected_lengths(pool.lengths or LengthHistory(), requests)
        works = expectations(pool.lengths or LengthHistory(), requests)
        bundles: dict[tuple[int, ...], list[tuple[m.Piece, Work]]] = {}  # by prompt
        for request, length, work in zip(requests, lengths, works):
            room = pool.limits.max_positions - len(request.prompt_ids) - len(request.prefix_ids)
            if min(room, request.max_new_tokens) > 0 and request.num_samples:
                piece = m.Piece(number, request, length)
                bundles.setdefault(tuple(request.prompt_ids), []).append((piece, work))
            else:
                for rollout in self.rollouts[number : number + request.num_samples]:
                    rollout.finish_reason = "length"
            number += request.num_samples
        parts = list(bundles.values())
        totals = [sum((work for _, work in part), Work()) for part in parts]
        if pool.lengths:
            plan = balance(totals, pool.workers, self.overhead, pool.lengths.spread)
        else:
            plan = in_turn(len(parts), pool.workers)
        for worker, chosen in enumerate(plan):
            self.loads[worker] = sum((totals[i] for i in chosen), self.loads[worker])
        return [[piece for i in chosen for piece, _ in parts[i]] for chosen in plan]

    def _add(self, worker: int, pieces: list[m.Piece]) -> None:
        if pieces:
            self.pool._send(worker, m.Add(pieces))
            self.missing[worker] += sum(piece.request.num_samples for piece in pieces)
            self.barren.discard(worker)

    def _take(self, worker: int) -> list[Rollout]:
        """Handles one message -> the rollouts that it finished."""
        message = self.pool._receive(worker, m.Done, m.Given)
        self.loads[worker] = message.left
        if isinstance(message, m.Done):
            self.missing[worker] -= len(message.answers)
            self.finished[worker] += len(message.answers)
            for number, answer in message.answers:
                self.rollouts[number].become(answer)
            return [self.rollouts[number] for number, _ in message.answers]
        taker, count = self.asked.pop(worker), sum(piece.request.num_samples for piece in message.pieces)
        self.missing[worker] -= count
        self.pool.moved += count
        if not count:
            self.barren.add(worker)
        self._add(taker, message.pieces)
        return []

    def _ask(self) -> None:
        """Asks the slowest workers for work for those that have none."""
        if not self.pool.lengths:
            return
        for taker in range(self.pool.workers):
            if self.missing[taker] or taker in self.asked.values():
                continue
            donors = [w for w, n in enumerate(self.missing) if n > 1 and w not in self.barren and w not in self.asked]
            if donors:
                donor = max(donors, key=lambda worker: self.loads[worker].duration(self.overhead))
                self.asked[donor] = taker
                self.pool._send(donor, m.Give())


def _end(connections: list[Connection], processes: list[Any]) -> None:
    """Closes connections, at which workers end after the pass that they are in."""
    for connection in connections:
        connection.close()
    for process in processes:
        process.join(PATIENCE)
        if process.exitcode is None:
            with suppress(OSError):
                process.kill()
            process.join()
