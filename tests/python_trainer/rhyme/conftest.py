"""Databases to test on: SQLite always, PostgreSQL where a server can be started."""

import math

import pytest
import torch
from support import lacks

from bench import _postgres
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StepRecord, StoredAnswer, StoredRun

FACTS = StoredRun("tok", "sums", {"learning_rate": 1e-4})


def make_sample(step=1, reward=1.0, key="a", text="12+3=15", ids=(1, 2, 3)):
    tokens = torch.tensor(ids, dtype=torch.int32), torch.tensor([-0.5, math.nan, -0.25][: len(ids)])
    return StoredAnswer(0, step, key, text, True, reward, "", *tokens)


def make_step(step=1, reward=0.5):
    return StepRecord(step, reward, reward, {"ngrams": torch.arange(4.0), "lengths": torch.tensor([step])},
                      generated_tokens=100 * step, seconds=2.5 * step)  # fmt: skip


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory):
    """Start a PostgreSQL server, and yield its URL."""
    if not _postgres.available():
        lacks(f"a PostgreSQL server ({_postgres.INSTALL})")
    server = _postgres.start(tmp_path_factory.mktemp("postgres"))
    yield server.get_uri()
    server.cleanup()


@pytest.fixture
def postgres_url(postgres_server):
    """Return the URL of an empty PostgreSQL database."""
    import psycopg

    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return postgres_server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    return str(tmp_path / "history.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def database(url):
    return RetrospectiveDatabase(url)
