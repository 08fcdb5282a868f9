"""Memory that notices what a GPU lets pass: wild and misaligned addresses, reads of what nobody wrote, and races."""

import ctypes

import numpy as np
import torch

BITS = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
SEVERAL = 63  # more than one warp


class Fault(Exception):
    """What a kernel must not do."""


class Bytes:
    """Bytes, and which of them were written: 255 for yes, so that a mask can be looked at in words as its bytes are."""

    def __init__(self, held: np.ndarray, written: bool) -> None:
        self.held, self.written = held, None if written else np.zeros(len(held), np.uint8)

    def read(self, at: np.ndarray, size: int, count: int, text: str) -> np.ndarray:
        """``count`` words of ``size`` bytes from each of the places ``at`` on -> [places, count]."""
        index = (at // size)[:, None] + np.arange(count)
        if self.written is not None:
            known = words(self.written, size)[index] == np.iinfo(BITS[size]).max
            if not known.all():
                raise Fault(f"reads what nobody wrote, at byte {at[~known.all(1)][0]}: {text}")
        return words(self.held, size)[index]

    def write(self, at: np.ndarray, values: np.ndarray) -> None:
        """values [places, count]. Of two at the same place the last one stays."""
        size = values.dtype.itemsize
        index = (at // size)[:, None] + np.arange(values.shape[1])
        words(self.held, size)[index] = values.view(BITS[size])
        if self.written is not None:
            words(self.written, size)[index] = np.iinfo(BITS[size]).max


def words(held: np.ndarray, size: int) -> np.ndarray:
    return held[: len(held) // size * size].view(BITS[size])


def check_alignment(at: np.ndarray, size: int, text: str) -> None:
    if (at % min(size, 16)).any():
        raise Fault(f"an address that is no multiple of {min(size, 16)}: {text}")


class Global:
    """The storages of tensors, where they lie. Those that are known stay alive, so that no place is used twice."""

    def __init__(self) -> None:
        self.starts = np.zeros(0, np.int64)
        self.ends = np.zeros(0, np.int64)
        self.parts: list[Bytes] = []
        self.kept: dict[int, torch.Tensor] = {}

    def know(self, tensor: torch.Tensor, written: bool = True) -> None:
        """What is known already stays as it is."""
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if start in self.kept or size == 0:
            return
        self.kept[start] = tensor
        held = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
        place = int(np.searchsorted(self.starts, start))
        self.starts = np.insert(self.starts, place, start)
        self.ends = np.insert(self.ends, place, start + size)
        self.parts.insert(place, Bytes(held, written))

    def _find(self, at: np.ndarray, size: int, text: str) -> tuple[Bytes, np.ndarray]:
        """The storage that the addresses lie in, and their places in it."""
        check_alignment(at, size, text)
        owner = np.searchsorted(self.starts, at, "right") - 1
        outside = (owner < 0) | (at + size > self.ends[owner])
        if outside.any():
            first = at[outside][0]
            near = int(np.abs(self.ends - first).argmin())
            behind, length = first - self.ends[near], self.ends[near] - self.starts[near]
            raise Fault(f"outside of all tensors, {behind} bytes behind the end of one of {length} bytes: {text}")
        if (owner != owner[0]).any():
            raise Fault(f"in several tensors at once: {text}")
        return self.parts[owner[0]], at - self.starts[owner[0]]

    def read(self, at: np.ndarray, size: int, count: int, text: str) -> np.ndarray:
        part, places = self._find(at, size * count, text)
        return part.read(places, size, count, text)

    def write(self, at: np.ndarray, values: np.ndarray, text: str) -> None:
        part, places = self._find(at, values.dtype.itemsize * values.shape[1], text)
        part.write(places, values)


class Shared:
    """Memory of a block. Between two barriers no warp may write what another one reads or writes.

    Marks of two bytes each: ``64 * interval + warp`` of the last write, and of the reads, SEVERAL if more than one warp
    has read. Intervals go on from block to block, so that marks need not be cleared.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = Bytes(np.zeros(size + 16, np.uint8), written=False)
        self.interval = 1
        self.writers, self.readers = (np.zeros(size // 2 + 8, np.int64) for _ in range(2))
        self.unfenced = np.zeros(size // 2 + 8, bool)  # written, and not yet seen by asynchronous products
        self.in_flight = np.zeros(size // 2 + 8, np.int32)  # asynchronous products that may still read it

    def begin(self) -> None:
        """Another block."""
        self.bytes.written.fill(0)
        self.unfenced.fill(False)
        self.interval += 1
        if self.in_flight.any():
            raise Fault("a block ended before its asynchronous products")

    def marks(self, at: np.ndarray, warps: np.ndarray, size: int, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Places of the marks, and the warp of each of them."""
        if len(at) and (at.min() < 0 or at.max() + size > self.size):
            raise Fault(f"outside of {self.size} bytes of shared memory: {text}")
        check_alignment(at, size, text)
        count = max(size // 2, 1)
        return ((at // 2)[:, None] + np.arange(count)).ravel(), np.repeat(warps, count)

    def _refuse_others(self, marks: np.ndarray, mine: np.ndarray, what: str, text: str) -> None:
        if ((marks >= 64 * self.interval) & (marks != mine)).any():
            raise Fault(f"race: {what} without a barrier between them: {text}")

    def read(self, at: np.ndarray, warps: np.ndarray, size: int, count: int, text: str) -> np.ndarray:
        self.note_read(*self.marks(at, warps, size * count, text), text)
        return self.bytes.read(at, size, count, text)

    def note_read(self, index: np.ndarray, warps: np.ndarray, text: str) -> None:
        mine, several = 64 * self.interval + warps, 64 * self.interval + SEVERAL
        self._refuse_others(self.writers[index], mine, "reads what another warp has written", text)
        before = self.readers[index]
        now = np.where((before >= 64 * self.interval) & (before != mine), several, mine)
        self.readers[index] = now
        self.readers[index[self.readers[index] != now]] = several

    def note_write(self, at: np.ndarray, warps: np.ndarray, size: int, text: str, fenced: bool = False) -> None:
        index, owners = self.marks(at, warps, size, text)
        mine = 64 * self.interval + owners
        self._refuse_others(self.writers[index], mine, "writes what another warp has written", text)
        self._refuse_others(self.readers[index], mine, "writes what another warp has read", text)
        if self.in_flight[index].any():
            raise Fault(f"race: writes what an asynchronous product may still read: {text}")
        self.writers[index] = mine
        self.unfenced[index] = not fenced

    def write(self, at: np.ndarray, warps: np.ndarray, values: np.ndarray, text: str, fenced: bool = False) -> None:
        self.note_write(at, warps, values.dtype.itemsize * values.shape[1], text, fenced)
        self.bytes.write(at, values)
