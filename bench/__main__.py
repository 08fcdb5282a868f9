"""``python -m bench``: run benchmarks, print a table each and append the rows to one CSV."""

import argparse
import sys
import traceback
from pathlib import Path

import torch
from rich.console import Console

from bench import _runner


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 when a benchmark failed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmark files to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--only", metavar="TEXT", default="", help="run only cases whose shape contains this")
    parser.add_argument("--quick", action="store_true", help="small shapes, short runs; keeps no rows without --csv")
    parser.add_argument("--csv", type=Path, help=f"file to append to (default: {_runner.RESULTS})")
    parser.add_argument("--threads", type=int, help="threads of torch and of the kernels (default: all cores)")
    parser.add_argument("--seconds", type=float, help="time budget per provider and case (default: 1, quick: 0.1)")
    args = parser.parse_args(argv)
    names = _runner.find()
    unknown = [name for name in args.names if name not in names]
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(names)}")
    if args.list:
        print("\n".join(names))
        return 0
    if args.threads is not None:
        if args.threads < 1:
            parser.error(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    seconds = args.seconds or (0.1 if args.quick else 1.0)
    csv = args.csv or (None if args.quick else _runner.RESULTS)
    facts = _runner.stamp()
    failed = []
    num_rows = 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name in args.names or names:
        try:
            for rows in _runner.run_file(name, args.quick, seconds, console, args.only):
                num_rows += len(rows)
                if csv:
                    _runner.append(csv, rows, facts)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if args.only and not num_rows and not failed:
        parser.error(f"--only must be a part of the shape of a case, got {args.only!r}")
    console.print(", ".join(f"{key} {value}" for key, value in facts.items() if value), highlight=False)
    if csv:
        console.print(f"rows appended to {csv}", highlight=False)
    if failed:
        console.print(f"FAILED: {', '.join(failed)}", style="bold red")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
