"""Every accelerator in one run: each of them does its part."""

from pathlib import Path

from rich.console import Console

from python_trainer.config import load_config
from python_trainer.report.runs import find_runs
from python_trainer.trainer import Trainer

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"


def test_all_accelerators_take_part(tmp_path):
    Trainer(load_config(SMOKE), tmp_path / "run", console=Console(quiet=True)).run()
    (run,) = find_runs([tmp_path])
    # no task for them, no earlier run
    chance = ("alpha/accepted", "rhyme/replayed_answers", "rhyme/rehearsed_answers", "rhyme/earlier_tokens")
    idle = [name for name, count in run.counters.items() if not count and name not in chance]
    assert not idle, run.counters
    assert set(run.summary["accelerator_s"]) == {"rhyme", "rpo", "drafts", "alpha"}
