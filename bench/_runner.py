"""Finds the benchmark files, runs their cases, prints the table and appends to the CSV."""

import csv
import ctypes
import dataclasses
import importlib
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench._case import Case, Missing, Row

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.csv"
SAMPLE_S = 2e-4  # calls shorter than this are timed in a loop
MAX_SAMPLES = 200


def find() -> list[str]:
    """Names of the benchmark files: ``bench/NAME.py`` that do not start with an underscore."""
    return sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))


def match(out: Any, reference: Any) -> str:
    """ "exact", or max |out - reference| / max |reference| over every tensor and number inside; NaN matches NaN."""
    error = _error(out, reference)
    return "exact" if error == 0 else f"{error:.1e}" if math.isfinite(error) else "differs"


def _error(out: Any, reference: Any) -> float:
    if isinstance(reference, dict):
        same = isinstance(out, dict) and out.keys() == reference.keys()
        return max((_error(out[k], reference[k]) for k in reference), default=0.0) if same else math.inf
    if isinstance(reference, (list, tuple)):
        same = isinstance(out, (list, tuple)) and len(out) == len(reference)
        return max(map(_error, out, reference), default=0.0) if same else math.inf
    if isinstance(reference, (str, type(None))):
        return 0.0 if out == reference else math.inf
    a, b = (torch.as_tensor(x).detach() for x in (out, reference))
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    if a.shape != b.shape:
        return math.inf
    if not b.dtype.is_floating_point:
        return 0.0 if torch.equal(a.to(b.dtype), b) else math.inf
    a, b = a.double(), b.double()
    equal = (a == b) | (a.isnan() & b.isnan())
    if equal.all():
        return 0.0
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not equal[~finite].all():
        return math.inf
    return ((a - b)[finite].abs().max() / b[finite].abs().max().clamp(min=1e-300)).item()


def _resident_peak(device: str, call: Callable[[], Any]) -> tuple[Any, int | None]:
    """Runs ``call``: (its result, the most memory held during it above what was held before, in bytes).

    On a GPU torch's allocator says so. On Linux the kernel does: the high-water mark of the resident set,
    reset just before, after handing free memory back. It counts everything, ours, torch's or a peer's.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call()
        torch.cuda.synchronize()
        return out, torch.cuda.max_memory_allocated() - before
    held = reset_resident_peak()
    out = call()
    return out, None if held is None else resident_peak() - held


def reset_resident_peak() -> int | None:
    """Hands free memory back and resets the high-water mark of the resident set -> bytes held; None: not on Linux."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return resident_peak()
    except (OSError, AttributeError):
        return None


def resident_peak() -> int:
    """The most bytes that this process held since :func:`reset_resident_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _timer(device: str) -> Callable[[Callable[[], Any], int], float]:
    """(function, times) -> seconds per call."""

    def on_cpu(call: Callable[[], Any], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times

    def on_gpu(call: Callable[[], Any], times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times

    return on_gpu if device.startswith("cuda") else on_cpu


class _Timed:
    """One provider of a case: warms it up, then takes samples while its budget lasts."""

    def __init__(self, provider: Any, device: str, budget: float):
        self.setup, self.function = provider if isinstance(provider, tuple) else (None, provider)
        self.timer, self.samples, self.spent = _timer(device), [], 0.0
        self.output, _ = _resident_peak(device, self.prepared())  # warm-up: loads code, fills pools
        once = self.timer(self.prepared(), 1)
        _, self.peak = _resident_peak(device, self.prepared())
        self.times = 1 if self.setup or once > SAMPLE_S else math.ceil(SAMPLE_S / max(once, 1e-7))
        self.budget = budget
        if once > budget:  # one more call would say no more than this one
            self.samples, self.spent = [once], once

    def prepared(self) -> Callable[[], Any]:
        if self.setup is None:
            return self.function
        state = self.setup()
        return lambda: self.function(state)

    def sample(self) -> bool:
        """Takes one sample; False when the budget is used up."""
        if self.samples and (self.spent >= self.budget or len(self.samples) >= MAX_SAMPLES):
            return False
        call = self.prepared()
        self.samples.append(self.timer(call, self.times))
        self.spent += self.samples[-1] * self.times
        return True


def run_case(case: Case, seconds: float) -> Iterator[Row]:
    """Times every provider of a case, taking turns so that a change of the machine's speed meets all of them."""
    timed: dict[str, _Timed] = {}
    failed: dict[str, str] = {}
    for name, provider in case.providers.items():
        if isinstance(provider, Missing):
            failed[name] = provider.reason
            continue
        timed[name] = _Timed(provider, case.device, case.seconds or seconds)
    while any([t.sample() for t in timed.values()]):
        pass
    reference: Any = None
    if case.reference is not None:
        named = isinstance(case.reference, str)
        reference = timed[case.reference].output if named else case.reference()  # type: ignore[index,operator]
    for name in case.providers:
        row = Row(case.op, name, case.shape, case.dtype, case.device, missing=failed.get(name, ""))
        if name in timed:
            _fill(row, case, timed[name], reference)
        yield row


