"""The retrospective database on SQLite and PostgreSQL: round trips, bounds, many writers, kills, damage."""

import math
import multiprocessing
import random
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
import sqlalchemy as sa
import torch
from support import assert_equal

from python_trainer.__main__ import main
from python_trainer.accelerators.rhyme import database as database_module
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StepRecord, meta_table, prompt_hash
from python_trainer.accelerators.rhyme.matching import PARTS
from python_trainer.errors import UserError

from .conftest import FACTS, make_sample, make_step


def test_round_trip(database, url):
    run = database.add_run(FACTS)
    sample = make_sample(text="héllo\nA:15", key=prompt_hash("12+3="))
    counts = {"prompts": torch.arange(32, dtype=torch.uint8).reshape(2, 16), "right": torch.tensor([0, 3])}
    steps = [make_step(1, 0.25), replace(make_step(2, 0.75), outcomes=counts)]
    for record, answers in zip(steps, ([sample], [])):
        database.add_step(run, record, answers)
    reopened = RetrospectiveDatabase(url, create=False)
    assert reopened.runs() == [replace(FACTS, id=run)]
    assert_equal(list(map(vars, reopened.trajectory(run))), list(map(vars, steps)))
    (stored,) = reopened.samples()
    assert (stored.text, stored.tokenizer, stored.finished) == (sample.text, "tok", True)
    assert torch.equal(stored.response_ids, sample.response_ids) and stored.run_id == run
    assert torch.equal(stored.logprobs.nan_to_num(7), sample.logprobs.nan_to_num(7))


def test_a_step_is_replaced_in_its_own_run_only(database):
    run = database.add_run(FACTS)
    created = database.runs()[0].created
    for step in (1, 2, 3, 2):
        answers = [make_sample(step, text=f"{step}")]
        assert database.add_step(run, make_step(step, step / 10), answers, created=created)
    assert [s.step for s in database.trajectory(run)] == [1, 2, 3] and len(database.samples()) == 3
    for changes in ({"run_id": run + 1, "created": created}, {"run_id": run, "created": created - 1}):
        assert not database.add_step(record=make_step(4), answers=[make_sample()], **changes)
    assert [s.step for s in database.trajectory(run)] == [1, 2, 3] and len(database.samples()) == 3


def test_samples_come_best_and_newest_first_and_by_prompt(database):
    first = database.add_run(FACTS)
    second = database.add_run(FACTS)
    answers = [make_sample(reward=r, text=f"{r}", key=k) for r, k in ((0.5, "a"), (1, "b"))]
    database.add_step(first, make_step(1), answers)
    database.add_step(second, make_step(1), [make_sample(reward=1, text="new", key="a")])
    assert [s.text for s in database.samples()] == ["new", "1", "0.5"]
    assert [s.text for s in database.samples(prompt_hashes=["a"])] == ["new", "0.5"]
    assert [s.text for s in database.samples(limit=1)] == ["new"]
    assert [s.text for s in database.samples(without_run=second)] == ["1", "0.5"]


def test_texts_that_no_database_takes_as_they_are(database):
    run = database.add_run(FACTS)
    database.add_step(run, make_step(), [make_sample(text="a\0b"), make_sample(text="c\ud800d")])
    assert sorted(s.text for s in database.samples()) == ["a\N{REPLACEMENT CHARACTER}b", "c?d"]


def test_the_oldest_runs_go(url, monkeypatch):
    monkeypatch.setattr(database_module, "MOST_RUNS", 3)
    database = RetrospectiveDatabase(url)
    runs = []
    for _ in range(5):
        runs.append(database.add_run(FACTS))
        database.add_step(runs[-1], make_step(), [make_sample(text=f"{runs[-1]}")])
    assert [run.id for run in database.runs()] == runs[2:]
    assert {sample.run_id for sample in database.samples()} == set(runs[2:])
    assert not database.add_step(runs[0], make_step(99), [make_sample()])  # a trainer that is still at it
    assert [run.id for run in database.runs()] == runs[2:] and len(database.samples()) == 3


def write_steps(url, runs, steps, ready, started):
    ready.wait(60)
    database = RetrospectiveDatabase(url)
    for _ in range(runs):
        run = database.add_run(FACTS)
        for step in range(1, steps + 1):
            database.add_step(run, make_step(step), [make_sample(step, text=f"{run} {step} {i}") for i in range(4)])
            started.set()


