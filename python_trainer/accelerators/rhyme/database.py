"""The retrospective database: runs, their trajectories, and their right answers.

SQLite in WAL mode for a path or ``sqlite:///`` URL, PostgreSQL for a ``postgresql://`` URL. Every step of a run is one
transaction, so several trainers may write at once and a kill leaves whole steps. A connection lives for one
transaction. Tensors are safetensors bytes; nothing is ever unpickled.
"""

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError, OperationalError, SQLAlchemyError

from python_trainer.accelerators.database_url import FORMS, parse_database_url, show_database_url
from python_trainer.errors import UserError, on_one_line

APPLICATION_ID = 0x524C4B52  # "RLKR", in the header of SQLite files; the lock of PostgreSQL writers
VERSION = 4  # of the tables; another one is refused
MOST_ANSWERS = 1_000_000  # that are read at once
MOST_RUNS = 64  # in a database; the oldest go
BUSY_SECONDS = 60  # how long a writer waits for others
BUSY_PAUSE = 0.05  # seconds between two tries where SQLite does not wait by itself
TENSORS = "response_ids", "logprobs"  # of an answer, stored together

metadata = sa.MetaData()

meta_table = sa.Table(
    "rlkernels_meta", metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)  # fmt: skip

run_table = sa.Table(
    "rlkernels_runs", metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("created", sa.Float, nullable=False),  # seconds since 1970
    sa.Column("tokenizer", sa.String(64), nullable=False),  # fingerprint
    sa.Column("task", sa.String(200), nullable=False),
    sa.Column("settings", sa.Text, nullable=False),  # JSON
    sa.Column("checksum", sa.String(32), nullable=False),
)  # fmt: skip

