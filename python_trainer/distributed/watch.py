"""Signs of life: threads on every rank that exchange them through the store, and name the rank that others wait for."""

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from python_trainer.distributed.group import RankGroup

BEAT = 10.0  # seconds between two signs of life
BEATS = 6  # without one until a line names the rank, and from line to line


def print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


class Watch:
    """Prints a line a minute that names a rank which is stopped, or which others wait for in a collective.

    A sign of life is a number that grows, and the count of collectives that the rank has entered. A rank without a new
    sign is stopped. Time is counted in turns of this thread, so that a rank that was stopped itself accuses nobody
    when it goes on.

    Args:
        store: of the process group; a connection of its own is made.
        limit: seconds after which a rank that waits ends the run, for the line.

    Attributes:
        finding: what the newest turn has found; empty if nothing is wrong.
        signs: the newest sign of each rank.
    """

    def __init__(self, ranks: RankGroup, store: Any, limit: float, tell: Callable[[str], None] = print_note):
        self.ranks, self.limit, self.tell, self.finding = ranks, limit, tell, ""
        self.signs: list[tuple[int, int] | None] = [None] * ranks.size
        self._store, self._over = store, threading.Event()
        self._before, self._missed = list(self.signs), [0] * ranks.size
        self._entered, self._waited = -1, 0
        # the exchange has a thread of its own, since a store on a stopped host never answers
        works = (self._exchange, self._watch) if ranks.size > 1 else ()
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(BEAT)  # else it could return into an interpreter that has ended

    def _exchange(self) -> None:
        store, names = self._store.clone(), [f"sign/{rank}" for rank in range(self.ranks.size)]
        store.set_timeout(timedelta(seconds=BEAT * BEATS))
        for beat in itertools.count():
            with suppress(RuntimeError):  # the store has gone: no rank has a new sign then
                store.set(names[self.ranks.rank], f"{beat} {self.ranks.entered}")
                for rank, text in enumerate(store.multi_get(names)):
                    number, entered = map(int, text.split())
                    self.signs[rank] = number, entered
            if self._over.wait(BEAT):
                return

    def _watch(self) -> None:
        while not self._over.wait(BEAT):
            if text := self.turn():
                self.tell(text)

    def turn(self) -> str | None:
        """Look at the signs, once every BEAT seconds; return the line that this rank prints, if any."""
        me, size, signs = self.ranks.rank, self.ranks.size, list(self.signs)
        same = [sign == before for sign, before in zip(signs, self._before)]
        self._before, self._missed = signs, [(missed + 1) * still for missed, still in zip(self._missed, same)]
        waits, self._entered = self.ranks.waits and self.ranks.entered == self._entered, self.ranks.entered
        self._waited = (self._waited + 1) * waits
        silent = [rank for rank in range(size) if self._missed[rank] >= BEATS]
        late = [rank for rank, sign in enumerate(signs) if sign and sign[1] < self.ranks.entered and rank != me]
        self.finding, turns, speaker = "", 0, me
        if me in silent:
            turns = self._missed[me]
            self.finding = f"the store, on the host of process 0, has not answered for {turns * BEAT:.0f} s"
        elif silent:
            turns, speaker = max(self._missed), min({*range(size)} - {*silent})
            verb = "has" if len(silent) == 1 else "have"
            self.finding = (
                f"{self._name(silent)} {verb} sent no sign of life for {turns * BEAT:.0f} s: stopped, or out of reach"
            )
        elif late and self._waited >= BEATS:
            turns, speaker = self._waited, min({*range(size)} - {*late})
            self.finding = f"the others have waited {turns * BEAT:.0f} s for {self._name(late)}, still at work"
        due = self.finding and turns % BEATS == 0 and speaker == me
        return f"{self.finding}; a process that waits {self.limit:g} s (ddp_timeout) ends the run" if due else None

    def _name(self, ranks: Sequence[int]) -> str:
        return f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.ranks.size}"
