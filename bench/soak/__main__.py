"""Find rare errors and slow growth; every run is a row of bench/results/soak.jsonl.

python -m bench.soak pool --operations 10000000     # the block pool against its model in plain Python
python -m bench.soak history --operations 10000000  # the rollout history against its model
python -m bench.soak memory --steps 5000            # growth of resident memory over a training run
python -m bench.soak --report                       # the table of docs/trust.md, of all rows
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from scipy import stats

from bench._runner import cpu_model
from bench.faults.records import append_row, read_rows
from bench.soak import operations
from python_trainer import Trainer, load_config
from python_trainer.run.callbacks import Callback

RECORDS = Path(__file__).parents[1] / "results" / "soak.jsonl"
WARM_UP = 0.2  # share of the steps in which caches fill
BLOCKS = 40  # of neighbouring steps, whose means are nearly independent
MIN_STEPS = 50  # so that each block has one after the warm-up
MAX_GROWTH = 1024  # bytes a step, 1 GB in a million steps


class ResidentMemory(Callback):
    """Records the resident memory of this process in bytes, after every step."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def run_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Train for ``args.steps`` steps, and fit a line through resident memory."""
    overrides = [f"max_steps={args.steps}", f"evaluation.eval_steps={max(args.steps // 10, 1)}", "save.save_steps=100"]
    memory = ResidentMemory()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config("configs/smoke.yaml", overrides)
        Trainer(config, Path(folder) / "run", console=Console(quiet=True), callbacks=[memory]).run()
    sizes = memory.sizes[int(WARM_UP * args.steps) :]
    slope, low, high = growth(sizes)
    first, last = (np.mean(values) / 2**20 for values in (sizes[:20], sizes[-20:]))
    figures = (
        f"{slope:+,.0f} bytes a step (95 %: {low:+,.0f} to {high:+,.0f}); {first:.1f} MB, at the end {last:.1f} MB"
    )
    problems = [f"it grows by {slope:,.0f} bytes a step"] if low > MAX_GROWTH else []
    return {"what": f"memory of {args.steps:,} steps", "found": figures, "problems": problems}


def growth(sizes: Sequence[int]) -> tuple[float, float, float]:
    """Fit bytes a step by least squares to the means of BLOCKS blocks; return the slope and its 95 % interval."""
    steps, means = (
        np.array([np.mean(block) for block in np.array_split(column, BLOCKS)]) for column in (range(len(sizes)), sizes)
    )
    fit = stats.linregress(steps, means)
    half_width = stats.t.ppf(0.975, BLOCKS - 2) * fit.stderr
    return float(fit.slope), float(fit.slope - half_width), float(fit.slope + half_width)


PARTS = {"pool": operations.run_pool, "history": operations.run_history, "memory": run_memory}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--operations", type=int, default=10_000_000, help="operations of pool and history")
    parser.add_argument("--steps", type=int, default=5000, help="steps of memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FILE")
    parser.add_argument("--report", action="store_true", help="run nothing, print the table")
    args = parser.parse_args()
    if args.report:
        print(table(read_rows(args.records)), end="")
        return 0
    if args.part is None:
        parser.error(f"name a part: {', '.join(PARTS)}")
    if args.steps < MIN_STEPS:  # the growth would be NaN, which no limit notices
        parser.error(f"--steps must be at least {MIN_STEPS}, got {args.steps}")
    torch.set_num_threads(1)
    started = time.monotonic()
    figures = PARTS[args.part](args)
    row = {"part": args.part, **figures, "seed": args.seed, "seconds": round(time.monotonic() - started)}
    place = {"torch": torch.__version__, "machine": cpu_model(), "python": platform.python_version()}
    append_row(args.records, row, place)
    print(f"{row['what']}: {row['found']}; {'; '.join(row['problems']) or 'nothing went wrong'}")
    return int(bool(row["problems"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table with a line for every row."""
    lines = ["| what | for | found | went wrong | date |", "|---|---|---|---|---|"]
    for row in rows:
        cells = row["what"], f"{row['seconds'] / 60:.1f} min", row["found"], "; ".join(row["problems"]) or "nothing"
        lines.append(f"| {' | '.join([*cells, row['date']])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