def start_writers(url, count, runs, steps):
    fork = multiprocessing.get_context("fork")  # seconds quicker than importing torch anew
    ready = fork.Barrier(count)
    started = fork.Event()
    writers = [fork.Process(target=write_steps, args=(url, runs, steps, ready, started)) for _ in range(count)]
    for writer in writers:
        writer.start()
    return writers, started


def test_a_database_is_opened_once_another_trainer_has_made_it(tmp_path):
    """SQLite does not wait by itself where the journal of a file that somebody writes is to change."""
    path = tmp_path / "history.db"
    RetrospectiveDatabase(str(path))
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")  # as in a new file
        connection.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.5, lambda: connection.execute("COMMIT"))
        timer.start()
        assert RetrospectiveDatabase(str(path)).runs() == []
        timer.join()


@pytest.mark.parametrize(("count", "runs", "steps", "remaining"), [(3, 1, 15, 3), (4, 6, 3, 5)])
def test_several_writers_at_once(url, monkeypatch, count, runs, steps, remaining):
    """All create the database at the same time; each of four adds runs, which removes older runs of all."""
    monkeypatch.setattr(database_module, "MOST_RUNS", 5)
    writers, _ = start_writers(url, count, runs, steps)
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    database = RetrospectiveDatabase(url, create=False)
    assert [len(database.trajectory(run.id)) for run in database.runs()] == [steps] * remaining
    assert len({s.text for s in database.samples()}) == 4 * steps * remaining


def test_a_kill_leaves_whole_steps(url):
    rng = random.Random(0)
    for _ in range(3):
        (writer,), started = start_writers(url, 1, runs=1, steps=10**6)
        assert started.wait(60)
        time.sleep(0.2 * rng.random())
        writer.kill()
        writer.join(60)
    database = RetrospectiveDatabase(url, create=False)
    runs = database.runs()
    assert len(runs) == 3
    for run in runs:
        steps = [s.step for s in database.trajectory(run.id)]
        assert steps and steps == list(range(1, len(steps) + 1))
        assert sum(sample.run_id == run.id for sample in database.samples()) == 4 * len(steps)
    assert database.add_step(runs[0].id, make_step(10**6), [], created=runs[0].created)


def test_a_write_ahead_log_left_by_a_kill_is_read(tmp_path):
    """The log may have come without the shared-memory file, as in a backup."""
    database = RetrospectiveDatabase(str(tmp_path / "a.db"))
    run = database.add_run(FACTS)
    open_connection = sqlite3.connect(tmp_path / "a.db")  # keeps the log from being merged
    open_connection.execute("SELECT count(*) FROM rlkernels_runs").fetchone()
    database.add_step(run, make_step(), [make_sample()])
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"a.db{suffix}", tmp_path / f"b.db{suffix}")
    open_connection.close()
    assert (tmp_path / "b.db-wal").stat().st_size
    assert len(RetrospectiveDatabase(str(tmp_path / "b.db"), create=False).samples()) == 1


def assert_refused(path, *words):
    content = path.read_bytes()
    with pytest.raises(UserError) as error:
        RetrospectiveDatabase(str(path))
    assert "\n" not in str(error.value)
    for word in (path.name, *words):
        assert word in str(error.value), error.value
    assert path.read_bytes() == content


def test_foreign_files_are_refused_and_left_alone(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("my notes, which matter\n")
    assert_refused(text, "file is not a database")
    foreign = tmp_path / "other.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE mail (body TEXT)")
    assert_refused(foreign, "another program")


