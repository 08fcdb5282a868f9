"""What the machine can do at most, measured once per process: the denominators of "fraction of limit"."""

import ctypes
import functools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("_limits.cpp")


@functools.cache
def _library() -> ctypes.CDLL:
    target = SOURCE.parents[1] / "build" / "bench" / "limits.so"
    if not target.exists() or target.stat().st_mtime < SOURCE.stat().st_mtime:
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([os.environ.get("CXX", "g++"), *flags, str(SOURCE), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.read_all.restype = ctypes.c_float
    library.multiply_add.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    library.multiply_add.restype = ctypes.c_int64
    return library


def _fastest(run: Callable[[], object], device: torch.device, seconds: float = 0.3) -> float:
    """Shortest of the calls that fit into ``seconds``, after one warm-up call."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


@functools.cache
def read_bandwidth(nbytes: int = 2**28, device: str = "cpu") -> float:
    """Bytes/s of reading ``nbytes`` again and again with all threads: give the footprint of the op, caches count."""
    where = torch.device(device)
    n = max(nbytes // 4 // 128, 1) * 128
    data = torch.ones(n + 16, device=where)
    if where.type == "cuda":
        return n * 4 / _fastest(data.sum, where)
    address = (data.data_ptr() + 63) // 64 * 64
    library, threads = _library(), torch.get_num_threads()
    return n * 4 / _fastest(lambda: library.read_all(address, n, threads), where)


@functools.cache
def copy_bandwidth(nbytes: int = 2**28, device: str = "cpu") -> float:
    """Bytes/s, read and written together, of copying ``nbytes`` with torch."""
    where = torch.device(device)
    source = torch.ones(nbytes, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return 2 * nbytes / _fastest(lambda: target.copy_(source), where)


@functools.cache
def fma_rate() -> float:
    """float32 operations/s (a multiply-add counts as two) of all threads, from registers, without matrix units."""
    library, threads = _library(), torch.get_num_threads()
    sink = torch.empty(threads)
    operations = library.multiply_add(200_000, threads, sink.data_ptr())
    return operations / _fastest(lambda: library.multiply_add(200_000, threads, sink.data_ptr()), torch.device("cpu"))


@functools.cache
def matmul_rate(dtype: torch.dtype = torch.float32, n: int | None = None, device: str = "cpu") -> float:
    """Operations/s of torch's n x n x n matrix product on random data: the rate of the matrix units."""
    where = torch.device(device)
    n = n or (8192 if where.type == "cuda" else 1024)
    a, b = (torch.randn(n, n, device=where).to(dtype) for _ in range(2))
    return 2 * n**3 / _fastest(lambda: a @ b, where)
