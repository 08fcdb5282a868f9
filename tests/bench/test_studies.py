"""Studies run by the commands that the pages give: no argument is required."""

import argparse
import importlib
from pathlib import Path

import pytest

from bench.studies.__main__ import STUDIES

KEEP_NO_RUNS = ("lossless",)


@pytest.mark.parametrize("name", [name for name in STUDIES if name not in KEEP_NO_RUNS])
def test_where_the_runs_go_by_default(name):
    parser = argparse.ArgumentParser()
    importlib.import_module(f"bench.studies.{name}").add_arguments(parser)
    assert parser.parse_args([]).output_dir == Path("runs/studies", name)