step_table = sa.Table(
    "rlkernels_steps", metadata,
    sa.Column("run_id", sa.Integer, sa.ForeignKey("rlkernels_runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True),
    sa.Column("reward", sa.Float, nullable=False),  # mean, on the task's scale
    sa.Column("accuracy", sa.Float, nullable=False),
    sa.Column("generated_tokens", sa.BigInteger, nullable=False),  # what the step cost
    sa.Column("sketch", sa.LargeBinary, nullable=False),  # safetensors: sketch, outcomes, seconds
    sa.Column("checksum", sa.String(32), nullable=False),
)  # fmt: skip

answer_table = sa.Table(
    "rlkernels_rollouts", metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("run_id", sa.Integer, sa.ForeignKey("rlkernels_runs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("prompt_key", sa.String(32), nullable=False),  # of the prompt's text, whatever the tokenizer
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("finished", sa.Boolean, nullable=False),  # ended by itself, not by the length limit
    sa.Column("reward", sa.Float, nullable=False),
    sa.Column("tensors", sa.LargeBinary, nullable=False),  # safetensors: response_ids, logprobs (NaN where unknown)
    sa.Column("checksum", sa.String(32), nullable=False),
    sa.Index("rlkernels_rollouts_place", "run_id", "step"),
    sa.Index("rlkernels_rollouts_worth", "reward", "id"),
)  # fmt: skip


class StoredRow(BaseModel):
    """Types and ranges that every row of a table must have; ``checksum`` finds damage, not malice."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, from_attributes=True)

    def digest(self) -> str:
        """Return the checksum of the columns."""
        digest = hashlib.blake2b(digest_size=16)
        for name, value in self:
            data = value if isinstance(value, bytes) else repr(value).encode(errors="replace")
            digest.update(f"{name} {len(data)} ".encode() + data)
        return digest.hexdigest()


class RunRow(StoredRow):
    created: float
    tokenizer: str
    task: str
    settings: str


class StepRow(StoredRow):
    run_id: int
    step: int = Field(ge=0)
    reward: float
    accuracy: float
    generated_tokens: int = Field(ge=0)
    sketch: bytes


class AnswerRow(StoredRow):
    run_id: int
    step: int = Field(ge=0)
    prompt_key: str
    text: str
    finished: bool
    reward: float
    tensors: bytes


ROWS: dict[str, type[StoredRow]] = {run_table.name: RunRow, step_table.name: StepRow, answer_table.name: AnswerRow}


def with_checksum(table: sa.Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for a table, checked, with its checksum; other values are left out."""
    row = ROWS[table.name].model_validate(values)
    return row.model_dump() | {"checksum": row.digest()}


def check_row(table: sa.Table, row: sa.Row) -> Any:
    """Return the columns of a row; UserError if one has another type or range, or has changed since it was written."""
    try:
        columns = ROWS[table.name].model_validate(row)
    except ValidationError as error:
        problem = error.errors()[0]
        reason = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        raise UserError(f"a row of {table.name} is damaged ({reason})") from None
    if columns.digest() != row.checksum:
        raise UserError(f"a row of {table.name} is damaged (its checksum differs)")
    return columns


@dataclass(frozen=True)
class StoredRun:
    """A training run."""

    tokenizer: str  # fingerprint
    task: str
    settings: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0  # seconds since 1970
    id: int = 0  # by the database


@dataclass
class StepRecord:
    """One step of a training trajectory."""

    step: int
    reward: float  # mean over the fresh answers, on the task's scale
    accuracy: float
    sketch: dict[str, torch.Tensor]  # as of :func:`python_trainer.accelerators.rhyme.matching.sketch_of`
    generated_tokens: int = 0
    # of each group, where answers are right or wrong: prompts uint8 [G, 16], the key; answers and right int32 [G]
    outcomes: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0  # of training until the step was over; 0: unknown


@dataclass
class StoredAnswer:
    """One stored answer."""

    run_id: int
    step: int
    prompt_key: str
    text: str
    finished: bool
    reward: float
    tokenizer: str  # fingerprint
    response_ids: torch.Tensor  # int32 [T]
    logprobs: torch.Tensor  # float32 [T], of the policy that wrote it; NaN where unknown


def prompt_hash(prompt: str | list[dict[str, str]]) -> str:
    """Return the hash of a prompt's text or messages, whatever the tokenizer: 32 hexadecimal digits."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def unpack_tensors(data: bytes, *names: str) -> dict[str, torch.Tensor]:
    """Read safetensors bytes that hold tensors of these names; UserError if they are something else."""
    try:
        tensors = load(bytes(data))
        return tensors | {name: tensors[name] for name in names}
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UserError(f"tensors of the retrospective database are damaged ({on_one_line(error)})") from error


class RetrospectiveDatabase:
    """History of training runs, shared by all trainers that open it.

    Args:
        create: make the database if it does not exist; False: read only.

    Raises:
        UserError: the database is damaged, or belongs to another program or version; it stays as it is.
    """

    def __init__(self, url: str, *, create: bool = True):
        self._create = create
        self._engine = make_engine(url)
        self.name = show_database_url(self._engine.url)
        self.is_sqlite = self._engine.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            check_sqlite_file(Path(self._engine.url.database or ""), create=create)
        with self._transaction(write=create) as connection:  # to begin one for writing puts SQLite's header right
            self._open(connection, create)

    def _open(self, connection: sa.Connection, create: bool) -> None:
        if not sa.inspect(connection).has_table(meta_table.name):
            if not create:
                raise UserError(f"there is no retrospective database in {self.name}")
            metadata.create_all(connection, checkfirst=False)
            connection.execute(meta_table.insert(), [{"key": "version", "value": str(VERSION)}])
            if self.is_sqlite:
                connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        names = set(sa.inspect(connection).get_view_names()) & set(metadata.tables)
        if names:  # the query of a view may never end
            raise UserError(f"{self.name} holds views in the place of tables ({', '.join(sorted(names))})")
        version = sa.select(meta_table.c.value).where(meta_table.c.key == "version")
        schema_version = connection.execute(version).scalar()
        if schema_version != str(VERSION):
            raise UserError(
                f"{self.name} has schema version {schema_version}, must be {VERSION}: choose another database"
            )

    @contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[sa.Connection]:
        """Yield a connection in a transaction of its own; an error in it becomes one line."""
        try:
            with self._engine.begin() as connection:
                if self.is_sqlite:
                    if self._create:
                        write_ahead(connection)
                    # a writer takes the lock at once: two that both read first could never go on
                    begin = "BEGIN IMMEDIATE" if write else "BEGIN"
                    for statement in ("PRAGMA synchronous = NORMAL", "PRAGMA foreign_keys = ON", begin):
                        connection.exec_driver_sql(statement)
                elif write:  # two that make room at once would remove each other's rows
                    connection.execute(sa.text(f"SET LOCAL lock_timeout = '{BUSY_SECONDS}s'"))
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(APPLICATION_ID)))
                yield connection
        except (SQLAlchemyError, ValueError, OverflowError, TypeError) as error:  # the last three: damaged values
            reason = error.orig if isinstance(error, DatabaseError) else error
            raise UserError(f"retrospective database {self.name}: {on_one_line(reason)}") from error

    def add_run(self, run: StoredRun) -> int:
        """Add a run; return its id. The oldest runs go if there are too many."""
        values = with_checksum(run_table, vars(run) | {"settings": json.dumps(run.settings)})
        newest = sa.select(run_table.c.id).order_by(run_table.c.id.desc()).limit(MOST_RUNS).subquery()
        with self._transaction() as connection:
            run_id = connection.execute(run_table.insert().values(values).returning(run_table.c.id)).scalar_one()
            connection.execute(run_table.delete().where(run_table.c.id.not_in(sa.select(newest.c.id))))
            return int(run_id)

    def add_step(self, run_id: int, record: StepRecord, answers: Sequence[StoredAnswer], *, created: float = 0) -> bool:
        """Store one step with its answers, all or nothing, in place of what there is of it already.

        Returns whether the run is there, and still the one that was created then; else nothing has changed.
        """
        rows = [answer_row(run_id, record.step, answer) for answer in answers]
        tensors = {"seconds": torch.tensor(record.seconds, dtype=torch.float64)} | record.sketch | record.outcomes
        step = with_checksum(step_table, vars(record) | {"run_id": run_id, "sketch": save(tensors)})
        if self.is_sqlite and not Path(self._engine.url.database or "").exists():  # SQLite would make a new file
            return False
        with self._transaction() as connection:
            stored = connection.execute(sa.select(run_table.c.created).where(run_table.c.id == run_id)).scalar()
            if stored != created:
                return False
            for table in (answer_table, step_table):
                connection.execute(table.delete().where(table.c.run_id == run_id, table.c.step == record.step))
            connection.execute(step_table.insert(), [step])
            if rows:
                connection.execute(answer_table.insert(), rows)
        return True

    def remove_run(self, run_id: int, *, created: float) -> None:
        """Remove a run and all that it stored, if it is still the one that was created then."""
        with self._transaction() as connection:
            connection.execute(run_table.delete().where(run_table.c.id == run_id, run_table.c.created == created))

    def runs(self) -> list[StoredRun]:
        """Return all runs, oldest first."""
        with self._transaction(write=False) as connection:
            rows = connection.execute(sa.select(run_table).order_by(run_table.c.id)).all()
        return [run_of(row) for row in rows]

    def trajectory(self, run_id: int) -> list[StepRecord]:
        """Return the steps of a run in order."""
        query = sa.select(step_table).where(step_table.c.run_id == run_id).order_by(step_table.c.step)
        with self._transaction(write=False) as connection:
            return [step_of(row) for row in connection.execute(query)]

    def samples(
        self, *, prompt_hashes: Sequence[str] | None = None, limit: int = MOST_ANSWERS, without_run: int = 0
    ) -> list[StoredAnswer]:
        """Return stored answers, best and newest first: at most so many, to some prompts, of all runs but one."""
        query = sa.select(answer_table, run_table.c.tokenizer).join(run_table, run_table.c.id == answer_table.c.run_id)
        query = query.where(answer_table.c.run_id != without_run)  # no run has the id 0
        query = query.order_by(answer_table.c.reward.desc(), answer_table.c.id.desc())
        hashes = None if prompt_hashes is None else set(prompt_hashes)
        with self._transaction(write=False) as connection:
            rows = connection.execution_options(yield_per=1000).execute(query)
            answers = (answer_of(row) for row in rows if hashes is None or row.prompt_key in hashes)
            return list(islice(answers, limit))


def answer_row(run_id: int, step: int, answer: StoredAnswer) -> dict[str, Any]:
    packed = save({name: getattr(answer, name) for name in TENSORS})
    # PostgreSQL takes no NUL in texts, and no database a lone surrogate
    text = answer.text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace")
    changes = {"run_id": run_id, "step": step, "text": text.decode(), "tensors": packed}
    return with_checksum(answer_table, vars(answer) | changes)


def answer_of(row: sa.Row) -> StoredAnswer:
    columns = check_row(answer_table, row)
    tensors = unpack_tensors(columns.tensors, *TENSORS)
    ids, logprobs = (tensors[name] for name in TENSORS)
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64) or (ids < 0).any():
        raise UserError(f"response_ids of a row of {answer_table.name} must be token ids, got {tuple(ids.shape)}")
    if logprobs.shape != ids.shape or not logprobs.is_floating_point() or logprobs.isinf().any():
        raise UserError(f"logprobs of a row of {answer_table.name} must be finite or NaN, one for each token")
    facts = columns.model_dump(exclude={"tensors"})
    return StoredAnswer(**facts, tokenizer=str(row.tokenizer), response_ids=ids, logprobs=logprobs)


def step_of(row: sa.Row) -> StepRecord:
    columns = check_row(step_table, row)
    tensors = unpack_tensors(columns.sketch)
    outcomes = {name: tensors.pop(name) for name in sorted({"prompts", "answers", "right"} & tensors.keys())}
    seconds = tensors.pop("seconds", torch.tensor(0.0))  # older rows have none
    if seconds.shape or not seconds.is_floating_point() or not seconds >= 0:
        raise UserError(f"seconds of a row of {step_table.name} must be a number of at least 0, got {seconds}")
    facts = columns.step, columns.reward, columns.accuracy, tensors, columns.generated_tokens, outcomes
    return StepRecord(*facts, float(seconds))


def run_of(row: sa.Row) -> StoredRun:
    columns = check_row(run_table, row)
    settings = json.loads(columns.settings)
    if not isinstance(settings, dict):
        raise UserError(f"settings of a row of {run_table.name} must be an object, got {type(settings).__name__}")
    return StoredRun(columns.tokenizer, columns.task, settings, columns.created, row.id)


def write_ahead(connection: sa.Connection) -> None:
    """Let SQLite log ahead, which is written into the file; wait for others, for whom SQLite itself does not here."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            return
        except OperationalError as error:
            if getattr(error.orig, "sqlite_errorname", None) != "SQLITE_BUSY" or time.monotonic() >= deadline:
                raise
            time.sleep(BUSY_PAUSE)


def make_engine(place: str) -> sa.Engine:
    """Return the engine of a path or URL, which opens nothing yet; UserError if it can be of no database."""
    url = parse_database_url(place)
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    is_sqlite = url.get_backend_name() == "sqlite"
    if is_sqlite:  # a reward function may change the working folder
        url = url.set(database=str(Path(url.database or "").absolute()))
    # transactions of SQLite begin where we say, not where the driver thinks
    options = {"timeout": BUSY_SECONDS, "isolation_level": None} if is_sqlite else {}
    try:
        return sa.create_engine(url, poolclass=sa.NullPool, connect_args=options)
    except (ImportError, NoSuchModuleError) as error:
        lack = f"{url.drivername} needs {getattr(error, 'name', None) or error}"
        raise UserError(f"{lack}: pip install 'psycopg[binary]', and write postgresql://") from error
    except (ArgumentError, ValueError) as error:  # ValueError: an option of the query is no number
        shown = show_database_url(url)
        raise UserError(f"{shown!r} cannot be used ({on_one_line(error)}): write {FORMS}") from error


def check_sqlite_file(path: Path, *, create: bool) -> None:
    """Refuse a file that is no SQLite database, belongs to another program or is damaged, before a write to it."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"cannot be made: there is no folder {path.absolute().parent}"
        raise UserError(f"retrospective database {path} {problem}")
    if not path.exists() or not path.stat().st_size:  # a kill while it was made leaves an empty file
        if not create:
            raise UserError(f"there is no retrospective database {path}")
        return
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS)) as connection:
            connection.execute("BEGIN")  # one look, while another may be making it
            (owner,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            programs = connection.execute("SELECT count(*) FROM sqlite_master WHERE type IN ('view', 'trigger')")
            if tables and owner != APPLICATION_ID:
                raise UserError(f"{path} is the SQLite database of another program; it was left as it is")
            if programs.fetchone()[0]:  # their queries may never end
                raise UserError(f"{path} holds views or triggers, which no trainer makes; it was left as it is")
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # their messages quote what is there
        verdict = str(error)
    if verdict != "ok":
        raise UserError(f"retrospective database {path} cannot be used ({on_one_line(verdict)}); it was left as it is")
