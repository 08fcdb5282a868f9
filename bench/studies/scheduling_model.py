"""A simulation of rollout workers: forward passes that take a + b n seconds, and the trainer's own scheduling on top.

What runs where is decided by ``python_trainer.rollout.ordering``, the code that the real workers use. Messages take no
time, and every worker has room for all that it gets (the measured ones have: 256 sequences).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import nnls

from python_trainer.rollout.ordering import Work, alternate, balance, in_turn, left, share

POLICIES = ("fifo", "balance", "history")  # in turn; by expected length; the same, and idle workers take over work


@dataclass(frozen=True)
class Cost:
    """Seconds of one worker."""

    a_pass: float
    a_token: float  # of a prompt, or drawn

    @property
    def overhead(self) -> float:
        """Of a pass, in tokens."""
        return self.a_pass / self.a_token

    def seconds(self, passes: float, tokens: float) -> float:
        return passes * self.a_pass + tokens * self.a_token


def fit(rows: Sequence[tuple[float, float]], seconds: Sequence[float]) -> Cost:
    """Least squares on relative errors, no coefficient below 0; rows are (passes, tokens)."""
    found, _ = nnls(np.array(rows) / np.array(seconds)[:, None], np.ones(len(rows)))
    return Cost(*found.tolist())


@dataclass(frozen=True)
class Group:
    """The answers to one prompt in one step."""

    prompt: int  # tokens
    lengths: tuple[int, ...]  # of the answers
    expected: float  # length, before they are generated
    spread: float = 0.25  # of answers about that, as a share of it

    @property
    def work(self) -> Work:
        return Work(self.expected, self.prompt + len(self.lengths) * self.expected)


@dataclass(eq=False)
class Answer:
    """One of them, in the making."""

    prompt: int
    missing: int
    expected: float
    spread: float
    done: int = 0
    moved: bool = False

    @property
    def left(self) -> float:
        return left(self.expected, self.done, 1 << 30, self.spread)


@dataclass(eq=False)
class Station:
    """A worker."""

    cost: Cost
    clock: float = 0.0
    busy: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    finished: int = 0
    moved: int = 0  # answers that it took over

    def begin(self, groups: Sequence[Group]) -> None:
        self._spend(self.cost.a_token * sum(group.prompt for group in groups))
        self.answers = [Answer(g.prompt, length, g.expected, g.spread) for g in groups for length in g.lengths]

    def take(self, answers: list[Answer], clock: float) -> None:
        """What another worker gave away at this time; all of its tokens are computed again."""
        self.clock = max(self.clock, clock)
        self._spend(self.cost.a_token * sum(answer.prompt + answer.done for answer in answers))
        self.answers += answers
        self.moved += len(answers)
        for answer in answers:
            answer.moved = True

    def next_end(self) -> float:
        """When its next answer is done."""
        return self.clock + self._pass() * min(answer.missing for answer in self.answers)

    def run(self, until: float) -> None:
        """Passes that begin before this time."""
        while self.answers and self.clock < until - 1e-12:
            count = math.ceil((until - self.clock) / self._pass() - 1e-9)
            count = max(min(count, *(answer.missing for answer in self.answers)), 1)
            self._spend(count * self._pass())
            for answer in self.answers:
                answer.missing -= count
                answer.done += count
            before = len(self.answers)
            self.answers = [answer for answer in self.answers if answer.missing]
            self.finished += before - len(self.answers)

    def give(self, overhead: float) -> list[Answer]:
        works = [Work(answer.left, answer.left) for answer in self.answers if not answer.moved]
        kept = sum((Work(answer.left, answer.left) for answer in self.answers if answer.moved), Work())
        begun = [answer for answer in self.answers if not answer.moved]
        given = [begun[i] for i in share(works, kept, overhead, [float(a.prompt + a.done) for a in begun])]
        self.answers = [answer for answer in self.answers if answer not in given]
        return given

    def load(self, overhead: float) -> float:
        return sum((Work(answer.left, answer.left) for answer in self.answers), Work()).duration(overhead)

    def _pass(self) -> float:
        return self.cost.a_pass + self.cost.a_token * len(self.answers)

    def _spend(self, seconds: float) -> None:
        self.clock += seconds
        self.busy += seconds


def simulate(groups: Sequence[Group], workers: int, policy: str, cost: Cost) -> list[Station]:
    """One step -> the workers at its end; the step takes as long as the latest clock."""
    works = [group.work for group in groups]
    if policy == "fifo":
        plan = in_turn(len(groups), workers)
    else:
        plan = balance(works, workers, cost.overhead, groups[0].spread)
    return run(groups, plan, cost, moving=policy == "history")


def run(groups: Sequence[Group], plan: Sequence[Sequence[int]], cost: Cost, *, moving: bool = False) -> list[Station]:
    """The same with given parts; ``moving``: idle workers take over work."""
    stations = [Station(cost) for _ in plan]
    for station, part in zip(stations, plan):
        station.begin([groups[i] for i in part])
    barren: set[Station] = set()
    while True:
        if moving:
            _move(stations, barren, cost.overhead)
        working = [station for station in stations if station.answers]
        if not working:
            break
        first = min(working, key=Station.next_end)
        first.run(first.next_end())
    return stations


def _move(stations: Sequence[Station], barren: set[Station], overhead: float) -> None:
    """Every idle worker asks the one with most to do, then the next, until one gives."""
    for taker in stations:
        while not taker.answers:
            donors = [s for s in stations if len(s.answers) > 1 and s not in barren and s.next_end() > taker.clock]
            if not donors:
                break
            donor = max(donors, key=lambda station: station.load(overhead))
            donor.run(taker.clock)
            given = donor.give(overhead)
            if given:
                taker.take(given, donor.clock)
                barren.discard(taker)
            else:
                barren.add(donor)


def end(stations: Sequence[Station]) -> float:
    """Time of a step: that of its slowest worker."""
    return max(station.clock for station in stations)


def pipelined(steps: Sequence[Sequence[Group]], workers: int, cost: Cost, *, alternating: bool) -> float:
    """Time of all steps where a worker begins the next one as soon as it is done, one step ahead of the slowest.

    The answers of a step then come from weights that are one update old, which the trainer does not do.

    Args:
        alternating: HistoPipe's order; otherwise in turn.
    """
    ends = [0.0] * workers
    before, last = 0.0, 0.0  # ends of the last step but one, and of the last
    for number, groups in enumerate(steps):
        works = [group.work for group in groups]
        plan = alternate(works, workers, cost.overhead, number) if alternating else in_turn(len(groups), workers)
        spent = [station.busy for station in run(groups, plan, cost)]
        ends = [max(end_, before) + seconds for end_, seconds in zip(ends, spent)]
        before, last = last, max(ends)
    return last
