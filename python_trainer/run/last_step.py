"""The last finished step of a run, which a signal saves while the next step is under way."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from python_trainer.errors import is_out_of_memory
from python_trainer.run.checkpoint import flatten

MEMORY_SHARE = 0.25  # of the free memory of the host, for a copy
POLL = 0.1  # seconds between looks at the votes of other ranks
ENDED = "ended"  # a decision
CGROUP = Path("/sys/fs/cgroup")


class LastStep:
    """What a checkpoint needs of the last finished step, and the agreement of two threads on its use.

    Weights and moments change within an update alone. Until the next one they belong to the last finished step, so a
    run copies nothing that no signal stops. On a signal a thread holds the main thread back from its next update for
    as long as it copies them into the memory of the host.

    The main thread marks what must not be copied from as a :meth:`section`. Where every rank has a part of the weights,
    all go through the same sections, and their threads agree on the number of sections before they copy. They vote
    through a store, because the main thread of a rank may be late for ever.

    Args:
        votes: store of the ranks, where each of them has a part of the weights; None: this process decides.

    Attributes:
        contents: of a checkpoint, without weights and moments; None: they are saved, or the weights are gone.
        learned: weights and moments that ``contents`` goes with; None: those of the model.
    """

    def __init__(self, votes: Any = None, rank: int = 0, size: int = 1):
        self.contents: dict[str, Any] | None = None
        self.learned: dict[str, Any] | None = None
        self._votes = votes
        self._rank = rank
        self._size = size
        self._lock = threading.Condition()
        self._in_section = self._held = self._writing = False
        self._sections = 0  # how many are over
        self._target = -1  # after how many sections the other thread wants to copy

    def note(self, contents: dict[str, Any] | None) -> None:
        """Replace the contents; weights and moments of the model go with them."""
        with self._lock:
            self.contents = contents
            self.learned = None

    @contextmanager
    def section(self, *, writes: bool = False) -> Iterator[None]:
        """Keep the other thread from copying within the block.

        Args:
            writes: the block writes a checkpoint, so it begins when the other thread has written its own.
        """
        with self._lock:
            self._lock.wait_for(lambda: not (self._held or (writes and self._writing)))
            self._in_section = True
        try:
            yield
        finally:
            with self._lock:
                self._in_section = False
                self._sections += 1
                self._held = self._sections == self._target
                self._lock.notify_all()

    @contextmanager
    def copied(
        self, learned: Callable[[], Mapping[str, Any]], ended: threading.Event
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]] | None]:
        """Yield contents, weights and moments of the last finished step in the memory of the host, to be written.

        It yields None if there is nothing to save, if a rank has no room for a copy, or if the run ends first.

        Args:
            learned: returns weights and moments of the model.
            ended: set once the main thread saves the step that follows, or leaves.
        """
        copied = None
        try:
            contents, copy = self._copy(learned, ended)
            copied = None if contents is None or copy is None else (contents, copy)
        finally:
            with self._lock:
                self._held = False
                self._target = -1
                self._writing = copied is not None
                self._lock.notify_all()
        try:
            yield copied
        finally:
            with self._lock:
                self._writing = False
                self._lock.notify_all()

    def _copy(
        self, learned: Callable[[], Mapping[str, Any]], ended: threading.Event
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Hold the main thread back from its next section, agree with all ranks, and copy; None: it cannot be."""
        with self._lock:  # the section that it is in ends first
            self._target = self._sections + self._in_section
            self._held = not self._in_section
        target = self._vote("sections", self._target, max, ended)
        with self._lock:
            if target is not None and target > self._target:  # another rank was in a section that this one must join
                self._target = target
                self._held = False
                self._lock.notify_all()
            while not (self._held or ended.is_set()):
                self._lock.wait(POLL)
            contents = self.contents if self._held and target is not None and not ended.is_set() else None
        copy = None if contents is None else self.learned or copy_to_host(learned())
        all_have = self._vote("copies", int(copy is not None), min, ended)
        return (contents, copy) if all_have else (None, None)

    def _vote(self, subject: str, vote: int, decide: Callable[[list[int]], int], ended: threading.Event) -> int | None:
        """Return what rank 0 decides on the numbers of all ranks; None if the run of one of them has ended before."""
        store, rank = self._votes, self._rank
        if store is None:
            return decide([vote])
        ballots = [f"{subject}/{number}" for number in range(self._size)]
        store.set(ballots[rank], str(vote))
        while not store.check([subject]):
            if rank == 0 and store.check(ballots):
                store.compare_set(subject, "", str(decide([int(store.get(ballot)) for ballot in ballots])))
            elif ended.wait(POLL):
                store.compare_set(subject, "", ENDED)  # unless rank 0 has decided
        decision = store.get(subject).decode()
        return None if decision == ENDED else int(decision)


def copy_to_host(learned: Mapping[str, Any]) -> dict[str, Any] | None:
    """Copy nested dictionaries of tensors, whole or in shards, into the memory of the host.

    Returns:
        The copies, or None where they take more than MEMORY_SHARE of what is free there, shared by the processes of
        the host.
    """
    tensors = flatten(learned).values()
    size = sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in tensors)
    if size * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > MEMORY_SHARE * free_memory():
        return None
    try:
        return _copy(learned)
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            return None
        raise


def _copy(learned: Any) -> Any:
    if isinstance(learned, Mapping):
        return {name: _copy(value) for name, value in learned.items()}
    return None if learned is None else learned.detach().to("cpu", copy=True)


def free_memory() -> int:
    """Return the bytes of memory that the host, or the control group of this process, has left; 0 if unknown."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):
        return 0
    try:
        group = CGROUP / Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # there is no limit, or it is "max"
        return free
    return min(free, limit - used)
