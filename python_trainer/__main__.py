"""The command line: ``python -m python_trainer --help``; commands of its own, and those of accelerators."""

import argparse
import errno
import os
import sys

from python_trainer.errors import (
    Interrupted,
    NotFinite,
    UserError,
    found_by_each,
    hide_passwords,
    is_lost_connection,
    is_out_of_memory,
    tell,
    tell_error,
)
from python_trainer.parsers import check_packages, make_parser
from python_trainer.registry import load

# nothing that the trainer can help
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENOMEM)


def how_to_go_on(args: argparse.Namespace) -> str:
    """What becomes of a run that was interrupted; empty for commands that have none."""
    if args.command == "compare":
        return "; the same command keeps what is finished and goes on with the rest"
    if args.command not in ("train", "sft"):
        return ""
    # list_checkpoints would import torch, and that may be what was interrupted
    if not any((args.output_dir / "checkpoints").glob("step-*")):
        return "; there is no checkpoint to go on from"
    return f"; the same command{'' if args.resume else ' with --resume'} goes on from the newest checkpoint"


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, also for a run that was asked to stop and has saved; 2 after one line on what the user can fix."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args = argparse.Namespace(command=None)
    try:
        with found_by_each():
            make_parser().parse_args(argv, args)
            check_packages()
            call = load(args.call) if isinstance(args.call, str) else args.call
        call(args)
        sys.stdout.flush()
    except (UserError, NotFinite) as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        tell_error(error, hide_passwords(" ".join(said.split())))
        return 2
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        tell_error(error, f"{error}; {'; '.join(getattr(error, '__notes__', ()))}".rstrip("; "))
        return 2
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            what = ["out of memory", *str(error).splitlines()[:1]]
        elif is_lost_connection(error):
            what = ["another process has ended: its own message says why, or the report of torchrun"]
        else:
            raise
        tell_error(error, "; ".join([*what, *getattr(error, "__notes__", ())]))
        return 2
    except Interrupted as stopped:
        tell(f"{stopped}{how_to_go_on(args)}")
    except KeyboardInterrupt:
        print(f"interrupted{how_to_go_on(args)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
