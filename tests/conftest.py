"""Shared fixtures. Everything a machine lacks is named in the summary, never skipped silently."""

import importlib
import importlib.util
import os
from collections import Counter

import pytest
import torch
from support import lacks

import rlkernels.backend


def pytest_configure(config):
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(2, (os.cpu_count() or 1) // workers))  # never 1: what differs between threads must show


def pytest_terminal_summary(terminalreporter):
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    )
    terminalreporter.section("not run on this machine")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} tests: {reason}")
    if not reasons:
        terminalreporter.write_line("nothing: every test ran")


@pytest.fixture(autouse=True)
def nothing_else_runs(monkeypatch):
    """Report an idle machine: no test expects the trainer's message about a busy one."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture(autouse=True)
def poison_uninitialised_memory():
    """Make torch.empty return NaN (or the largest integer), so that nothing can rely on its contents."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seed():
    """Start every test from the same random state, and with float32 products that round no inputs."""
    torch.manual_seed(0)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"


@pytest.fixture
def compiled():
    if rlkernels.backend.extension_error():
        lacks("the compiled extension")


@pytest.fixture(params=["portable", "avx2", "avx512", "amx"])
def cpu_isa(request, compiled):
    """Run a test once per instruction set of the CPU kernels."""
    try:
        torch.ops.rlkernels.set_cpu_isa(request.param)
    except ValueError as error:
        lacks(f"the instruction set {request.param} ({str(error).splitlines()[0]})")
    yield request.param
    torch.ops.rlkernels.set_cpu_isa("auto")


@pytest.fixture
def set_threads():
    """Return ``torch.set_num_threads``; undo its calls at the end of the test."""
    num_threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def trl_integration():
    if importlib.util.find_spec("trl") is None:
        lacks("TRL (pip install '.[trl]')")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    return importlib.import_module("rlkernels.integrations.trl")


@pytest.fixture
def rounding_linear(monkeypatch):
    """Round the inputs of float32 products where torch may do so, as processors with AMX do; return that product."""
    plain = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        if x.dtype == torch.float32 and torch.backends.mkldnn.matmul.fp32_precision == "bf16":
            x = x.bfloat16().float()
            weight = weight.bfloat16().float()
        return plain(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    return linear
