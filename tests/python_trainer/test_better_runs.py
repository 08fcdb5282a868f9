"""Which earlier runs are learned from: those that are clearly better than the present one."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import same
from test_earlier_runs import found

from python_trainer.accelerators.rhyme import accelerator
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StepRecord
from python_trainer.accelerators.rhyme.matching import PARTS, curve_of
from python_trainer.accelerators.rhyme.replay import CLEAR, ENOUGH, clearly_better, last_shares
from python_trainer.errors import UserError
from python_trainer.run_directory import read_metrics


def outcomes(rows):
    """Of (number of a prompt, answers, right ones)."""
    keys = torch.zeros(len(rows), 16, dtype=torch.uint8)
    keys[:, 0] = torch.tensor([number for number, *_ in rows])
    counts = torch.tensor([counts for _, *counts in rows], dtype=torch.int32)
    return {"prompts": keys, "answers": counts[:, 0], "right": counts[:, 1]}


def test_the_last_visit_of_each_prompt_counts():
    shares = last_shares([outcomes([(1, 4, 0), (2, 4, 4)]), {}, outcomes([(1, 8, 2), (3, 4, 3)])])
    assert {bytes.fromhex(key)[0]: share for key, share in shares.items()} == {1: 0.25, 2: 1.0, 3: 0.75}


def test_damaged_steps_are_refused():
    whole = outcomes([(number, 8, 3) for number in range(16)])
    sketch = {name: torch.ones(bins) for name, bins in PARTS.items()}
    record = StepRecord(1, 0.5, 0.5, sketch, outcomes=whole)
    assert len(last_shares([whole])) == len(curve_of(1, [record]).shares) == 16
    for damaged in (
        {"outcomes": {"answers": whole["answers"]}},
        {"outcomes": whole | {"right": whole["right"][:3]}},
        {"outcomes": whole | {"prompts": whole["prompts"].float()}},
        {"outcomes": whole | {"prompts": torch.tensor(3)}},
        {"outcomes": whole | {"right": whole["right"] + 9}},
        {"sketch": sketch | {"ngrams": -sketch["ngrams"]}},
        {"sketch": sketch | {"lengths": torch.ones(31)}},
        {"sketch": {name: sketch[name] for name in sketch if name != "ngrams"}},
    ):
        with pytest.raises(UserError, match="steps of run 1 in the retrospective database are damaged"):
            curve_of(1, [replace(record, **damaged)])


def test_few_prompts_tell_nothing_and_more_a_clear_gain():
    own = {str(i): 0.25 for i in range(ENOUGH)}
    theirs = {str(i): 0.75 for i in range(ENOUGH)} | {"another": 0.0}
    assert clearly_better(theirs, own) and not clearly_better(own, own)
    del own["0"]
    assert not clearly_better(theirs, own)


def test_runs_that_are_as_good_seldom_seem_better():
    generator = torch.Generator().manual_seed(5)
    p = torch.rand(2000, 16, 1, generator=generator).expand(-1, -1, 8)
    rows = [torch.bernoulli(p, generator=generator).mean(2).tolist() for _ in range(2)]
    seen = [clearly_better(*(dict(enumerate(shares)) for shares in pair)) for pair in zip(*rows)]
    # a normal variable exceeds two deviations in 2.3 % of the cases, Student's with 15 degrees of freedom in 3.2 %
    assert CLEAR == 2 and 0.01 < sum(seen) / len(seen) < 0.045
    p = torch.rand(2000, 16, 1, generator=generator) * 0.5
    worse, better = (torch.bernoulli(q.expand(-1, -1, 8), generator=generator).mean(2).tolist() for q in (p, p + 0.3))
    seen = [clearly_better(dict(enumerate(a)), dict(enumerate(b))) for a, b in zip(better, worse)]
    assert sum(seen) / len(seen) > 0.99


@pytest.fixture
def run(history_run):
    return partial(history_run, save={"save_steps": 1})


def judged_otherwise(database, right, run_id=1):
    """Counts so many of the answers of a run, the first one, as right."""
    created = database.runs()[run_id - 1].created
    for record in database.trajectory(run_id):
        counts = record.outcomes | {"right": (record.outcomes["answers"] * right).int()}
        answers = [s for s in database.samples() if (s.run_id, s.step) == (run_id, record.step)]
        database.add_step(run_id, replace(record, outcomes=counts), answers, created=created)


def forget_the_second(database):
    _, second = database.runs()
    database.remove_run(second.id, created=second.created)


def test_a_worse_run_changes_nothing_to_the_bit_and_a_better_one_is_learned_from(run, tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "LOOKS", 4)
    url = str(tmp_path / "history.db")
    run("first", database=url)
    database = RetrospectiveDatabase(url)
    samples = len(database.samples())
    judged_otherwise(database, 0.0)
    assert len(database.samples()) == samples > 0
    alone, after = (run(name, seed=1, steps=6, database=db) for name, db in (("alone", None), ("worse", url)))
    assert same(alone, after) and found(tmp_path, "worse") == 0
    assert after.accelerators[0].settled and not after.accelerators[0].active
    forget_the_second(database)
    judged_otherwise(database, 1.0)
    better = run("better", seed=1, steps=6, database=url)
    assert not same(alone, better) and found(tmp_path, "better") > 0
    taken = [row["step"] for row in read_metrics(tmp_path / "better") if row.get("rhyme/rehearsed_answers")]
    assert taken == [3]  # eight prompts are answered after two steps
    forget_the_second(database)
    run("parts", seed=1, steps=2, database=url)  # ends before it has learned from it
    parts = run("parts", seed=1, steps=6, resume=True, database=url)
    assert same(parts, better)


@pytest.mark.parametrize(("done", "right"), [(1, 1.0), (2, 0.0), (2, 1.0), (3, 1.0)])
def test_what_others_write_while_a_run_is_stopped_is_not_for_it(run, tmp_path, done, right):
    url = str(tmp_path / "history.db")
    run("first", database=url)
    database = RetrospectiveDatabase(url)
    judged_otherwise(database, right)
    shutil.copy(tmp_path / "history.db", tmp_path / "whole.db")
    whole = run("whole", seed=1, steps=4, database=str(tmp_path / "whole.db"))
    run("parts", seed=1, steps=done, database=url)
    judged_otherwise(database, 1 - right)
    run("others", seed=2, database=url)
    judged_otherwise(database, 1.0, run_id=3)
    parts = run("parts", seed=1, steps=4, resume=True, database=url)
    assert same(whole, parts)
    summaries = [trainer.accelerators[0].summary() for trainer in (whole, parts)]
    assert summaries[0] == summaries[1] and (found(tmp_path, "parts") > 0) == (right == 1.0)
    assert (parts.accelerators[0].better == [1]) == (right == 1.0)
