"""What SECURITY.md promises: nothing from outside is unpickled or run, and passwords stay where they were given."""

import ast
import json
import os
import pickle
import re
import warnings

import pytest
import torch
import yaml
from support import ROOT
from torch.distributed.checkpoint import BytesStorageMetadata, FileSystemReader

from python_trainer.__main__ import main
from python_trainer.config import changed_settings, dump_config, load_config
from python_trainer.errors import UserError, hide_passwords
from python_trainer.run.checkpoint import SHARDS, read_shards, write_shards
from python_trainer.run.directory import read_evaluations

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch.package"}
CALLS = {"eval", "exec", "compile", "torch.load", "torch.jit.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
# ends of calls, whatever they are called on: pipes, processes of one group, the index of torch.distributed.checkpoint
ENDS = {"recv", "recv_multipart", "all_gather_object", "gather_object", "broadcast_object_list", "recv_object_list",
        "read_metadata", "FileSystemReader"}  # fmt: skip
EXCEPTIONS = {  # as SECURITY.md names them
    # between the processes that torchrun, or accelerate, started
    "python_trainer/distributed/group.py": {"all_gather_object", "broadcast_object_list"},
    "rlkernels/integrations/trl.py": {"gather_object", "broadcast_object_list"},
    "python_trainer/run/checkpoint.py": {"read_metadata"},  # of ShardReader
    "python_trainer/run/shard_index.py": {"pickle"},  # the index of shards, of which it takes few names
}


def unsafe(source):
    """Return the names in a module that read pickles or run text."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} & MODULES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            names |= {name} & CALLS | {name.rpartition(".")[2]} & ENDS
            # allow_pickle of numpy.load, weights_only of torch.load
            names |= {keyword.arg for keyword in node.keywords} & {"allow_pickle", "weights_only"}
    return names


def test_nothing_from_outside_is_unpickled():
    unsafe_names = {}
    for package in ("rlkernels", "python_trainer"):
        for path in (ROOT / package).rglob("*.py"):
            if module_names := unsafe(path.read_text(encoding="utf-8")):
                unsafe_names[path.relative_to(ROOT).as_posix()] = module_names
    assert unsafe_names == EXCEPTIONS
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert all(place in text or place.rpartition("/")[0] in text for place in EXCEPTIONS)


@pytest.mark.parametrize("source", [
    "import pickle", "from marshal import loads", "import torch\ntorch.load('x')", "numpy.load('x', allow_pickle=True)",
    "eval(text)", "yaml.load(text)", "self.connection.recv()",
])  # fmt: skip
def test_the_search_finds_what_it_is_for(source):
    assert unsafe(source)


class Planted:
    """What a pickle runs when it is read: it makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def name_code(index, folder):
    index.planner_data = Planted(folder)
    return index


def name_bytes(index, folder):
    index.state_dict_metadata["bytes"] = BytesStorageMetadata()  # whose contents torch would unpickle
    return index


def spoil_size(index, folder):
    next(iter(index.state_dict_metadata.values())).size = Planted
    return index


@pytest.mark.parametrize(("change", "words"), [
    (name_code, "names posix.mkdir, which no index of tensors has"),
    (name_bytes, "names torch.distributed.checkpoint.metadata.BytesStorageMetadata"),
    (spoil_size, "which no index of tensors has"),
    (lambda index, folder: {"state": 1}, "the index of shards is damaged"),
])  # fmt: skip
def test_an_index_of_shards_runs_nothing(change, words, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        write_shards(tmp_path, {"model": {"weight": torch.ones(2)}})
    path = tmp_path / SHARDS / ".metadata"
    whole = path.read_bytes()
    index = FileSystemReader(path.parent).read_metadata()
    path.write_bytes(pickle.dumps(change(index, tmp_path / "made")))
    with pytest.raises(UserError, match=re.escape(words)):
        read_shards(tmp_path, {})
    assert not (tmp_path / "made").exists()
    for damaged in (b"", whole[: len(whole) // 2], b"nothing", whole.replace(b"Metadata", b"Metadatx", 1)):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="index of shards"):
            read_shards(tmp_path, {})
    path.write_bytes(whole)
    assert torch.equal(read_shards(tmp_path, {})["model"]["weight"], torch.ones(2))


URL = "postgresql://alice:s3cr%40t/x@db.example/runs"


@pytest.mark.parametrize("text", [
    URL,
    f"cannot reach {URL}?sslmode=require: no",
    "postgresql+psycopg://:s3cr%40t/x@h/d",
    f"a {URL} and {URL}",
    "postgresql://h/d?user=alice&password=s3cr%40t/x&sslmode=require",
    "sqlite:///runs/history.db", "postgresql://alice@db.example/runs", "http://localhost:8000", "a@b:c",
])  # fmt: skip
def test_passwords_are_hidden_and_nothing_else(text):
    shown = hide_passwords(text)
    assert "s3cr" not in shown and ("***" in shown) == ("s3cr" in text)
    assert shown.replace("***", "s3cr%40t/x") == text


def test_settings_are_written_without_passwords(tmp_path):
    values = {"accelerators": {"enabled": ["rhyme"], "rhyme": {"database": URL}}}
    config = load_config(values)
    assert config.accelerators.rhyme.database == URL
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert "s3cr" not in dump_config(config) and "alice:***@db.example" in dump_config(config)
    assert changed_settings(tmp_path, config) == []
    other = load_config({"accelerators": {"enabled": ["rhyme"], "rhyme": {"database": URL + "2"}}})
    (change,) = changed_settings(tmp_path, other)
    assert "s3cr" not in change and "db.example/runs2" in change


MISTYPED = [
    "host=h user=alice password=s3cret", "password=s3cret", "dbname = runs user = alice password = s3cret",
    "postgresql//alice:s3cret@h/runs", "postgresql:/alice:s3cret@h/runs", "postgresql:alice:s3cret@h/runs",
    "alice:s3cret@h/runs", "//alice:s3cret@h/runs", "://alice:s3cret@h/runs", "postgres ql://alice:s3cret@h/runs",
    "postgresql;//alice:s3cret@h", "postgresql://alice:s3 cret@h/runs", "postgresql://alice:p@s3cret@h/runs",
    "postgresql://alice/s3cret:x@h/runs", "postgresql://alice:s3cret@h:port/runs", "sqlite://alice:s3cret@h/runs",
    "mysql://alice:s3cret@h/runs", "jdbc:postgresql://alice:s3cret@h/runs",
    "postgresql://h/runs;password=s3cret", "runs/history.db?password=s3cret", "'postgresql://alice:s3cret@h/runs'",
]  # fmt: skip


@pytest.mark.parametrize("place", MISTYPED)
def test_a_mistyped_database_is_refused_and_not_repeated(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    override = f"accelerators.rhyme.database={json.dumps(place)}"
    config = ["--config", "smoke", "--output-dir", str(tmp_path / "run"), "--set", override, "max_steps=1"]
    code = main(["train", *config])
    output = capsys.readouterr()
    assert code == 2 and "s3cret" not in output.err + output.out and "retrospective database" in output.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert [*tmp_path.iterdir()] in ([], [tmp_path / "run"]), "no file is made of that name"


@pytest.mark.parametrize(
    "place",
    [
        "runs/history.db",
        "lr=1e-4/a b.db",
        "sqlite:////tmp/at@10:30.db",
        "h.db",
        "postgresql://alice@[::1]:5432/runs",
        "postgresql:///runs",
    ],
)
def test_plain_paths_are_databases(place):
    assert load_config({"accelerators": {"rhyme": {"database": place}}}).accelerators.rhyme.database == place


def test_a_run_writes_no_password(tmp_path, capsys):
    """Check the folder and the terminal of a run that cannot reach its database."""
    config = tmp_path / "settings.yaml"
    values = {
        "max_steps": 1,
        "task": {"name": "sums", "variant": "short", "train_size": 4, "test_size": 2},
        "model": {"path": "small", "device": "cpu"},
        "accelerators": {"enabled": ["rhyme"], "rhyme": {"database": "postgresql://alice:s3cret@127.0.0.1:9/runs"}},
    }
    config.write_text(yaml.safe_dump(values))
    code = main(["train", "--config", str(config), "--output-dir", str(tmp_path / "run")])
    output = capsys.readouterr()
    assert code == 2 and "127.0.0.1" in output.err and "s3cret" not in output.err + output.out
    for path in (tmp_path / "run").rglob("*") if (tmp_path / "run").exists() else ():
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


def finished_run(folder, **files):
    """Write what a report reads of a run, with some files replaced."""
    rows = {"step": 1, "time/training_s": 1.0, "total/generated_tokens": 8, "eval/accuracy": 0.5}
    texts = {
        "config.yaml": "max_steps: 1\n", "metrics.jsonl": json.dumps(rows) + "\n", "summary.json": '{"steps": 1}',
    } | files  # fmt: skip
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


def test_a_report_imports_nothing_that_a_run_names(tmp_path, monkeypatch, capsys):
    """Check also that the command for databases runs nothing, whatever the file is."""
    (tmp_path / "planted.py").write_text("open('executed', 'w')\n\nclass Settings: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = "planted:Settings"
    settings = {
        "accelerators": {"enabled": [name]}, "callbacks": [name], "algorithm": {"loss_type": name, "advantage": name},
        "task": {"name": name, "reward": name, "environment": name}, "model": {"path": "planted"},
    }  # fmt: skip
    finished_run(tmp_path / "run", **{"config.yaml": yaml.safe_dump(settings)})
    assert main(["report", "run"]) == 0, capsys.readouterr().err
    assert not (tmp_path / "executed").exists() and name in (tmp_path / "run" / "report.html").read_text()
    code = main(["history", str(tmp_path / "planted.py")])
    assert code == 2 and not (tmp_path / "executed").exists()


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(("name", "text", "words"), [
    ("metrics.jsonl", '{"step": 1, "eval/accuracy": 1' + 400 * "0" + "}\n", "damaged (line 1: eval/accuracy"),
    ("metrics.jsonl", '{"step": -5}\n', "metrics.jsonl is damaged (line 1: step: input should be greater"),
    ("metrics.jsonl", '{"step": 1.5}\n', "line 1: step: input should be a valid integer"),
    ("metrics.jsonl", '{"step": 1, "time/training_s": "long"}\n', "time/training_s: input should be a valid number"),
    ("metrics.jsonl", "[" * 100_000 + "\n", "metrics.jsonl is damaged (line 1"),
    ("summary.json", '{"steps": 1, "training_s": {}}', "summary.json is damaged (training_s"),
    ("summary.json", '{"steps": 1, "versions": [1]}', "summary.json is damaged (versions"),
    ("summary.json", "[]", "summary.json is damaged (input should be a valid dictionary"),
    ("samples.jsonl", '{"step": 1, "samples": [3]}\n', "samples.0: input should be a valid dictionary"),
    ("config.yaml", BOMB, "config.yaml is not valid YAML: its aliases make more than 100000 entries"),
    ("config.yaml", "a: &a [*a]\n", "its aliases make more than"),
    ("config.yaml", "[" * 100_000, "config.yaml is not valid YAML"),
])  # fmt: skip
def test_a_damaged_run_is_named_in_one_line(tmp_path, capsys, name, text, words):
    folder = finished_run(tmp_path / "run", **{name: text})
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_damaged_evaluations_are_named(tmp_path):
    row = '{"step": 1, "name": "final", "correct": ["x"]}\n'
    folder = finished_run(tmp_path / "run", **{"evaluations.jsonl": row})
    with pytest.raises(UserError, match="damaged .line 1: correct.0: input should be a valid number, got 'x'"):
        read_evaluations(folder)
    (folder / "evaluations.jsonl").write_text(row.replace('"x"', ""))
    with pytest.raises(UserError, match="damaged .line 1: correct: list should have at least 1 item"):
        read_evaluations(folder)


@pytest.mark.parametrize(("name", "text", "shown"), [
    ("config.yaml", "seed: 2020-01-01\n", "2020-01-01"),
    ("config.yaml", "accelerators: {enabled: 5}\n", "accelerators.enabled"),
    ("samples.jsonl", '{"step": 1, "samples": [{}]}\n', "<pre></pre>"),
    ("samples.jsonl", '{"step": 1, "samples": [{"answer": 7, "reward": "x", "accuracy": "y"}]}\n', "7</pre>"),
])  # fmt: skip
def test_a_report_shows_values_that_no_run_writes(tmp_path, name, text, shown):
    folder = finished_run(tmp_path / "run", **{name: text})
    assert main(["report", str(folder)]) == 0
    assert shown in (folder / "report.html").read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "config.yaml", "samples.jsonl", "evaluations.jsonl"])
def test_a_fifo_in_the_place_of_a_file_is_refused(tmp_path, capsys, name):
    """Check that no command waits for a writer of the FIFO."""
    folder = finished_run(tmp_path / "run", **{name: None})
    os.mkfifo(folder / name)
    if name == "evaluations.jsonl":  # read where variants are compared
        for variant in ("baseline", "rpo"):
            finished_run(tmp_path / variant)
        folder = tmp_path
    assert main(["report", str(folder)]) == 2
    assert f"{name} is damaged: it is no regular file" in capsys.readouterr().err
