"""Models and data sets by name: files of several formats, and a cache of the Hub without a network."""

import csv
import json
import os
import subprocess
import sys
from datetime import datetime
from unittest.mock import Mock

import pytest
import yaml
from conftest import QUIET, save_tiny_policy
from rich.console import Console
from support import ROOT, write_jsonl
from tokenizers.processors import TemplateProcessing

from python_trainer.accelerators.rhyme.database import prompt_hash
from python_trainer.errors import UserError
from python_trainer.loop.memory import read_shape
from python_trainer.model.hub import policy_folder
from python_trainer.model.loading import base_name
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.tasks.files import FileTaskSettings, split_of
from python_trainer.trainer import Trainer

datasets = pytest.importorskip("datasets")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"question": "ABC"[: i % 3 + 1], "gold": i, "level": f"l{i}"} for i in range(6)]
COLUMNS = {"prompt": "question", "answer": "gold"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")


def settings_of(train, test=None, **changes):
    paths = {"train_path": str(train), "test_path": str(test or train)}
    return FileTaskSettings(**paths | {"reward": "tiny:digits", "columns": COLUMNS} | changes)


def write(rows, path):
    table = datasets.Dataset.from_list(rows)
    writers = {".parquet": table.to_parquet, ".csv": table.to_csv, ".jsonl": table.to_json}
    writers[path.suffix](path)


@pytest.mark.parametrize("kind", [".parquet", ".csv", ".jsonl"])
def test_a_folder_of_files(tmp_path, kind):
    """Splits by the names of the files; mapped columns are renamed, others reach the rewards as they are."""
    write(ROWS, tmp_path / f"train{kind}")
    write(ROWS[:2], tmp_path / f"test{kind}")
    task = settings_of(tmp_path, train_size=3, gate_size=2, test_size=1).load()
    assert len(task.train) == 3 and len(task.gate) == 2 and len(task.test) == 1
    assert {row.columns["answer"] for row in [*task.train, *task.gate]} <= {*range(6)}
    first = task.test[0]
    assert first.prompt == "A" and first.columns == {"answer": 0, "level": "l0"} and first.place == f"{tmp_path}:test:1"


@pytest.mark.parametrize("kind", [".parquet", ".jsonl"])
@pytest.mark.parametrize(("first", "second"), [("train[:4]", "train[4:]"), ("train[:67%]", "train[67%:]")])
def test_splits_cut_out_of_one_file(tmp_path, kind, first, second):
    """Read them with the library datasets, and line by line without it."""
    write(ROWS, tmp_path / f"all[1]{kind}")  # which is no pattern for names
    task = settings_of(*(f"{tmp_path / 'all[1]'}{kind}:{split}" for split in (first, second))).load()
    assert [[row.columns["answer"] for row in rows] for rows in (task.train, task.test)] == [[0, 1, 2, 3], [4, 5]]


def test_messages_lose_the_keys_of_other_messages(tmp_path):
    """Arrow gives all structures of a column the same keys. WildChat's messages hold dates."""
    rows = [{"messages": [{"role": "user", "content": "A", "at": datetime(2026, 1, 2)}]},
            {"messages": [{"role": "tool", "content": "B", "name": "f"}]}]  # fmt: skip
    write(rows, tmp_path / "train.parquet")
    task = settings_of(tmp_path / "train.parquet", columns={}).load()
    assert [row.prompt for row in task.train] == [row["messages"] for row in rows]
    assert task.fingerprint and prompt_hash(task.train[0].prompt)  # as checkpoints and the database name them


def test_a_place_of_the_hub_may_name_a_configuration_a_revision_and_a_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    requests = []
    monkeypatch.setattr(
        "python_trainer.tasks.files.snapshot", lambda *at, setting, **_: requests.append((*at, setting)) or tmp_path
    )
    monkeypatch.setattr(datasets, "load_dataset_builder", Mock())
    monkeypatch.setattr(datasets, "load_dataset", lambda **options: requests.append(options) or ROWS)
    task = settings_of("someone/sums/main@v1:train[:90%]", "someone/sums").load()
    assert requests == [
        ("someone/sums", "v1", "task.train_path"), {"path": str(tmp_path), "name": "main", "split": "train[:90%]"},
        ("someone/sums", None, "task.test_path or evaluation.sets"),
        {"path": str(tmp_path), "name": None, "split": "test"},
    ]  # fmt: skip
    assert task.train[0].place == "someone/sums/main@v1:train[:90%]:1" and task.test[0].place == "someone/sums:test:1"
    assert split_of("a/b.jsonl", "test") == ("a/b.jsonl", "train")  # a file, though there is none


@pytest.mark.parametrize(("train", "changes", "message"), [
    ("all.csv:tset", {}, r'all.csv, split tset, cannot be read: Unknown split "tset"'),
    ("all.csv", {"columns": {"prompt": "text"}}, "all.csv:train:1 has no column 'text'; it has 'question', 'gold', "),
    ("all.csv", {"columns": {}}, "all.csv:train:1: no column 'prompt' or 'messages'"),
    ("all.jsonl:tset", {}, r"all.jsonl:tset: a file has the split train and its parts, such as .*, got 'tset'"),
    ("all.jsonl:train[6:]", {}, r"all.jsonl:train\[6:\]: no examples"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, train, changes, message):
    for kind in ("csv", "jsonl"):
        write(ROWS, tmp_path / f"all.{kind}")
    with pytest.raises(UserError, match=message):
        settings_of(tmp_path / train, tmp_path / "all.csv", **changes).load()


def test_without_the_package_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="needs the package datasets: pip install datasets"):
        settings_of("a/b").load()


ANSWERS = [
    {"prompt": "12", "answer": "null", "day": "2024-01-01", "code": "007", "level": 1, "share": 0.5, "easy": True},
    {"prompt": "34", "answer": "NA", "day": "None", "code": "1e3", "level": None, "share": 1.25, "easy": False},
    {"prompt": "5", "answer": 'x, "y"\r\nz\u2028', "day": "2024-01-01T10:00:00Z", "code": None, "level": 3,
     "share": 2.0, "easy": True},
]  # fmt: skip


def write_answers(path):
    """Write the answers with the standard library, which changes nothing."""
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(ANSWERS[0]))
            writer.writeheader()
            writer.writerows(ANSWERS)
    elif path.suffix == ".jsonl" or path.stem == "lines":
        write_jsonl(path, ANSWERS)
    elif path.stem == "columns":
        path.write_text(json.dumps({name: [row[name] for row in ANSWERS] for name in ANSWERS[0]}))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ANSWERS, indent=1))
    else:
        datasets.Dataset.from_list(ANSWERS).to_parquet(path)


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "lines.json", "columns.json", "a.csv", "a.parquet"])
def test_every_format_gives_the_same_values(tmp_path, name, folder):
    write_answers(path := tmp_path / name)
    if folder:
        (tmp_path / "some").mkdir()
        path = path.rename(tmp_path / "some" / f"train.{name.split('.')[1]}").parent
    task = settings_of(f"{path}:train", f"{path}:train[:2]", columns={}).load()
    rows = [{"prompt": row.prompt, **row.columns} for row in task.train]
    assert rows == ANSWERS and len(task.test) == 2
    assert [[type(value) for value in row.values()] for row in rows] == [[*map(type, r.values())] for r in ANSWERS]


