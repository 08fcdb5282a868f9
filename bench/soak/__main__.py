"""Many steps and many operations: what goes wrong only now and then, or grows slowly. Rows: bench/results/soak.jsonl.

python -m bench.soak trainers --minutes 30               # four trainers on one SQLite file, now and then killed
python -m bench.soak trainers --database postgresql      # ... on one PostgreSQL database
python -m bench.soak pool --operations 10000000          # the block pool against its model in plain Python
python -m bench.soak history --operations 10000000       # the rollout history against its model
python -m bench.soak sanitized --operations 1000000      # both in C++, with ASan, UBSan; the history with TSan
python -m bench.soak memory --steps 5000 --variant rhyme # resident memory of a run, its slope with an interval
python -m bench.soak large                               # ops on more than 2^31 elements (13 GB)
python -m bench.soak --report                            # the table of docs/trust.md, of all rows
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench._runner import cpu_model
from bench.faults.records import append_row, read_rows
from bench.soak import large, memory, operations, sanitized, trainers

RECORDS = Path(__file__).parents[1] / "results" / "soak.jsonl"
PARTS = {
    "trainers": trainers.run,
    "pool": operations.run_pool,
    "history": operations.run_history,
    "sanitized": sanitized.run,
    "memory": memory.run,
    "large": large.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=30, help="of trainers")
    parser.add_argument("--megabytes", type=float, help="bound on their database (default: one a minute)")
    parser.add_argument("--database", choices=trainers.DATABASES, default="sqlite", help="of trainers")
    parser.add_argument("--operations", type=int, default=10_000_000, help="of pool, history and sanitized")
    parser.add_argument("--steps", type=int, default=5000, help="of memory")
    parser.add_argument("--variant", choices=memory.CHOICES, default="plain", help="of memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FILE")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "rlkernels-soak", metavar="DIR")
    parser.add_argument("--report", action="store_true", help="run nothing, print the table")
    args = parser.parse_args()
    if args.report:
        print(table(read_rows(args.records)), end="")
        return 0
    if args.part is None:
        parser.error(f"name a part: {', '.join(PARTS)}")
    torch.set_num_threads(1)
    started = time.monotonic()
    found = PARTS[args.part](args)
    row = {"part": args.part, **found, "seed": args.seed, "seconds": round(time.monotonic() - started)}
    add(args.records, row)
    print(f"{row['what']}: {row['found']}; {'; '.join(row['problems']) or 'nothing went wrong'}")
    return int(bool(row["problems"]))


def add(path: Path, row: dict[str, Any]) -> None:
    """Appends a row, with where it is from."""
    machine = f"{cpu_model()}, {len(os.sched_getaffinity(0))} core"
    append_row(path, row, {"torch": torch.__version__, "machine": machine, "python": platform.python_version()})


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line for every row."""
    lines = ["| what | for | found | went wrong | date |", "|---|---|---|---|---|"]
    for row in rows:
        wrong = "; ".join(row["problems"]) or "nothing"
        lines.append(f"| {row['what']} | {row['seconds'] / 60:.1f} min | {row['found']} | {wrong} | {row['date']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
