"""Signs of life: threads on every rank that exchange them through the store, and name the rank that others wait for."""

import itertools
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from python_trainer.distributed.group import RankGroup

BEAT = 10.0  # seconds between two signs of life
BEATS = 6  # without one until a line names the rank, and from line to line


class Watch:
    """Print a line a minute that names a stopped rank, or a rank that others wait for in a collective.

    A sign of life is a growing number, and the count of collectives that the rank has entered. A rank without a new
    sign is stopped. This thread counts time in its own turns, so that a stopped rank accuses nobody when it goes on.

    Args:
        store: of the process group; the thread opens a connection of its own.
        limit: seconds after which a waiting rank ends the run, for the line.

    Attributes:
        finding: the problem at the newest turn; empty if nothing is wrong.
        signs: the newest sign of each rank.
    """

    def __init__(self, ranks: RankGroup, store: Any, limit: float):
        self.ranks = ranks
        self.limit = limit
        self.finding = ""
        self.signs: list[tuple[int, int] | None] = [None] * ranks.size
        self._store = store
        self._stopped = threading.Event()
        self._last_signs = list(self.signs)
        self._silent_turns = [0] * ranks.size  # turns without a new sign, by rank
        self._entered = -1  # collectives that this rank had entered at the last turn
        self._waiting_turns = 0  # turns that this rank has waited in its newest collective
        # the exchange has a thread of its own, since a store on a stopped host never answers
        loops = (self._exchange, self._watch) if ranks.size > 1 else ()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(BEAT)  # a thread must not return into an interpreter that has ended

    def _exchange(self) -> None:
        store = self._store.clone()
        names = [f"sign/{rank}" for rank in range(self.ranks.size)]
        store.set_timeout(timedelta(seconds=BEAT * BEATS))
        for beat in itertools.count():
            with suppress(RuntimeError):  # the store has gone: no rank has a new sign then
                store.set(names[self.ranks.rank], f"{beat} {self.ranks.entered}")
                for rank, text in enumerate(store.multi_get(names)):
                    number, entered = map(int, text.split())
                    self.signs[rank] = (number, entered)
            if self._stopped.wait(BEAT):
                return

    def _watch(self) -> None:
        while not self._stopped.wait(BEAT):
            if text := self.turn():
                print(f"note: {text}", file=sys.stderr)

    def turn(self) -> str | None:
        """Look at the signs, once every BEAT seconds; return the line that this rank prints, if any."""
        rank, size = self.ranks.rank, self.ranks.size
        signs = list(self.signs)
        for other, (sign, last_sign) in enumerate(zip(signs, self._last_signs)):
            self._silent_turns[other] = self._silent_turns[other] + 1 if sign == last_sign else 0
        self._last_signs = signs
        entered = self.ranks.entered
        still_waits = self.ranks.waits and entered == self._entered
        self._waiting_turns = self._waiting_turns + 1 if still_waits else 0
        self._entered = entered

        silent = [other for other in range(size) if self._silent_turns[other] >= BEATS]
        late = [other for other, sign in enumerate(signs) if sign and sign[1] < entered and other != rank]
        self.finding = ""
        turns = 0
        speaker = rank
        if rank in silent:
            turns = self._silent_turns[rank]
            self.finding = f"the store, on the host of process 0, has not answered for {turns * BEAT:.0f} s"
        elif silent:
            turns = max(self._silent_turns)
            speaker = min({*range(size)} - {*silent})
            verb = "has" if len(silent) == 1 else "have"
            self.finding = (
                f"{self._name(silent)} {verb} sent no sign of life for {turns * BEAT:.0f} s: stopped, or out of reach"
            )
        elif late and self._waiting_turns >= BEATS:
            turns = self._waiting_turns
            speaker = min({*range(size)} - {*late})
            self.finding = f"the others have waited {turns * BEAT:.0f} s for {self._name(late)}, still at work"
        if not self.finding or turns % BEATS or speaker != rank:
            return None
        return f"{self.finding}; a process that waits {self.limit:g} s (ddp_timeout) ends the run"

    def _name(self, ranks: Sequence[int]) -> str:
        return f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.ranks.size}"