def test_cells_are_numbers_where_all_of_a_column_are(tmp_path):
    (tmp_path / "a.csv").write_text("q,a,b,c,d\n1,1,1,True,nan\n2,2.5,x,1,inf\n3,,3,False,1\n")
    rows = settings_of(tmp_path / "a.csv", columns={"prompt": "q"}).load().train
    assert [row.prompt for row in rows] == ["1", "2", "3"]
    assert [[*row.columns.values()] for row in rows] == [
        [1, "1", "True", "nan"], [2.5, "x", "1", "inf"], [None, "3", "False", "1"]
    ]  # fmt: skip


@pytest.mark.parametrize(("card", "cells", "value"), [
    ("configs: [{config_name: default, data_files: train.csv, sep: ';'}]", "question;gold\n12;null\n", "null"),
    ("configs: [{config_name: default, data_files: train.csv, keep_default_na: true, skiprows: 1}]",
     "made by a program\nquestion,gold\na,null\n", None),
    ("dataset_info: {features: [{name: question, dtype: string}, {name: gold, dtype: string}]}",
     "question,gold\n12,3\n", "3"),
])  # fmt: skip
def test_the_card_of_a_folder_describes_its_files(tmp_path, card, cells, value):
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "README.md").write_text(f"---\n{card}\n---\n")
    (folder / "train.csv").write_text(cells)
    (row,) = settings_of(f"{folder}:train").load().train
    assert row.columns == {"answer": value}