def _fill(row: Row, case: Case, timed: _Timed, reference: Any) -> None:
    row.median_s, row.peak_bytes = statistics.median(timed.samples), timed.peak
    row.q20_s, row.q80_s = (quantile(timed.samples, q) for q in (0.2, 0.8))
    if case.reference is not None and row.provider != case.reference:
        row.match = (case.compare or match)(timed.output, reference)
    if case.limit:
        row.limit, row.of_limit = case.limit[0], case.limit[1] / row.median_s
    if case.work:
        unit, amount = case.work
        row.extra = f"{_si(amount / row.median_s)}{unit}/s"


def quantile(samples: Sequence[float], q: float) -> float:
    return torch.tensor(samples, dtype=torch.float64).quantile(q).item()


def _si(value: float) -> str:
    """1.93e9 -> "1.93 G"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value / 1e-9:.3g} n"


def table(rows: Sequence[Row]) -> Table:
    """The rows of one case as text; the fastest provider is bold, what is missing is named."""
    head = rows[0]
    limit = next((f", limit: {row.limit}" for row in rows if row.limit), "")
    view = Table(
        title=f"{head.op}: {head.shape} {head.dtype} on {head.device}{limit}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    view.add_column("provider", min_width=16)
    for name, width in (("median", 8), ("20 % .. 80 %", 18), ("peak", 8), ("match", 7), ("of limit", 8), ("rate", 10)):
        view.add_column(name, justify="right", min_width=width, no_wrap=True)
    best = min((row.median_s for row in rows if row.median_s is not None), default=None)
    for row in rows:
        if row.missing:
            view.add_row(row.provider, "missing", style="dim")
            continue
        median = "" if row.median_s is None else f"{_si(row.median_s)}s"
        spread = "" if row.q20_s is None or row.q80_s is None else f"{_si(row.q20_s)}s .. {_si(row.q80_s)}s"
        peak = "" if row.peak_bytes is None else f"{_si(row.peak_bytes)}B"
        of_limit = "" if row.of_limit is None else f"{row.of_limit:.1%}"
        style = "bold" if row.median_s is not None and row.median_s == best else ""
        view.add_row(row.provider, median, spread, peak, row.match, of_limit, row.extra, style=style)
    missing = [f"{row.provider}: {row.missing}" for row in rows if row.missing]
    view.caption = escape("\n".join(f"missing: {line}" for line in missing)) or None  # a reason may hold brackets
    return view


def stamp() -> dict[str, Any]:
    """Return what a row says about the run as a whole."""
    return {
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "cpu": cpu_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def commit() -> str:
    """Short hash of HEAD, with "-dirty" when tracked files other than the results have changed."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], capture_output=True, text=True, cwd=FOLDER, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", "..", ":(exclude)results*")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def append(path: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Adds the rows to the CSV, which gets its header when it is new."""
    names = [field.name for field in dataclasses.fields(Row)] + list(facts)
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if header != names:
            sys.exit(f"bench: {path} has other columns ({', '.join(header)}); move it away or give another --csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            values = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in dataclasses.asdict(row).items()}
            writer.writerow({**values, **facts})


def run_file(name: str, quick: bool, seconds: float, console: Console, only: str | None = None) -> list[Row]:
    """Runs one benchmark file and prints a table for each case.

    Args:
        only: of the cases, those alone whose shape contains this.
    """
    rows: list[Row] = []
    for case in importlib.import_module(f"bench.{name}").cases(quick):
        if isinstance(case, Case):
            if only is not None and only not in case.shape:
                continue
            with console.status(f"{case.op}: {case.shape} {case.dtype}"):
                new = list(run_case(case, seconds))
        else:
            new = case if isinstance(case, list) else [case]
        console.print(table(new))
        rows += new
    return rows
