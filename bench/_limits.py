"""Peak rates of the machine, measured once per process: the denominators of "fraction of limit"."""

import ctypes
import functools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from rlkernels.proof.worker import seconds_of

CPU = torch.device("cpu")
MEASURED_S = 0.3
SOURCE = Path(__file__).with_name("_limits.cpp")


@functools.cache
def _library() -> ctypes.CDLL:
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC"]  # for this processor alone
    with TemporaryDirectory() as folder:
        target = f"{folder}/limits.so"
        subprocess.run([os.environ.get("CXX", "g++"), *flags, str(SOURCE), "-o", target], check=True)
        library = ctypes.CDLL(target)
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.read_all.restype = ctypes.c_float
    library.multiply_add.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    library.multiply_add.restype = ctypes.c_int64
    return library


def _fastest(run: Callable[[], object], device: torch.device = CPU) -> float:
    """Return the time of the shortest call within ``MEASURED_S``, after one warm-up call."""
    run()
    deadline = time.perf_counter() + MEASURED_S
    shortest = seconds_of(run, 1, device)
    while time.perf_counter() < deadline:
        shortest = min(shortest, seconds_of(run, 1, device))
    return shortest


@functools.cache
def read_bandwidth(nbytes: int = 2**28) -> float:
    """Measure bytes/s of reading ``nbytes`` repeatedly with all threads; pass the op's footprint, as caches count."""
    num_floats = max(nbytes // 4 // 128, 1) * 128
    floats = torch.ones(num_floats + 16)
    address = (floats.data_ptr() + 63) // 64 * 64
    library = _library()
    threads = torch.get_num_threads()
    return num_floats * 4 / _fastest(lambda: library.read_all(address, num_floats, threads))


@functools.cache
def copy_bandwidth(nbytes: int = 2**28, device: str = "cpu") -> float:
    """Measure bytes/s, read plus written, of copying ``nbytes`` with torch."""
    target = torch.device(device)
    source = torch.ones(nbytes, dtype=torch.uint8, device=target)
    destination = torch.empty_like(source)
    return 2 * nbytes / _fastest(lambda: destination.copy_(source), target)


@functools.cache
def fma_rate() -> float:
    """Measure float32 operations/s (a multiply-add is two) of all threads, from registers, without matrix units."""
    library = _library()
    threads = torch.get_num_threads()
    sink = torch.empty(threads)
    operations = library.multiply_add(200_000, threads, sink.data_ptr())
    return operations / _fastest(lambda: library.multiply_add(200_000, threads, sink.data_ptr()))


@functools.cache
def matmul_rate(dtype: torch.dtype, n: int = 1024, device: str = "cpu") -> float:
    """Measure operations/s of torch's n x n x n matrix product on random data: the rate of the matrix units."""
    target = torch.device(device)
    a, b = (torch.randn(n, n, device=target).to(dtype) for _ in range(2))
    return 2 * n**3 / _fastest(lambda: a @ b, target)
