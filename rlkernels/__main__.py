"""``python -m rlkernels``: what is installed, and tools that need no code."""

import argparse
import json
import os
import sys

from rlkernels import __version__


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="rlkernels", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("info", help="what was compiled, which backends work, what each op would use")
    show.add_argument("--json", action="store_true", help="print JSON instead of text")
    proof = commands.add_parser("prove", help="find out which kernels are right and faster on this GPU")
    rank1 = commands.add_parser("rank1", help="leading direction of every weight update between two checkpoints")
    further = commands.add_parser("extrapolate", help="take checkpoints of any trainer further, without a gate")
    from rlkernels.extrapolation import cli as extrapolate_cli
    from rlkernels.proof import cli as prove_cli
    from rlkernels.rank1 import cli as rank1_cli

    prove_cli.add_arguments(proof)
    rank1_cli.add_arguments(rank1)
    extrapolate_cli.add_arguments(further)
    args = parser.parse_args(argv)
    try:
        if args.command == "rank1":
            return rank1_cli.run(args)
        if args.command == "extrapolate":
            return extrapolate_cli.run(args)
        if args.command == "prove":
            return prove_cli.run(args)
        from rlkernels._info import info, print_info

        print(json.dumps(info(), indent=2)) if args.json else print_info()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
