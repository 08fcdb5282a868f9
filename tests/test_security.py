"""What SECURITY.md promises: nothing from outside is unpickled or run, and passwords stay where they were given."""

import ast

import pytest
import yaml
from support import ROOT

from python_trainer.__main__ import main
from python_trainer.config import changed_settings, dump_config, load_config
from python_trainer.errors import hide_passwords

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch.package"}
CALLS = {"eval", "exec", "compile", "torch.load", "torch.jit.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
# ends of calls, whatever they are called on: pipes, processes of one group, the index of torch.distributed.checkpoint
ENDS = {"recv", "recv_multipart", "all_gather_object", "broadcast_object_list", "recv_object_list", "read_metadata",
        "FileSystemReader"}  # fmt: skip
EXCEPTIONS = {  # as SECURITY.md names them
    # between the processes that torchrun, or accelerate, started
    "python_trainer/distributed/group.py": {"all_gather_object", "broadcast_object_list"},
    "rlkernels/integrations/trl.py": {"all_gather_object"},
    "python_trainer/checkpoint.py": {"FileSystemReader", "read_metadata"},  # the index of shards
}


def unsafe(source):
    """Names of what in a module reads pickles or runs text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} & MODULES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found |= {name} & CALLS | {name.rpartition(".")[2]} & ENDS
            # allow_pickle of numpy.load, weights_only of torch.load
            found |= {keyword.arg for keyword in node.keywords} & {"allow_pickle", "weights_only"}
    return found


def test_nothing_from_outside_is_unpickled():
    found = {}
    for package in ("rlkernels", "python_trainer"):
        for path in (ROOT / package).rglob("*.py"):
            if names := unsafe(path.read_text(encoding="utf-8")):
                found[path.relative_to(ROOT).as_posix()] = names
    assert found == EXCEPTIONS
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert all(place in text or place.rpartition("/")[0] in text for place in EXCEPTIONS)


@pytest.mark.parametrize("source", [
    "import pickle", "from marshal import loads", "import torch\ntorch.load('x')", "numpy.load('x', allow_pickle=True)",
    "eval(text)", "yaml.load(text)", "self.connection.recv()",
])  # fmt: skip
def test_the_search_finds_what_it_is_for(source):
    assert unsafe(source)


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


def test_a_run_writes_no_password(tmp_path, capsys):
    """Neither into its folder nor to the terminal, where the database cannot be reached."""
    config = tmp_path / "settings.yaml"
    values = {
        "max_steps": 1,
        "task": {"name": "sums", "variant": "short", "train_size": 4, "test_size": 2},
        "model": {"path": "small", "device": "cpu"},
        "accelerators": {"enabled": ["rhyme"], "rhyme": {"database": "postgresql://alice:s3cret@127.0.0.1:9/runs"}},
    }
    config.write_text(yaml.safe_dump(values))
    code = main(["train", "--config", str(config), "--output-dir", str(tmp_path / "run")])
    said = capsys.readouterr()
    assert code == 2 and "127.0.0.1" in said.err and "s3cret" not in said.err + said.out
    for path in (tmp_path / "run").rglob("*") if (tmp_path / "run").exists() else ():
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path
