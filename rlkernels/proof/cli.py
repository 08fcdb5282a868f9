"""``python -m rlkernels prove``: verdicts for this GPU, and a record of them."""

import argparse
from pathlib import Path

from rlkernels.proof import compile_candidates, prove, write_record
from rlkernels.verdicts import summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--ops", nargs="+", metavar="OP", help="these ops only (default: all that have a GPU kernel)")
    parser.add_argument("--seconds", type=float, default=60, help="time for all of it (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="prove anew what has a verdict")
    parser.add_argument("--device", help="cuda:1, say (default: the current CUDA device; cpu: a dry run)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a record for bench/gpu/records")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; return 1 if an op was left out, else 0."""
    result = prove(args.ops, device=args.device, seconds=args.seconds, again=args.again)
    for op, verdict in result["verdicts"].items():
        print(f"{op:<24} {verdict['backend']:<7} {summary(verdict)}".rstrip())
    left_out = result["left_out"]
    for reason in dict.fromkeys(left_out.values()):
        print(f"{reason}: {', '.join(op for op in left_out if left_out[op] == reason)}")
    if args.record:
        write_record(args.record, result, {})  # compiling takes a while
        write_record(args.record, result, compile_candidates(result, args.device))
        print(f"record: {args.record}")
    return 1 if left_out else 0
