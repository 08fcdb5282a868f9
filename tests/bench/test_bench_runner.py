"""The benchmark runner: what it measures, compares, names as missing and writes."""

import csv
import importlib
import math
import subprocess
import sys
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from bench import Case, Measurement, Row, _limits, _runner, memory, optional, prefix_cache
from bench.__main__ import main


@pytest.mark.parametrize(("out", "reference", "expected"), [
    (torch.tensor([1.0, math.nan, math.inf]), torch.tensor([1.0, math.nan, math.inf]), "exact"),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), "5.0e-01"),
    ([1, 2], [1, 2], "exact"),
    ([1, 3], [1, 2], "differs"),
    ((torch.ones(2), [3]), (torch.ones(2), [3]), "exact"),
    (torch.ones(2), (torch.ones(2), [3]), "differs"),
    (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), "differs"),
    (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf]), "differs"),
    (torch.ones(2), torch.ones(3), "differs"),
    (torch.ones(0), torch.ones(0), "exact"),
])  # fmt: skip
def test_match(out, reference, expected):
    assert _runner.match(out, reference) == expected


def test_case_rows():
    x = torch.ones(1000)
    calls = []

    def set_up():
        calls.append("setup")
        return x.clone()

    providers = {
        "ours": (set_up, lambda y: y.mul_(2)),
        "torch reference": lambda: x + x,
        "wrong": lambda: x * 3,
        "peer": optional("no_such_package_at_all", lambda m: m.double),
    }
    case = Case("double", "n=1000", providers, limit=("thought", 1e-9), work=("numbers", 1000))
    ours, reference, wrong, peer = _runner.run_case(case, seconds=0.01)
    assert ours.match == "exact" and reference.match == "" and wrong.match == "5.0e-01"
    assert 0 < ours.q20_s <= ours.median_s <= ours.q80_s
    assert ours.of_limit == pytest.approx(1e-9 / ours.median_s) and ours.extra.endswith("numbers/s")
    assert peer.median_s is None and "no_such_package_at_all" in peer.missing
    assert len(calls) >= 4  # every call had its own setup


def test_peak_memory_counts_everything_but_what_was_there_before():
    tensor = torch.ones(8 * 2**20)
    row = next(_runner.run_case(Case("copy", "32 MiB", {"torch reference": tensor.clone}), seconds=0.01))
    if row.peak_bytes is None:
        pytest.skip("this machine lacks /proc/self/clear_refs")
    assert 0.9 * tensor.nbytes < row.peak_bytes < 1.5 * tensor.nbytes


def test_plans_of_adapters_without_peft_are_named_as_missing(monkeypatch):
    monkeypatch.setattr(memory, "find_spec", lambda name: None)
    monkeypatch.setattr(memory, "make_folder", lambda *_: None)
    monkeypatch.setattr(memory, "plan_bytes", lambda run: 90)
    monkeypatch.setattr(memory, "measure_bytes", lambda runs: [100] * len(runs))
    rows = {row.shape: row for row in memory.rows(memory.TINY)}
    assert [*rows] == [f"tiny, {kind}" for kind in memory.KINDS]
    assert [row.missing for row in rows.values() if "LoRA" in row.shape] == [
        "PEFT is not installed; pip install peft"
    ] * 2
    assert all(row.peak_bytes == 100 and not row.missing for row in rows.values() if "LoRA" not in row.shape)


def test_reference_may_be_a_function_that_is_not_timed():
    case = Case("op", "n", {"ours": lambda: 2.0}, reference=lambda: 4.0)
    assert [row.match for row in _runner.run_case(case, seconds=0.001)] == ["5.0e-01"]


def test_csv_is_appended_and_never_mixed(tmp_path):
    path = tmp_path / "rows.csv"
    for _ in range(2):
        _runner.append(path, [Row("op", "ours", "n=1", median_s=0.5)], _runner.stamp())
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["median_s"] for row in rows] == ["0.5", "0.5"] and rows[0]["commit"] and rows[0]["threads"]
    path.write_text("some,other,file\n")
    with pytest.raises(SystemExit, match="other columns"):
        _runner.append(path, [Row("op", "ours", "n=1")], _runner.stamp())


def test_command_line(tmp_path, capsys):
    assert main(["--list"]) == 0
    assert "keyed_uniform" in capsys.readouterr().out.split()
    with pytest.raises(SystemExit):
        main(["no_such_benchmark"])
    assert main(["keyed_uniform", "--quick", "--seconds", "0.001", "--csv", str(tmp_path / "rows.csv")]) == 0
    assert "exact" in capsys.readouterr().out and "exact" in (tmp_path / "rows.csv").read_text()


def test_only_cases_whose_shape_contains_a_text(capsys, monkeypatch):
    shapes = [Case("op", shape, {"ours": lambda: 1}, reference=None) for shape in ("first 1", "second 2")]
    monkeypatch.setattr(importlib.import_module("bench.keyed_uniform"), "cases", lambda quick: iter(shapes))
    assert main(["keyed_uniform", "--quick", "--only", "second"]) == 0
    output = capsys.readouterr().out
    assert "second 2" in output and "first 1" not in output
    with pytest.raises(SystemExit):
        main(["keyed_uniform", "--quick", "--only", "third"])
    assert "--only must be a part of the shape of a case, got 'third'" in capsys.readouterr().err


