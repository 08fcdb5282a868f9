"""How the retrospective database is reached: its URL, its file, its connections."""

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from python_trainer.accelerators.rhyme import schema
from python_trainer.errors import UserError, hide_passwords

BUSY_SECONDS = 60  # how long a writer waits for others
SQLITE_MAGIC = b"SQLite format 3\0"
WRITE_LOCK = 0x524C4B52  # PostgreSQL advisory lock


def parse_url(url: str) -> sa.URL:
    """A path or URL as SQLAlchemy's URL."""
    try:
        parsed = sa.make_url(url if "://" in url else f"sqlite:///{url}")
    except (ArgumentError, ValueError) as error:  # of a port that is no number
        raise UserError(
            f"{hide_passwords(url)!r} is neither a path nor a database URL such as postgresql://user@host/name"
        ) from error
    kind = parsed.get_backend_name()
    if kind not in ("sqlite", "postgresql", "postgres"):
        raise UserError(f"a retrospective database is a path, sqlite:/// or postgresql://, got {kind}://")
    if kind == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise UserError(f"a retrospective database needs a file, got {url!r}")
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed


def one_writer(connection: sa.Connection) -> None:
    """On PostgreSQL what SQLite does anyway: two that make room at once would remove what the other has just read."""
    connection.execute(sa.text(f"SET LOCAL lock_timeout = '{BUSY_SECONDS}s'"))
    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": WRITE_LOCK})


def make_engine(url: sa.URL, is_sqlite: bool, create: bool) -> sa.Engine:
    options = {"connect_args": {"timeout": BUSY_SECONDS}} if is_sqlite else {}
    try:
        engine = sa.create_engine(url, poolclass=sa.NullPool, **options)
    except (ImportError, NoSuchModuleError) as error:
        missing = getattr(error, "name", None) or error
        raise UserError(f"{url.drivername} needs {missing}: pip install 'psycopg[binary]'") from error
    if is_sqlite:

        @event.listens_for(engine, "connect")
        def set_up(connection, record):
            connection.isolation_level = None  # transactions begin below, not where the driver thinks
            journal = ["journal_mode = WAL"] if create else []  # which is written into the file
            for pragma in (*journal, "synchronous = NORMAL", "foreign_keys = ON"):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def begin(connection):
            # a writer takes the lock at once: two that both read first could never go on
            write = connection.get_execution_options().get("rlkernels_write", True)
            connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def check_sqlite_file(path: Path, *, create: bool) -> None:
    """Looks at a file before anything may write to it.

    Raises:
        UserError: it is no SQLite database, one of another program, or damaged.
    """
    import sqlite3

    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a folder" if path.is_dir() else f"cannot be made: there is no folder {path.absolute().parent}"
        raise UserError(f"retrospective database {path} {what}")
    try:
        with path.open("rb") as file:
            head = file.read(len(SQLITE_MAGIC))
    except FileNotFoundError:
        if not create:
            raise UserError(f"there is no retrospective database {path}") from None
        return
    except OSError as error:
        raise UserError(f"retrospective database {path} cannot be read: {error.strerror}") from error
    if not head:
        if not create:
            raise UserError(f"there is no retrospective database in {path}: the file is empty")
        return  # a kill while it was made
    if head != SQLITE_MAGIC:
        raise UserError(f"{path} is not a retrospective database: it is no SQLite file; it was left as it is")
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)
        try:
            connection.execute("BEGIN")  # one look, while another may be making it
            (owner,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and owner != schema.APPLICATION_ID:
                raise UserError(f"{path} is the SQLite database of another program; it was left as it is")
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        finally:
            connection.close()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # whose messages quote what is there
        raise UserError(f"retrospective database {path} is damaged ({error}); it was left as it is") from error
    if verdict != "ok":
        reason = " ".join(verdict.split())
        raise UserError(f"retrospective database {path} is damaged ({reason}); it was left as it is")
