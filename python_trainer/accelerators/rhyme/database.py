"""The retrospective database: runs, their trajectories, and the good answers that they found.

SQLite in WAL mode for a path or ``sqlite:///`` URL, PostgreSQL for a ``postgresql://`` URL. Every step of a run is one
transaction, so several trainers may write at once and a kill leaves whole steps. A connection lives for one
transaction. Tensors are safetensors bytes; nothing is ever unpickled.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import torch
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from python_trainer.accelerators.rhyme import schema
from python_trainer.accelerators.rhyme.reaching import check_sqlite_file, make_engine, one_writer, parse_url
from python_trainer.accelerators.rhyme.records import (
    RunFacts,
    StepRecord,
    StoredAnswer,
    StoredRun,
    pack_tensors,
    unpack_tensors,
)
from python_trainer.accelerators.rhyme.sketch import PARTS
from python_trainer.errors import UserError

ROW_BYTES = 200  # what a row takes next to its payload, about
WRITERS = 16  # that may fill the room there is side by side; with more the bound is passed by their share of it
KEEP_SHARE = 0.9  # retention removes down to this share, so that it need not run at every step


class RetrospectiveDatabase:
    """History of training runs, shared by all trainers that open it.

    Args:
        url: a path, a ``sqlite:///`` URL or a ``postgresql://`` URL.
        max_bytes: bound on everything stored (text, tensors, and 200 bytes a row). When a write exceeds it, answers are
            removed, lowest reward first and oldest first among equals, until 90 % are left; should trajectories
            alone exceed it, the oldest runs go as a whole. A SQLite file does not shrink, but reuses the space.
        create: make the database when it is not there; false: for reading, which leaves a file as it is.

    Raises:
        UserError: it cannot be reached or written, is damaged, was made by something else or by another version.
            Such a file is never changed.
    """

    def __init__(self, url: str, *, max_bytes: int = 1 << 30, create: bool = True):
        self.url, self.max_bytes = url, max_bytes
        self._room = 0  # what may be written before the sizes are added up again
        parsed = parse_url(url)
        self.name = parsed.render_as_string(hide_password=True)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if self.is_sqlite:
            check_sqlite_file(Path(parsed.database or ""), create=create)
        self._engine = make_engine(parsed, self.is_sqlite, create)
        with self._transaction(write=create) as connection:  # to begin one for writing puts SQLite's header right
            self._open(connection, create)

    def _open(self, connection: sa.Connection, create: bool) -> None:
        present = set(sa.inspect(connection).get_table_names())
        if schema.meta.name not in present:
            if not create:
                raise UserError(f"there is no retrospective database in {self.name}")
            if set(schema.metadata.tables) & present:
                raise UserError(f"{self.name} has tables of a retrospective database, but not all of them: damaged")
            schema.metadata.create_all(connection, checkfirst=False)
            facts = {"application": schema.APPLICATION, "version": str(schema.VERSION)}
            connection.execute(schema.meta.insert(), [{"key": k, "value": v} for k, v in facts.items()])
            if self.is_sqlite:
                connection.exec_driver_sql(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        found = {key: value for key, value in connection.execute(sa.select(schema.meta.c.key, schema.meta.c.value))}
        if found.get("application") != schema.APPLICATION:
            raise UserError(f"{self.name} is not a retrospective database")
        if found.get("version") != str(schema.VERSION):
            raise UserError(
                f"{self.name} has schema version {found.get('version')}, this program reads and writes version "
                f"{schema.VERSION}; choose another database"
            )

    @contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[sa.Connection]:
        """A connection in a transaction of its own; what goes wrong in it is told in one line."""
        try:
            with self._engine.connect() as connection:
                connection = connection.execution_options(rlkernels_write=write)
                with connection.begin():
                    if write and not self.is_sqlite:
                        one_writer(connection)
                    yield connection
        except DatabaseError as error:
            reason = " ".join(str(error.orig).split())
            raise UserError(f"retrospective database {self.name}: {reason}") from error
        except (SQLAlchemyError, UnicodeDecodeError) as error:
            raise UserError(f"retrospective database {self.name}: {' '.join(str(error).split())}") from error

    def add_run(self, facts: RunFacts, *, created: float | None = None) -> int:
        """Begins a run -> its id. ``created``: when, in seconds since 1970; None: now."""
        values = {name: getattr(facts, name) for name in ("family", "parameters", "tokenizer", "task", "algorithm")}
        values |= {"created": time.time() if created is None else created, "settings": json.dumps(facts.settings)}
        with self._transaction() as connection:
            return int(connection.execute(schema.runs.insert().values(values).returning(schema.runs.c.id)).scalar_one())

    def add_step(self, run_id: int, record: StepRecord, samples: Sequence[StoredAnswer]) -> None:
        """Stores one step with its answers, all or nothing. A step that is there already is replaced.

        A run that the retention rule has removed takes no more steps.
        """
        sketch = pack_tensors(record.sketch | record.outcomes)
        rows: list[dict[str, Any]] = []
        for sample in samples:
            tensors = pack_tensors(
                {
                    "response_ids": torch.tensor(sample.response_ids, dtype=torch.int32),
                    "logprobs": torch.tensor(sample.logprobs, dtype=torch.float32),
                }
            )
            rows.append(
                {
                    "run_id": run_id,
                    "step": record.step,
                    "policy_version": sample.policy_version,
                    "prompt_key": sample.prompt_key,
                    "text": storable(sample.text),
                    "finished": sample.finished,
                    "reward": sample.reward,
                    "tensors": tensors,
                    "bytes": len(tensors) + len(sample.text.encode(errors="replace")) + ROW_BYTES,
                }
            )
        with self._transaction() as connection:
            if connection.execute(sa.select(schema.runs.c.id).where(schema.runs.c.id == run_id)).first() is None:
                return
            for table in (schema.rollouts, schema.steps):
                connection.execute(table.delete().where(table.c.run_id == run_id, table.c.step == record.step))
            connection.execute(
                schema.steps.insert().values(
                    run_id=run_id,
                    step=record.step,
                    policy_version=record.policy_version,
                    reward=record.reward,
                    accuracy=record.accuracy,
                    generated_tokens=record.generated_tokens,
                    rollouts=len(rows),
                    sketch=sketch,
                    bytes=len(sketch) + ROW_BYTES,
                )
            )
            if rows:
                connection.execute(schema.rollouts.insert(), rows)
            self._room -= len(sketch) + ROW_BYTES + sum(row["bytes"] for row in rows)
            if self._room < 0:
                self._retain(connection, run_id)
                self._room = (self.max_bytes - self._held(connection)) // WRITERS

    def cut_run(self, run_id: int, after_step: int, *, created: float) -> bool:
        """Forgets the steps of a run beyond ``after_step``, which are made again.

        Returns whether the run is there and still the one that was created then; else nothing has changed.
        """
        run = schema.runs.c
        with self._transaction() as connection:
            if connection.execute(sa.select(run.id).where(run.id == run_id, run.created == created)).first() is None:
                return False
            for table in (schema.rollouts, schema.steps):
                connection.execute(table.delete().where(table.c.run_id == run_id, table.c.step > after_step))
        return True

    def remove_run(self, run_id: int, *, created: float) -> None:
        """Forgets a run and all that it stored, if it is still the one that was created then."""
        table = schema.runs
        with self._transaction() as connection:
            connection.execute(table.delete().where(table.c.id == run_id, table.c.created == created))

    def _retain(self, connection: sa.Connection, writing: int) -> None:
        """The retention rule of the class."""
        sizes = {table: self._bytes(connection, table) for table in (schema.rollouts, schema.steps)}
        if sum(sizes.values()) <= self.max_bytes:
            return
        budget = int(self.max_bytes * KEEP_SHARE)
        table = schema.rollouts
        # best and newest first: what still fits next to the trajectories stays
        room, last = budget - sizes[schema.steps], None
        order = sa.select(table.c.id, table.c.bytes).order_by(table.c.reward.desc(), table.c.id.desc())
        kept = []
        for key, size in connection.execute(order):
            room -= size
            if room < 0:
                break
            kept.append(key)
            last = key
        if last is None:
            connection.execute(table.delete())
        else:
            reward = connection.execute(sa.select(table.c.reward).where(table.c.id == last)).scalar_one()
            worse = sa.or_(table.c.reward < reward, sa.and_(table.c.reward == reward, table.c.id < last))
            connection.execute(table.delete().where(worse))
        others = sa.select(schema.runs.c.id).where(schema.runs.c.id != writing).order_by(schema.runs.c.id)
        for run_id in connection.execute(others).scalars().all():
            if self._bytes(connection, schema.steps) <= budget:
                return
            connection.execute(schema.runs.delete().where(schema.runs.c.id == run_id))

    @staticmethod
    def _bytes(connection: sa.Connection, table: sa.Table) -> int:
        return int(connection.execute(sa.select(sa.func.coalesce(sa.func.sum(table.c.bytes), 0))).scalar_one())

    def bytes(self) -> int:
        """What ``max_bytes`` bounds."""
        with self._transaction(write=False) as connection:
            return self._held(connection)

    def _held(self, connection: sa.Connection) -> int:
        return sum(self._bytes(connection, table) for table in (schema.rollouts, schema.steps))

    def runs(self) -> list[StoredRun]:
        """All runs, oldest first."""
        runs, steps, rollouts = schema.runs, schema.steps, schema.rollouts
        totals = [
            sa.select(total).where(table.c.run_id == runs.c.id).scalar_subquery()
            for table, total in (
                (steps, sa.func.count()),
                (rollouts, sa.func.count()),
                (steps, sa.cast(sa.func.coalesce(sa.func.sum(steps.c.generated_tokens), 0), sa.BigInteger)),
            )
        ]
        newest = sa.select(steps).where(steps.c.run_id == runs.c.id).order_by(steps.c.step.desc()).limit(1)
        last = [newest.with_only_columns(of).scalar_subquery() for of in (steps.c.reward, steps.c.accuracy)]
        with self._transaction(write=False) as connection:
            rows = connection.execute(sa.select(runs, *totals, *last).order_by(runs.c.id)).all()
        return [
            StoredRun(
                row.id,
                row.created,
                RunFacts(row.family, row.parameters, row.tokenizer, row.task, row.algorithm, json.loads(row.settings)),
                *row[-5:],
            )
            for row in rows
        ]

    def trajectory(self, run_id: int) -> list[StepRecord]:
        """The steps of a run in order."""
        table = schema.steps
        with self._transaction(write=False) as connection:
            rows = connection.execute(sa.select(table).where(table.c.run_id == run_id).order_by(table.c.step)).all()
        return [step_of(row) for row in rows]

    def samples(
        self, *, prompt_keys: Sequence[str] | None = None, limit: int | None = None, without_run: int | None = None
    ) -> list[StoredAnswer]:
        """Stored answers, best and newest first.

        Args:
            prompt_keys: only to these prompts.
            limit: at most so many.
            without_run: leave out this run.
        """
        table = schema.rollouts
        query = sa.select(table, schema.runs.c.tokenizer).join(schema.runs, schema.runs.c.id == table.c.run_id)
        if without_run is not None:
            query = query.where(table.c.run_id != without_run)
        query = query.order_by(table.c.reward.desc(), table.c.id.desc())
        wanted = None if prompt_keys is None else set(prompt_keys)
        found: list[StoredAnswer] = []
        with self._transaction(write=False) as connection:
            for row in connection.execution_options(yield_per=1000).execute(query):
                if limit is not None and len(found) >= limit:
                    break
                if wanted is None or row.prompt_key in wanted:
                    found.append(sample_of(row))
        return found


def step_of(row: sa.Row) -> StepRecord:
    sketch = unpack_tensors(row.sketch)
    outcomes = {name: sketch.pop(name) for name in sketch.keys() - PARTS.keys()}
    return StepRecord(row.step, row.policy_version, row.reward, row.accuracy, sketch, row.generated_tokens, outcomes)


def sample_of(row: sa.Row) -> StoredAnswer:
    tensors = unpack_tensors(row.tensors)
    return StoredAnswer(
        row.run_id,
        row.step,
        row.policy_version,
        row.prompt_key,
        row.text,
        row.finished,
        row.reward,
        tensors["response_ids"].tolist(),
        tensors["logprobs"].tolist(),
        row.tokenizer,
    )


def storable(text: str) -> str:
    """PostgreSQL knows no NUL in texts, and no database a lone surrogate."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
