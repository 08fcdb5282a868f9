"""The format of a delta, and the two functions that write and apply one.

A delta is :data:`MAGIC`; the checksum of header and frames (4 bytes, little-endian) and the size of the header (8); the
header; and zstd frames. The header is JSON: a list of [name, dtype, shape, pieces]. The bytes of a tensor, row-major,
are cut into pieces of :data:`PIECE_BYTES`. [size, before, after] of a piece are the size of its frame, which holds the
XOR of its old and new bytes, and the checksums of both.

Checksums are CRC-32 of zlib, which comes with Python and reads 1.7 GB/s in each thread. They detect a wrong base and
damage, but no forgery: the sender of a forged delta chooses the weights, and nothing else.
"""

import importlib.util
import json
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from rlkernels import _check

MAGIC = b"rlkernels delta 1\n"
PIECE_BYTES = 1 << 22  # bytes; a multiple of the size of every dtype
LEVEL = 1  # of zstd; level 3 takes longer for more bytes
SIZES = struct.Struct("<IQ")

T = TypeVar("T")


class Piece(NamedTuple):
    """A piece of a tensor: the place of its frame, and the checksums of its old and new bytes."""

    start: int
    stop: int
    before: int
    after: int


@dataclass(frozen=True)
class Entry:
    """The header's entry of a tensor."""

    dtype: str
    shape: list[int]
    pieces: list[Piece]


def encode(new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]) -> bytes:
    """Return a delta that turns old weights into new ones, bit for bit.

    The same weights give the same bytes on any device and any number of threads. Memory beyond the delta: a few pieces
    of 4 MiB for each thread of torch, and copies of a few tensors that are not contiguous.

    Args:
        new, old: name -> tensor, of the same names, dtypes and shapes; of any dtype, on any device, also tied. ``old``
            must be copies, since optimizers change a model's weights in place.

    Returns:
        The delta, for :func:`apply_`.

    Raises:
        ImportError: zstandard is not installed.
        TypeError, ValueError: a value that is no dense tensor; a name, dtype or shape that differs.
    """
    zstd = _zstandard()
    _check_weights("new", new)
    _check_weights("old", old)
    new_kinds = {name: _dtype_and_shape(tensor) for name, tensor in new.items()}
    old_kinds = {name: _dtype_and_shape(tensor) for name, tensor in old.items()}
    for name in sorted(new_kinds.keys() | old_kinds.keys()):
        if new_kinds.get(name) != old_kinds.get(name):
            raise ValueError(
                f"new and old must have the same names, dtypes and shapes, got {new_kinds.get(name)} and "
                f"{old_kinds.get(name)} for {name!r}"
            )
    _synchronize([*new.values(), *old.values()])

    def compress(name: str, _: int, new_piece: torch.Tensor, old_piece: torch.Tensor) -> tuple[str, bytes, int, int]:
        new_bytes = _bytes(new_piece)
        old_bytes = _bytes(old_piece)
        frame = zstd.ZstdCompressor(level=LEVEL).compress(np.bitwise_xor(new_bytes, old_bytes))
        return name, frame, zlib.crc32(old_bytes.data), zlib.crc32(new_bytes.data)

    frames: list[bytes] = []
    pieces: dict[str, list[tuple[int, int, int]]] = {name: [] for name in new}
    for name, frame, old_checksum, new_checksum in _in_threads(compress, _pieces(new, old)):
        frames.append(frame)
        pieces[name].append((len(frame), old_checksum, new_checksum))
    entries = [(name, *kind, pieces[name]) for name, kind in new_kinds.items()]
    header = json.dumps(entries, separators=(",", ":")).encode()
    checksum = zlib.crc32(header)
    for frame in frames:
        checksum = zlib.crc32(frame, checksum)
    return b"".join((MAGIC, SIZES.pack(checksum, len(header)), header, *frames))


def apply_(weights: Mapping[str, torch.Tensor], delta: bytes | bytearray | memoryview) -> None:
    """Turn the old weights of a delta into the new ones, in place, bit for bit.

    The whole delta is checked before any weight changes, and so decompressed twice. Its declared sizes are checked
    before memory is allocated. Memory is as for :func:`encode`; tensors that share memory, such as tied ones, are
    copied twice.

    Args:
        weights: name -> tensor, on any device; at least the names of the delta. Others do not change.
        delta: from :func:`encode`. It may come from a network: nothing in it is executed.

    Raises:
        ImportError: zstandard is not installed.
        TypeError, ValueError: weights or a delta of the wrong type; a damaged delta; weights that are not its old ones,
            or tied weights whose new values differ. Nothing has changed then.
    """
    parsed = Delta(delta)
    _check_weights("weights", weights)
    if missing := sorted(parsed.entries.keys() - weights.keys()):
        raise ValueError(f"weights must hold every tensor of the delta, but {missing[0]!r} is missing")
    parsed.apply_({name: weights[name] for name in parsed.entries})


