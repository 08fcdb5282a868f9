"""Find the benchmark files, run their cases, print the table and append to the CSV."""

import csv
import ctypes
import dataclasses
import importlib
import math
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench._case import Case, Measurement, Missing, Row
from rlkernels.proof.problem import largest_error, leaves
from rlkernels.proof.worker import seconds_of

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.csv"
SAMPLE_S = 2e-4  # calls shorter than this are timed in a loop
MAX_SAMPLES = 200


def find() -> list[str]:
    """Return the names of the benchmark files: ``bench/NAME.py`` without those that start with an underscore."""
    return sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))


def match(out: Any, reference: Any) -> str:
    """Return "exact", or max |out - reference| / max |reference| over all tensors and numbers; NaN matches NaN."""
    results, expected = list(leaves(out)), list(leaves(reference))
    if len(results) != len(expected):
        return "differs"
    error = max(map(_error, results, expected), default=0.0)
    if error == 0:
        return "exact"
    return f"{error:.1e}" if math.isfinite(error) else "differs"


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    error = largest_error(result, expected)
    if error in (0.0, math.inf):
        return error
    return error / max(expected[expected.isfinite()].abs().max().item(), 1e-300)


def _resident_peak(device: str, call: Callable[[], Any]) -> tuple[Any, int | None]:
    """Run ``call``; return its result, and the peak memory during it above the memory before, in bytes.

    On a GPU torch's allocator measures it. On Linux it is the high-water mark of the resident set, reset just before,
    after returning free memory to the system. It counts all memory of the process: ours, torch's and a peer's.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        out = call()
        torch.cuda.synchronize()
        return out, torch.cuda.max_memory_allocated() - allocated
    resident = reset_resident_peak()
    out = call()
    return out, None if resident is None else resident_peak() - resident


def reset_resident_peak() -> int | None:
    """Return free memory to the system, reset the high-water mark, and return resident bytes; None: not on Linux."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return resident_peak()
    except (OSError, AttributeError):
        return None


def resident_peak() -> int:
    """Return the peak of resident bytes since :func:`reset_resident_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class _Timed:
    """One provider of a case: warmed up, then sampled until its budget is spent."""

    def __init__(self, provider: Any, device: str, budget: float):
        self.setup, self.function = provider if isinstance(provider, tuple) else (None, provider)
        self.device = torch.device(device)
        self.samples: list[float] = []
        self.spent = 0.0
        self.output = self.prepared()()  # warm-up: loads code, fills pools
        call_s, self.peak = _resident_peak(device, partial(seconds_of, self.prepared(), 1, self.device))
        self.num_calls = 1 if self.setup or call_s > SAMPLE_S else math.ceil(SAMPLE_S / max(call_s, 1e-7))
        self.budget = budget
        if call_s > budget:  # a further call would not fit
            self.samples.append(call_s)
            self.spent = call_s

    def prepared(self) -> Callable[[], Any]:
        if self.setup is None:
            return self.function
        state = self.setup()
        return lambda: self.function(state)

    def sample(self) -> bool:
        """Take one sample; return False when the budget is spent."""
        if self.samples and (self.spent >= self.budget or len(self.samples) >= MAX_SAMPLES):
            return False
        call = self.prepared()
        self.samples.append(seconds_of(call, self.num_calls, self.device))
        self.spent += self.samples[-1] * self.num_calls
        return True


def run_case(case: Case, seconds: float) -> Iterator[Row]:
    """Time every provider of a case in turns, so that a change of the machine's speed affects all alike."""
    timed = {
        name: _Timed(provider, case.device, seconds)
        for name, provider in case.providers.items()
        if not isinstance(provider, Missing)
    }
    while any([t.sample() for t in timed.values()]):
        pass
    reference: Any = None
    if isinstance(case.reference, str):
        reference = timed[case.reference].output
    elif case.reference is not None:
        reference = case.reference()
    for name, provider in case.providers.items():
        row = Row(case.op, name, case.shape, case.dtype, case.device)
        if isinstance(provider, Missing):
            row.missing = provider.reason
        else:
            _fill(row, case, timed[name], reference)
        yield row


def _fill(row: Row, case: Case, timed: _Timed, reference: Any) -> None:
    row.timed(timed.samples)
    median_s = statistics.median(timed.samples)
    row.peak_bytes = timed.peak
    if case.reference is not None and row.provider != case.reference:
        row.match = (case.compare or match)(timed.output, reference)
    if case.limit:
        row.limit, limit_s = case.limit
        row.of_limit = limit_s / median_s
    if case.work:
        unit, amount = case.work
        row.extra = _si(amount / median_s, f"{unit}/s")


def _si(value: float | None, unit: str) -> str:
    """Format a number with its SI prefix: 1.93e9 B -> "1.93 GB"; "" for None."""
    if value is None:
        return ""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value / 1e-9:.3g} n{unit}"


def table(rows: Sequence[Row]) -> Table:
    """Return the table of one case; the fastest provider is bold, and missing ones have their reason."""
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
        view.add_column(name, justify="right", min_width=width, no_wrap=name != "rate")  # a rate may be a sentence
    fastest = min((row.median_s for row in rows if row.median_s is not None), default=None)
    for row in rows:
        if row.missing:
            view.add_row(row.provider, "missing", style="dim")
            continue
        spread = "" if row.q20_s is None else f"{_si(row.q20_s, 's')} .. {_si(row.q80_s, 's')}"
        of_limit = "" if row.of_limit is None else f"{row.of_limit:.1%}"
        style = "bold" if row.median_s is not None and row.median_s == fastest else ""
        cells = (_si(row.median_s, "s"), spread, _si(row.peak_bytes, "B"), row.match, of_limit, row.extra)
        view.add_row(row.provider, *cells, style=style)
    missing = [f"{row.provider}: {row.missing}" for row in rows if row.missing]
    view.caption = escape("\n".join(f"missing: {line}" for line in missing)) or None  # a reason may have brackets
    return view


def stamp() -> dict[str, Any]:
    """Return the columns of a row that describe the run as a whole."""
    return {
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "cpu": cpu_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def commit() -> str:
    """Return the short hash of HEAD, with "-dirty" if tracked files other than the results have changed."""

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


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch and the kernels use one thread; waking another may take longer than what is timed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def append(path: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Append the rows to the CSV, after its header if it is new, with the present number of threads."""
    facts = facts | {"threads": torch.get_num_threads()}
    names = [field.name for field in dataclasses.fields(Row)] + list(facts)
    is_new = not path.exists() or path.stat().st_size == 0
    if not is_new:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if header != names:
            sys.exit(f"bench: {path} has other columns ({', '.join(header)}); move it away or give another --csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in rows:
            values = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in dataclasses.asdict(row).items()}
            writer.writerow({**values, **facts})


def run_file(name: str, quick: bool, seconds: float, console: Console, only: str = "") -> Iterator[list[Row]]:
    """Run one benchmark file: print its tables, each of one op and shape, and yield their rows.

    Args:
        only: text in the shape of the cases to run, and of the rows to print.
    """
    case: Case | Measurement
    for case in importlib.import_module(f"bench.{name}").cases(quick):
        if isinstance(case, Case):
            case = Measurement([case.shape], partial(run_case, case, seconds))
        picked = [shape for shape in case.shapes if only in shape]
        if not picked:
            continue
        with console.status(f"{name}: {picked[0]}"):
            for (_, shape, *_), rows in groupby(case.rows(), lambda row: (row.op, row.shape, row.dtype, row.device)):
                if only in shape:
                    tabled = list(rows)
                    console.print(table(tabled))
                    yield tabled