def test_only_measurements_that_are_picked_run_and_only_their_rows_are_kept(tmp_path, capsys, monkeypatch):
    def rows(*shapes):
        return [Row("op", "ours", shape, median_s=1.0) for shape in shapes]

    def fail():
        raise AssertionError("--only did not pick it")

    cases = [
        Measurement(["first 1"], fail), Measurement(["second 2", "second 3"], partial(rows, "second 2", "second 3")),
        Measurement(["second 4", "third 5"], partial(rows, "second 4", "third 5")), Measurement(["third 6"], fail),
    ]  # fmt: skip
    monkeypatch.setattr(importlib.import_module("bench.keyed_uniform"), "cases", lambda quick: iter(cases))
    path = tmp_path / "rows.csv"
    assert main(["keyed_uniform", "--quick", "--csv", str(path), "--only", "second"]) == 0
    with path.open(newline="") as file:
        assert [row["shape"] for row in csv.DictReader(file)] == ["second 2", "second 3", "second 4"]
    assert capsys.readouterr().out.count("op: second ") == 3, "a table each"


@pytest.mark.parametrize("name", ["block_pool", "history", "host", "memory", "trl", "vllm_drafts", "weight_delta"])
def test_own_measurements_name_their_shapes_before_they_run(name, monkeypatch):
    """So ``--only`` skips them as it skips cases."""
    for variable in ("RLKERNELS_GSM8K_DIR", "RLKERNELS_TRACE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=AssertionError("it measures")))
    items = [*importlib.import_module(f"bench.{name}").cases(quick=True)]
    assert items and all(isinstance(item, Measurement) and item.shapes for item in items)


def test_a_failing_case_leaves_the_rows_before_it(tmp_path, capsys, monkeypatch):
    def fail():
        raise ValueError("no such thing")

    shapes = [Case("op", str(i), {"ours": call}, reference=None) for i, call in enumerate((lambda: 1, fail))]
    monkeypatch.setattr(importlib.import_module("bench.keyed_uniform"), "cases", lambda quick: iter(shapes))
    path = tmp_path / "rows.csv"
    assert main(["keyed_uniform", "--quick", "--csv", str(path)]) == 1
    assert "no such thing" in capsys.readouterr().err
    with path.open(newline="") as file:
        assert [row["shape"] for row in csv.DictReader(file)] == ["0"]


def test_a_benchmark_on_one_thread_leaves_the_others_theirs(tmp_path, monkeypatch):
    monkeypatch.delenv("RLKERNELS_GSM8K_DIR", raising=False)
    monkeypatch.delenv("RLKERNELS_TRACE", raising=False)
    path = tmp_path / "rows.csv"
    threads = torch.get_num_threads()
    try:
        arguments = ["history", "keyed_uniform", "--quick", "--threads", "2", "--seconds", "0.001", "--csv", str(path)]
        assert main(arguments) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    with path.open(newline="") as file:
        used = {row["op"]: row["threads"] for row in csv.DictReader(file)}
    assert used == {"rollout_history": "1", "keyed_uniform": "2"}


def test_missing_provider_is_named_in_the_table(capsys):
    _runner.Console(width=120).print(_runner.table([Row("op", "peer", "n=1", missing="no file [/lib/peer]")]))
    assert "missing: peer: no file [/lib/peer]" in capsys.readouterr().out


def test_a_long_rate_leaves_room_for_the_provider(capsys):
    rows = [Row("op", provider, "n=1", median_s=1.0, extra="tokens a step, " * 20) for provider in ("ours", "a peer")]
    _runner.Console(width=120).print(_runner.table(rows))
    output = capsys.readouterr().out
    assert "ours" in output and "a peer" in output and "1 s" in output


HEADS = (4, 2, 16)
ATTENTION = {
    "decode": lambda: prefix_cache.decode(3, 40, HEADS, torch.float32),
    "prefill": lambda: prefix_cache.prefill(2, 40, 5, HEADS, torch.float32),
    "shared": lambda: prefix_cache.shared(2, 3, 32, 16, HEADS, torch.float32),
    "write": lambda: prefix_cache.write(40, 2, 16, torch.float32),
    "merge": lambda: prefix_cache.merge(40, 2, 16, torch.float32),
    "grouped": lambda: prefix_cache.grouped(2, 3, 8, 4),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_peers_of_attention_compute_the_same(kind, monkeypatch):
    for name in ("read_bandwidth", "copy_bandwidth"):
        monkeypatch.setattr(prefix_cache, name, lambda nbytes: 1e9)
    case = ATTENTION[kind]()
    matches = {row.provider: row.match for row in _runner.run_case(case, 0.001)}
    reference = matches.pop(case.reference, "") if isinstance(case.reference, str) else ""
    assert reference == "" and matches and all(m == "exact" or float(m) < 1e-5 for m in matches.values()), matches


def test_limits_are_plausible():
    assert 1e8 < _limits.read_bandwidth(2**20) < 1e13
    assert 1e8 < _limits.copy_bandwidth(2**20) < 1e13
    assert 1e8 < _limits.fma_rate() < 1e14


PACKAGES = ("bench", "bench.faults", "bench.soak", "bench.studies")
MODULES = ("bench.gpu.records", "bench.gpu.session", "bench.studies.lossless")
COMMANDS = [*(f"{package}.__main__" for package in PACKAGES), *MODULES]


@pytest.mark.parametrize("module", COMMANDS)
def test_help(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(module).main()
    output = capsys.readouterr().out
    assert exit.value.code == 0 and "usage: " in output and "%%" not in output