class Delta:
    """A parsed delta, whose tensors can be applied one by one.

    Args:
        data: from :func:`encode`.

    Attributes:
        entries: name -> the header's entry of the tensor.

    Raises:
        ValueError: this is no delta, or a damaged one.
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self.data = memoryview(data).cast("B")
            self.entries = _read_header(self.data)
        except (ValueError, TypeError, RecursionError, struct.error) as error:
            raise ValueError(f"delta is damaged, or none of rlkernels.weights.encode: {error}") from None

    def apply_(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Turn all or some tensors of the delta into the new ones, like :func:`apply_`."""
        targets = {name: tensor.detach() for name, tensor in weights.items()}
        for name, tensor in targets.items():
            self._check_entry(name, tensor)
        _synchronize(targets.values())
        deque(_in_threads(self._check_piece, _pieces(targets)), 0)
        direct, groups = _by_memory(targets)
        saved: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors, with copies of their old values
        for group in sorted(groups, key=_may_overlap, reverse=True):
            new = self._new(group)
            if _may_overlap(group):
                saved += [(tensor, _plain(tensor).clone()) for tensor in group.values()]
            for name, tensor in group.items():
                _write(tensor, new[name])
            if not all(np.array_equal(_bytes(_flat(t)), _bytes(_flat(new[name]))) for name, t in group.items()):
                for tensor, old in saved:
                    _write(tensor, old)
                raise ValueError(
                    f"weights share memory to which the delta gives two values: {', '.join(sorted(group))}"
                )
        deque(_in_threads(self._write_piece, _pieces(direct)), 0)
        _synchronize(targets.values())

    def _new(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous copies with the new values."""
        copies = {n: _plain(tensor).clone(memory_format=torch.contiguous_format) for n, tensor in weights.items()}
        _synchronize(copies.values())
        deque(_in_threads(self._write_piece, _pieces(copies)), 0)
        return copies

    def _check_entry(self, name: str, tensor: torch.Tensor) -> None:
        entry = self.entries[name]
        dtype, shape = _dtype_and_shape(tensor)
        if [entry.dtype, entry.shape, len(entry.pieces)] != [dtype, shape, len(_slices(tensor))]:
            raise ValueError(
                f"weights must have the dtypes and shapes of the delta, {entry.dtype} {entry.shape} for {name!r}, got "
                f"{dtype} {shape}"
            )
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(f"weights must have a place for each element, but {name!r} is expanded: clone it first")

    def _check_piece(self, name: str, number: int, weight: torch.Tensor) -> None:
        piece = self.entries[name].pieces[number]
        old = _bytes(weight)
        if zlib.crc32(old.data) != piece.before:
            raise ValueError(f"weights are not those that the delta was made from: {name!r} differs")
        new = np.bitwise_xor(old, self._xor(name, number, len(old)))
        if zlib.crc32(new) != piece.after:
            raise ValueError(f"delta is damaged: {name!r} has another checksum")

    def _write_piece(self, name: str, number: int, weight: torch.Tensor) -> None:
        old = _bytes(weight)
        new = np.bitwise_xor(old, self._xor(name, number, len(old)))
        _write(weight, torch.from_numpy(new).view(weight.dtype))

    def _xor(self, name: str, number: int, size: int) -> np.ndarray:
        """Decompress a piece to bytes [size]."""
        zstd = _zstandard()
        piece = self.entries[name].pieces[number]
        frame = self.data[piece.start : piece.stop]
        try:
            declared = zstd.frame_content_size(frame)  # the decompressor allocates this much
            content = zstd.ZstdDecompressor().decompress(frame, allow_extra_data=False) if declared == size else b""
        except zstd.ZstdError as error:
            raise ValueError(f"delta is damaged: {name!r}: {error}") from None
        if declared != size or len(content) != size:
            raise ValueError(f"delta is damaged: a piece of {name!r} has {declared} bytes, not {size}")
        return np.frombuffer(content, np.uint8)


def _read_header(data: memoryview) -> dict[str, Entry]:
    start = len(MAGIC) + SIZES.size
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError("it begins with other bytes")
    checksum, size = SIZES.unpack_from(data, len(MAGIC))
    if zlib.crc32(data[start:]) != checksum:
        raise ValueError("it has another checksum")
    header = json.loads(bytes(data[start : start + size]))
    offset = start + size
    entries: dict[str, Entry] = {}
    for name, dtype, shape, frames in header:
        pieces: list[Piece] = []
        for length, before, after in frames:
            if type(length) is not int or not 0 < length <= len(data) - offset:
                raise ValueError(f"{name!r} has a frame of {length!r} bytes")
            pieces.append(Piece(offset, offset + length, before, after))
            offset += length
        if not isinstance(name, str) or name in entries:
            raise ValueError(f"{name!r} is no name, or named twice")
        entries[name] = Entry(dtype, shape, pieces)
    if offset != len(data):
        raise ValueError(f"it has {len(data)} bytes, and its header describes {offset}")
    return entries


def has_zstandard() -> bool:
    """Return whether zstandard, which deltas need, is installed; do not import it."""
    return importlib.util.find_spec("zstandard") is not None


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(f"deltas of weights need zstandard: pip install 'rlkernels[weights]' ({error})") from error
    return zstandard


def _check_weights(argument: str, weights: Mapping[str, torch.Tensor]) -> None:
    if not isinstance(weights, Mapping):
        raise TypeError(f"{argument} must be a dictionary, name -> tensor, got {type(weights).__name__}")
    for name, tensor in weights.items():
        if not isinstance(name, str):
            raise TypeError(f"{argument} must have names that are text, got {name!r}")
        _check.tensor(f"{argument} of {name!r}", tensor)
        if tensor.layout != torch.strided or tensor.is_meta or hasattr(tensor, "to_local"):
            raise TypeError(
                f"{argument} of {name!r} must be a dense tensor in the memory of this process (of a DTensor its "
                f"to_local()), got {type(tensor).__name__} ({tensor.layout}, {tensor.device})"
            )


def _dtype_and_shape(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values, not their conjugates or negatives."""
    return tensor.detach().resolve_conj().resolve_neg()


def _slices(tensor: torch.Tensor) -> list[slice]:
    """Return the slices of a flattened tensor that are its pieces."""
    step = PIECE_BYTES // tensor.itemsize
    return [slice(start, start + step) for start in range(0, tensor.numel(), step)]


def _pieces(*weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[Any, ...]]:
    """Yield name, number and elements of all pieces: views of contiguous tensors, copies of others."""
    for name in weights[0]:
        flat = [_flat(tensors[name]) for tensors in weights]
        for number, piece in enumerate(_slices(flat[0])):
            yield name, number, *(tensor[piece] for tensor in flat)


def _bytes(piece: torch.Tensor) -> np.ndarray:
    """Return the bytes of elements [n] on the host."""
    return piece.contiguous().cpu().view(torch.uint8).numpy()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements [n] for any thread: a view of a contiguous tensor, else a finished copy."""
    flat = _plain(tensor).reshape(-1)
    if flat.data_ptr() != tensor.data_ptr():
        _synchronize([flat])
    return flat


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy bits of the same dtype; also into tensors of inference mode."""
    with torch.inference_mode():
        target.copy_(value)


def _synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for work on the tensors: threads of this module use other streams."""
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def _in_threads(function: Callable[..., T], jobs: Iterable[tuple[Any, ...]]) -> Iterator[T]:
    """Yield the results of a function in the order of its jobs; take few jobs ahead."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        running = deque[Future[T]]()
        for job in jobs:
            running.append(pool.submit(function, *job))
            if len(running) > 2 * threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _may_overlap(group: Mapping[str, torch.Tensor]) -> bool:
    """Return whether elements of a group of :func:`_by_memory` may share memory, within a tensor or between two."""
    return len(group) > 1 or any(map(_check.shares_places, group.values()))


def _by_memory(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Divide tensors into those to write piece by piece, and groups that may share memory or are not contiguous."""
    spans: list[tuple[str, int, int, str]] = []
    for name, tensor in weights.items():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        if tensor.numel():
            spans.append((str(tensor.device), tensor.data_ptr(), (last + 1) * tensor.itemsize, name))
    groups: list[dict[str, torch.Tensor]] = []
    end = ("", 0)
    for device, start, size, name in sorted(spans):
        if (device, start) >= end:
            groups.append({})
        groups[-1][name] = weights[name]
        end = max(end, (device, start + size))
    direct: dict[str, torch.Tensor] = {}
    for group in groups:
        if len(group) == 1:
            ((name, tensor),) = group.items()
            if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                direct[name] = tensor
    return direct, [group for group in groups if not group.keys() <= direct.keys()]
