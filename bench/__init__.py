"""Benchmarks: ``python -m bench``. See bench/README.md for how to write one."""

import rlkernels._waiting  # noqa: F401 before torch
from bench._case import Case, Measurement, Missing, Row, optional
from bench._limits import copy_bandwidth, fma_rate, matmul_rate, read_bandwidth

__all__ = [
    "Case", "Measurement", "Missing", "Row", "copy_bandwidth", "fma_rate", "matmul_rate", "optional", "read_bandwidth",
]  # fmt: skip
