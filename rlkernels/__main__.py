"""``python -m rlkernels``: what is installed, and tools that need no code."""

import argparse
import json
import os
import sys

from rlkernels import __version__
from rlkernels._folder import folder_problem
from rlkernels._text import escape_controls


def show_info(args: argparse.Namespace) -> int:
    """Print what :func:`rlkernels.info` returns; return the exit code."""
    from rlkernels._info import info, print_info

    print(json.dumps(info(), indent=2)) if args.json else print_info()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code, 2 after an error."""
    if problem := folder_problem():
        print(f"rlkernels: {problem}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="rlkernels", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("info", help="what was compiled, which backends work, what each op would use")
    show.add_argument("--json", action="store_true", help="print JSON instead of text")
    show.set_defaults(run=show_info)
    from rlkernels.extrapolation import cli as extrapolate
    from rlkernels.proof import cli as prove
    from rlkernels.weights import cli as weights

    for name, command, does in (
        ("prove", prove, "find out which kernels are right and faster on this GPU"),
        ("extrapolate", extrapolate, "take checkpoints of any trainer further, without a gate"),
        ("weights", weights, "write a step of a run's weight history as a model"),
    ):
        arguments = commands.add_parser(name, help=does)
        command.add_arguments(arguments)
        arguments.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        return 0
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"rlkernels {args.command}: {escape_controls(str(error))}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    raise SystemExit(main())
