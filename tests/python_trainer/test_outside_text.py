"""Text from outside is escaped wherever it is shown: on the terminal, in errors and on the page of a report."""

import io

import pytest
import yaml
from rich.console import Console
from support import write_jsonl

from python_trainer.__main__ import main
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StoredRun
from python_trainer.command_line.report import report
from python_trainer.errors import UserError, escape_controls, tell, tell_error
from python_trainer.run.logger import Logger
from rlkernels.__main__ import main as rlkernels_main

# clear the screen, set its title, ring, go back, C1's CSI, turn the direction of text, half of a character
EVIL = "\x1b[2J\x1b]0;owned\x07\b\x9b31m\u202e\udc80[/red]"
SHOWN = "\\x1b[2J\\x1b]0;owned\\x07\\x08\\x9b31m\\u202e\\udc80[/red]"


def obeyed(text):
    """Return the characters of a text that a terminal would obey or hide."""
    return {c for c in text if not c.isprintable()} - {"\n"}


@pytest.mark.parametrize(("text", "shown"), [
    (EVIL, SHOWN), (SHOWN, SHOWN), ("a\tb\nc é 漢 😀", "a\tb\nc é 漢 😀"), ("\r\x00\x7f", "\\r\\x00\\x7f"),
], ids=["controls", "escaped before", "letters", "others"])  # fmt: skip
def test_escaped_once_and_for_all(text, shown):
    assert escape_controls(text) == shown
    assert escape_controls("a\nb", keep="") == "a\\nb"


def test_errors_and_notes(capsys, tmp_path):
    assert str(UserError(EVIL)) == SHOWN
    tell(EVIL)
    tell_error(ValueError(), EVIL)
    console = Console(file=io.StringIO(), width=300)
    Logger(tmp_path, 1, console=console).note(EVIL)
    assert capsys.readouterr().err == f"{SHOWN}\nerror: {SHOWN}\n"
    assert console.file.getvalue() == f"note: {SHOWN}\n"


def test_an_error_that_quotes_a_file(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text('max_steps: "\\e[2J"\n')
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--output-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "max_steps" in error and "\\x1b[2J" in error and not obeyed(error)


def test_errors_of_the_kernels_own_commands(capsys, tmp_path):
    folders = [str(tmp_path / f"\x1b[2J-{step}") for step in range(3)]
    assert rlkernels_main(["extrapolate", *folders, "--output-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "\\x1b[2J" in error and not obeyed(error)


def test_the_list_of_recorded_runs(capsys, tmp_path):
    url = str(tmp_path / "history.db")
    evil = "\x1b[2J\u202e\nrun 9, forged"
    RetrospectiveDatabase(url).add_run(StoredRun("tokenizer", evil, {"output_dir": evil, "seed": evil}))
    assert main(["history", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].count("\\x1b[2J\\u202e\\nrun 9, forged") == 3 and not obeyed("".join(lines))


@pytest.mark.filterwarnings("error")  # matplotlib quotes what it cannot draw
def test_the_report_of_a_run(tmp_path):
    """Names of folders, of test sets and versions; square brackets are no markup of the terminal's either."""
    folder = tmp_path / "run\x1b[2J\u202e[bold]"
    folder.mkdir()
    scores = {"eval/accuracy": 0.5, "eval/reward": 0.5, f"eval/{EVIL}/accuracy": 0.25}
    rows = [{"step": step, "time/training_s": 1.0 + step, **scores} for step in (0, 1)]
    write_jsonl(folder / "metrics.jsonl", rows)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"path": EVIL.replace("\udc80", "")}}))
    console = Console(file=io.StringIO(), width=300)
    report([folder], console)
    for text in (console.file.getvalue(), (folder / "report.html").read_text()):
        assert "\\x1b[2J" in text and not obeyed(text), obeyed(text)
    assert f"{SHOWN}/accuracy after" in console.file.getvalue()
