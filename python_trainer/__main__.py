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
    tell,
    tell_error,
)

# nothing that the trainer can help
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENOMEM)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, also for a run that was asked to stop and has saved; 2 after one line on what the user can fix."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from python_trainer.commands import parse_arguments

        args = parse_arguments(argv)
        args.call(args)
        sys.stdout.flush()
    except (UserError, NotFinite) as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        tell_error(error, hide_passwords(" ".join(said.split())))
        return 2
    except ModuleNotFoundError as error:
        install = "`pip install --no-build-isolation '.[train]'` in the clone, or `pip install 'NAME.whl[train]'`"
        tell_error(error, f"{error} by {sys.executable}; the extra train brings what python_trainer needs: {install}")
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
        tell(str(stopped))
    except KeyboardInterrupt:
        print("interrupted: a run goes on from its newest checkpoint, if there is one", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