@pytest.mark.parametrize("place", ["header", "middle", "cut", b"CREATE T\x80BLE", b"\x80REATE TABLE"])
def test_damaged_files_are_refused_and_left_alone(tmp_path, place):
    path = tmp_path / "history.db"
    database = RetrospectiveDatabase(str(path))
    run = database.add_run(FACTS)
    for step in range(1, 30):
        database.add_step(run, make_step(step), [make_sample(step, text="x" * 3000)])
    data = bytearray(path.read_bytes())
    rng = random.Random(0)
    if place == "header":
        data[16:60] = rng.randbytes(44)
    elif place == "middle":
        data[4096:] = rng.randbytes(len(data) - 4096)
    elif place == "cut":
        del data[len(data) // 2 :]
    else:  # no text
        data = data.replace(b"CREATE TABLE", place)
    path.write_bytes(data)
    assert_refused(path)


def test_files_left_by_a_kill_while_they_were_made_are_used(tmp_path):
    (tmp_path / "empty.db").write_bytes(b"")
    with closing(sqlite3.connect(tmp_path / "bare.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    for name in ("empty.db", "bare.db"):
        assert RetrospectiveDatabase(str(tmp_path / name)).runs() == []


def test_another_schema_version_is_refused(database, url):
    with database._transaction() as connection:
        connection.execute(meta_table.update().where(meta_table.c.key == "version").values(value="99"))
    with pytest.raises(UserError, match="schema version 99"):
        RetrospectiveDatabase(url)


def test_half_a_set_of_tables_is_refused(postgres_url):
    database = RetrospectiveDatabase(postgres_url)
    with database._transaction() as connection:
        connection.execute(sa.text("DROP TABLE rlkernels_meta"))
    with pytest.raises(UserError, match='relation "rlkernels_.*" already exists'):
        RetrospectiveDatabase(postgres_url)


@pytest.mark.parametrize(("url", "words"), [
    ("mysql://alice:secret@host/name", "got mysql://"),
    ("nonsense://", "got nonsense://"),
    ("://alice:secret@host", "neither a path nor a database URL"),
    ("sqlite://", "needs a file"),
    ("sqlite://runs/history.db", "a database URL such as sqlite:///PATH"),
    ("sqlite:////tmp/history.db?timeout=long", "cannot be used"),
    ("postgresql://alice:secret@host/name?port=high", "cannot be used"),
    ("/nowhere/at/all/history.db", "there is no folder /nowhere/at/all"),
    ("/tmp", "is a folder"),
    ("postgresql://://", "neither a path nor a database URL"),
    ("postgresql://nobody:secret@127.0.0.1:1/none", "127.0.0.1"),
    ("postgresql+pgx://nobody:secret@host/name", "pip install 'psycopg[binary]', and write postgresql://"),
])  # fmt: skip
def test_bad_urls_are_named(url, words):
    if url.startswith("postgresql"):
        pytest.importorskip("psycopg", reason="this machine lacks psycopg (pip install 'psycopg[binary]')")
    with pytest.raises(UserError) as error:
        RetrospectiveDatabase(url)
    assert words in str(error.value) and "secret" not in str(error.value)


@pytest.mark.parametrize("name", ["a?b.db", "50%20a.db"])
def test_a_path_is_no_url(tmp_path, name):
    RetrospectiveDatabase(str(tmp_path / name))
    assert (tmp_path / name).exists()


@pytest.mark.parametrize(("place", "written"), [(18, b"\1\1"), (24, b"\0\0\0\0")])  # journal mode, change counter
def test_reading_leaves_a_file_as_it_is(tmp_path, place, written):
    """Check also a file whose header SQLite would correct."""
    path = tmp_path / "history.db"
    database = RetrospectiveDatabase(str(path))
    run = database.add_run(FACTS)
    content = bytearray(path.read_bytes())
    content[place : place + len(written)] = written
    path.write_bytes(content)
    reader = RetrospectiveDatabase(str(path), create=False)
    assert [stored.id for stored in reader.runs()] == [run] and reader.samples() == []
    assert path.read_bytes() == content


def test_lists_runs(url, capsys):
    database = RetrospectiveDatabase(url)
    database.add_run(FACTS)  # as before folders were recorded
    run = database.add_run(replace(FACTS, settings={"seed": 7, "output_dir": "/runs/first[a]"}))
    sketch = {name: torch.ones(bins) for name, bins in PARTS.items()}
    database.add_step(run, StepRecord(25, 0.5, 0.625, sketch, generated_tokens=2400), [make_sample(25)])
    assert main(["history", url]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.endswith(", -: sums, seed -, 0 steps, 0 tokens, accuracy -")
    assert second.endswith(", /runs/first[a]: sums, seed 7, 1 steps, 2400 tokens, accuracy 0.625")
    assert last.endswith(": 2 runs")


def test_what_is_not_there_is_named(tmp_path, capsys):
    path = str(tmp_path / "history.db")
    assert main(["history", path]) == 2
    assert "there is no retrospective database" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"
    (tmp_path / "history.db").touch()
    assert main(["history", path]) == 2, "an empty file is none, and SQLite's header does not come into it"
    assert [p.name for p in tmp_path.iterdir()] == ["history.db"] and not (tmp_path / "history.db").read_bytes()
    RetrospectiveDatabase(path)
    assert main(["history", path]) == 0  # empty
    assert "0 runs" in capsys.readouterr().out


def written(tmp_path, name="history.db"):
    """Write a database with one run of one step and two answers; return its path."""
    path = tmp_path / name
    database = RetrospectiveDatabase(str(path))
    run = database.add_run(replace(FACTS, settings={"rollout": {"top_k": 0, "top_p": 1.0}}))
    database.add_step(run, make_step(1), [make_sample(text="one"), make_sample(text="two")], created=FACTS.created)
    return path


def contents(path):
    """Return all that the trainer reads, as text."""
    database = RetrospectiveDatabase(str(path), create=False)
    runs = database.runs()
    steps = [vars(step) for run in runs for step in database.trajectory(run.id)]
    for step in steps:
        step["sketch"] = sorted(step["sketch"].items())
    return repr((runs, steps, [vars(answer) for answer in database.samples()]))


@pytest.mark.parametrize(("change", "words"), [
    ("UPDATE rlkernels_rollouts SET text = x'00ff'", "text: Input should be a valid string"),
    ("UPDATE rlkernels_rollouts SET reward = 9e999", "reward: Input should be a finite number"),
    ("UPDATE rlkernels_rollouts SET reward = 'much'", "rollouts is damaged"),
    ("UPDATE rlkernels_rollouts SET step = -5", "step: Input should be greater than or equal to 0"),
    ("UPDATE rlkernels_rollouts SET text = 'three'", "rollouts is damaged (its checksum differs)"),
    ("UPDATE rlkernels_steps SET accuracy = 0.9", "steps is damaged (its checksum differs)"),
    ("UPDATE rlkernels_steps SET generated_tokens = 'x'", "damaged"),
    ("UPDATE rlkernels_runs SET settings = '[1]'", "runs is damaged (its checksum differs)"),
    ("DELETE FROM rlkernels_meta", "has schema version None"),
    ("CREATE VIEW endless AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i FROM n",
     "holds views or triggers"),
    ("CREATE TRIGGER t AFTER INSERT ON rlkernels_runs BEGIN DELETE FROM rlkernels_runs; END", "views or triggers"),
])  # fmt: skip
def test_rows_that_nobody_wrote_so_are_refused_in_one_line(tmp_path, change, words):
    path = written(tmp_path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(change)
    with pytest.raises(UserError) as raised:
        contents(path)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_flipped_byte_is_told_or_changes_nothing(tmp_path):
    path = written(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode = DELETE")
    data = path.read_bytes()
    expected = contents(path)
    num_refused = 0
    for position in range(0, len(data), 61):
        copy = tmp_path / "flipped.db"
        copy.write_bytes(data[:position] + bytes([data[position] ^ 0x24]) + data[position + 1 :])
        try:
            assert contents(copy) == expected, f"byte {position}"
        except UserError:
            num_refused += 1
    assert num_refused > 20


@pytest.mark.parametrize("ids", [torch.tensor([[1]]), torch.tensor([-1]), torch.tensor([0.5])])
def test_tensors_that_are_no_answer_are_refused(tmp_path, ids):
    """The checksum of each fits, as only an attacker makes it."""
    path = tmp_path / "history.db"
    database = RetrospectiveDatabase(str(path))
    run = database.add_run(FACTS)
    sample = replace(make_sample(), response_ids=ids, logprobs=torch.zeros_like(ids, dtype=torch.float32))
    database.add_step(run, make_step(), [sample], created=FACTS.created)
    with pytest.raises(UserError, match="response_ids of a row of rlkernels_rollouts must be token ids"):
        database.samples()


def test_seconds_are_unknown_in_older_steps_and_a_number_in_others(database, monkeypatch):
    run = database.add_run(FACTS)
    for seconds in (torch.tensor(-1.0), torch.tensor(math.nan), torch.ones(2), torch.tensor(3)):
        record = make_step(1)
        record.sketch["seconds"] = seconds  # in the place of the record's own
        database.add_step(run, record, [])
        with pytest.raises(UserError, match="seconds of a row of rlkernels_steps must be a number of at least 0"):
            database.trajectory(run)
    database.add_step(run, make_step(1), [])
    save = database_module.save
    monkeypatch.setattr(database_module, "save", lambda tensors: save({"ngrams": tensors["ngrams"]}))
    database.add_step(run, make_step(2), [])
    assert [step.seconds for step in database.trajectory(run)] == [2.5, 0.0]
