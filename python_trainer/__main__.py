"""The command line: ``python -m python_trainer --help``."""

import errno
import os
import sys

from python_trainer.errors import (
    Interrupted,
    NotFinite,
    UserError,
    hide_passwords,
    is_lost_connection,
    is_out_of_memory,
    is_timed_out,
    tell,
    tell_error,
)
from python_trainer.process.terminal import surviving
from rlkernels._folder import folder_problem

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# the user's to mend: a full, small, read-only or broken disk, a file of others
DISK_ERRORS = (*FULL_DISK, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EACCES)


def main(argv: list[str] | None = None) -> int:
    """Run a command; return 0, also after a signal that saved the run, or 2 after a user's error, told in one line."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with surviving():
        return run(argv)


def run(argv: list[str] | None) -> int:
    """Run a command, within :func:`surviving`; return the exit code."""
    try:
        if problem := folder_problem():
            raise UserError(problem)
        from python_trainer.command_line.commands import parse_arguments

        args = parse_arguments(argv)
        args.call(args)
    except Interrupted as stopped:
        tell(str(stopped))
    except KeyboardInterrupt:
        print("interrupted: a run continues from its newest checkpoint, if there is one", file=sys.stderr)
        return 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        notes = "; ".join([message, *getattr(error, "__notes__", ())])
        tell_error(error, hide_passwords(" ".join(notes.split())))
        return 2
    return 0


def explain(error: Exception) -> str | None:
    """Return one line on an error that the user can mend; None: a mistake in the program, which needs a traceback."""
    if isinstance(error, UserError | NotFinite) or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
        return f"{error}: make room there" if getattr(error, "errno", None) in FULL_DISK else str(error)
    if isinstance(error, ModuleNotFoundError):
        install = "`pip install --no-build-isolation -e '.[train]'` in the clone, or `pip install 'NAME.whl[train]'`"
        return f"{error} by {sys.executable}; the extra train brings what python_trainer needs: {install}"
    if isinstance(error, MemoryError | RuntimeError) and is_out_of_memory(error):
        return "; ".join(["out of memory", *str(error).splitlines()[:1]])
    if isinstance(error, RuntimeError) and is_lost_connection(error):
        return "another process has ended: its own message says why, or the report of torchrun"
    if isinstance(error, RuntimeError) and is_timed_out(error):
        return "another process did not come within ddp_timeout"
    return None


if __name__ == "__main__":
    sys.exit(main())