@pytest.mark.parametrize(("name", "text", "message"), [
    ("a.csv", "prompt,a\nx,1,2\n", r"a\.csv:2: 3 cells, more than the 2 columns"),
    ("a.csv", "prompt,a,a\nx,1,2\n", r"a\.csv: two columns are named 'a'"),
    ("a.csv", 'prompt,a\nx,"1\n', r"a\.csv:2: not CSV: unexpected end of data"),
    ("a.csv", "", r"a\.csv:train: no examples"),
    ("a.json", '{"prompt": "a"}\n{"prompt": ', r"a\.json:2: not JSON"),
    ("a.json", '["a"]', r"a\.json: list; allowed: a list of JSON objects"),
])  # fmt: skip
def test_files_that_are_none_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        settings_of(tmp_path / name, columns={}).load()


def cached(home, kind, name, files):
    """Write the only commit of a repository into a cache of the Hub, and return its folder."""
    repository = home / "hub" / f"{kind}s--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    files(folder)
    return folder


def train(home, settings, tmp_path, **environment):
    """Run the command line in a process of its own: the library of the Hub reads the environment once."""
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "python_trainer", "train", "--config", str(tmp_path / "settings.yaml"),
               "--output-dir", str(tmp_path / "run")]  # fmt: skip
    paths = os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))
    variables = {"HF_HOME": str(home), "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_run_from_the_cache_of_the_hub(settings, tmp_path):
    """Model and data set by id, without a network; a revision that the cache lacks is one clear line."""
    home = tmp_path / "home"
    cached(home, "model", "someone/tiny", save_tiny_policy)
    cached(home, "dataset", "someone/sums", lambda f: [write(ROWS, f / f"{s}.jsonl") for s in ("train", "test")])
    settings["task"] = {"name": "dataset", "reward": "tiny:digits", "columns": COLUMNS,
                        "train_path": "someone/sums", "test_path": "someone/sums"}  # fmt: skip
    settings["model"] |= {"path": f"someone/tiny@{COMMIT}"}
    settings |= {"max_steps": 1}
    process = train(home, settings, tmp_path, HF_HUB_OFFLINE="1")
    assert process.returncode == 0, process.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
    settings["task"]["train_path"] = "someone/sums@v2"
    process = train(home, settings, tmp_path / "run", HF_HUB_OFFLINE="1")
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert "task.train_path: someone/sums at revision v2 is no folder here, and neither the Hub nor" in process.stderr


@pytest.mark.slow
def test_a_hub_out_of_reach_is_one_line(settings, tmp_path):
    settings["model"]["path"] = "someone/tiny"
    settings["task"]["reward"] = "tiny:digits"
    process = train(tmp_path / "home", settings, tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert (
        "error: model.path: someone/tiny is no folder here, and neither the Hub nor its cache gives" in process.stderr
    )


def test_a_model_path_may_name_a_revision(monkeypatch, tmp_path):
    requests = []
    monkeypatch.setattr("python_trainer.model.hub.snapshot", lambda *place, **_: requests.append(place) or tmp_path)
    for path in ("someone/tiny@refs/pr/1", "someone/tiny"):
        assert policy_folder(path) == tmp_path
        assert base_name(ModelConfig(path=path)) == requests[-1]
    assert requests == [("someone/tiny", "refs/pr/1"), ("someone/tiny", None)]


def test_the_size_of_a_model_on_the_hub_is_read_without_its_weights(monkeypatch, tmp_path, tiny_policy):
    """A dry run must not fetch the weights of an adapter or of its base."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/tiny"}')
    folders = {"someone/adapter": tmp_path, "someone/tiny": tiny_policy}
    snapshot = Mock(side_effect=lambda name, *_, **__: folders[name])
    monkeypatch.setattr("python_trainer.model.hub.snapshot", snapshot)
    assert read_shape(ModelConfig(path="someone/adapter"), "cpu").vocab == 64
    requests = {call.args[0]: call.kwargs["files"] for call in snapshot.call_args_list}
    assert requests == dict.fromkeys(folders, ("*.json", "*.py"))


@pytest.fixture
def chatting(tiny_policy):
    """Return a policy whose tokenizer begins texts with 9, and whose template writes 8 itself."""
    policy = load_policy(ModelConfig(path=str(tiny_policy), device="cpu"))
    policy.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="9 $A", special_tokens=[("9", 9)])
    policy.tokenizer.chat_template = (
        "8{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
        "{{ m.content }}{% endfor %}{% if think %}7{% endif %}"
    )
    return policy


def test_texts_and_messages_mixed_have_their_own_first_token(chatting):
    chat = [{"role": "user", "content": "12"}]
    assert chatting.encode(["12", chat, "3", chat]) == [[9, 1, 2], [8, 1, 2], [9, 3], [8, 1, 2]]
    chatting.chat_template_kwargs = {"think": True}
    assert chatting.encode([chat, "12"]) == [[8, 1, 2, 7], [9, 1, 2]]
    chatting.chat_template_kwargs = {"thinking": True}
    with pytest.raises(UserError, match="task.chat_template_kwargs: 'thinking' does not occur in the chat template"):
        chatting.encode([chat])
    chatting.chat_template_kwargs = {}
    with pytest.raises(UserError, match="refuses the messages .*'bad'.*: no such role"):
        chatting.encode([[{"role": "bad", "content": "1"}]])


@pytest.mark.parametrize("single", ["$A end", "9 $A end"])
def test_a_tokenizer_that_ends_texts_does_not_end_prompts(chatting, single):
    """Tokenizers with add_eos_token end texts; the last token of the prompt itself stays."""
    end = chatting.tokenizer.eos_token_id
    assert end in chatting.eos_token_ids
    chatting.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("9", 9), ("end", end)]
    )
    first = [9] * single.startswith("9")
    assert chatting.encode(["12", [{"role": "user", "content": "12"}]]) == [[*first, 1, 2], [8, 1, 2]]
    assert chatting.encode([f"1{chatting.tokenizer.eos_token}"]) == [[*first, 1, end]]


@pytest.mark.parametrize("ends", [[], ["end"]])
def test_a_text_that_begins_with_its_first_token_gets_no_second_one(chatting, ends):
    eos = chatting.tokenizer.eos_token_id
    chatting.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=["<eos>", "$A", *ends], special_tokens=[("<eos>", eos), ("end", eos)]
    )
    texts = ["12", "<eos>12", "<eos><eos>1", "<eos>", "1<eos>"]
    assert chatting.encode(texts) == [[eos, 1, 2], [eos, 1, 2], [eos, eos, 1], [eos], [eos, 1, eos]]


def test_a_first_token_that_is_no_special_one_is_text(chatting):
    assert chatting.encode(["912"]) == [[9, 9, 1, 2]]


def test_prompts_that_are_too_long(make_config, tmp_path, capsys):
    """The answer takes 12 of 128 tokens."""
    lines = [{"prompt": "A" * n} for n in (1, 117, 116, 150)]
    write_jsonl(tmp_path / "train.jsonl", lines)
    task = {"train_path": str(tmp_path / "train.jsonl")}
    with pytest.raises(UserError, match=r"prompt .*train.jsonl:2 has 117 tokens"):
        Trainer(make_config(task=task), tmp_path / "run", console=QUIET)
    trainer = Trainer(make_config(task=task | {"overlong": "drop"}), tmp_path / "run", console=Console())
    lengths = [len(ids) for ids in trainer.prompts.ids["train"]]
    assert [len(row.prompt) for row in trainer.task.train] == lengths == [1, 116]
    message = "2 of 4 train prompts dropped (task.overlong): more than 116 tokens; the longest is "
    assert f"{message}{tmp_path}/train.jsonl:4" in capsys.readouterr().out
    options = {"evaluation": {"sets": {"more": str(tmp_path / "train.jsonl")}}}  # a further test set
    with pytest.raises(UserError, match=r"prompt .*train.jsonl:2 has 117 tokens"):
        Trainer(make_config(**options), tmp_path / "run", console=QUIET)
    (prompt_set,) = Trainer(
        make_config(task={"overlong": "drop"}, **options), tmp_path / "run", console=Console()
    ).prompts.sets
    assert [len(row.prompt) for row in prompt_set.examples] == [len(ids) for ids in prompt_set.ids] == [1, 116]
    assert "2 of 4 evaluation.sets.more prompts dropped (task.overlong): more than 116" in capsys.readouterr().out
    (tmp_path / "train.jsonl").write_text(json.dumps(lines[3]))
    with pytest.raises(UserError, match=r"1 of 1 train prompts dropped .* none is left"):
        Trainer(make_config(task=task | {"overlong": "drop"}), tmp_path / "run", console=QUIET)
