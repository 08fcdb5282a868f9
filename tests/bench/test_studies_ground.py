"""What the studies of chosen prompts make of their runs."""

import json
from types import SimpleNamespace

from rich.console import Console

from bench.studies import pass_at
from bench.studies.curriculum_report import accuracy_for, share, share_words, write
from bench.studies.ground import Ground, is_of, no_spread
from bench.studies.ground_report import DYNAMIC_SAMPLING, first_time
from python_trainer.config import load_config
from python_trainer.run import Trainer

CURVE = [[0, 0.0, 0, 0.1], [10, 5.0, 100, 0.4], [20, 9.0, 190, 0.3], [30, 14.0, 300, 0.5], [40, 20.0, 390, 0.6]]


def record(name, seed=0, speed=1.0, **changes):
    curve = [[step, speed * seconds, round(speed * tokens), accuracy] for step, seconds, tokens, accuracy in CURVE]
    facts = {
        "task": "sums",
        "cpu": "a",
        "torch": "b",
        "commit": "c",
        "generated_tokens": curve[-1][2],
        "steps": 40,
        "without_spread": [0.5] * 40,
        "cpu_s": curve[-1][1],
        "final": 0.6,
    }
    return facts | {"name": name, "seed": seed, "curve": curve} | changes


def test_groups_without_a_spread_are_of_all_that_were_drawn():
    """Dynamic sampling trains on others only."""
    assert no_spread({"frac_reward_zero_std": 0.4}) == 0.4
    assert no_spread({"frac_reward_zero_std": 0.0, "sampling/kept_groups": 0.25}) == 0.75


def test_an_accuracy_is_reached_when_two_evaluations_after_another_are_as_high():
    assert first_time(record("plain"), 0.4) == 14.0 and first_time(record("plain"), 0.4, 2) == 300
    assert first_time(record("plain"), 0.3, 2) == 100 and first_time(record("plain"), 0.6) is None


def test_shares_are_of_what_plain_training_of_the_seed_needs():
    plain, fast = record("plain"), record("fast", speed=0.5)
    fast["curve"].append([50, 12.5, 240, 0.7])
    assert share(fast, plain, 2) == (195 / 390, True) and share(fast, plain, 1) == (10 / 20, True)
    assert share(record("same", speed=0.75), plain, 1) == (0.75, False)  # 0.6 once, so all that it took
    assert accuracy_for(plain, 195) == 0.3 and accuracy_for(plain, 1e9) == 0.6
    there = [(0.5, True)] * 3
    assert share_words([(0.5, True), (2.0, True)]) == "1.00" and share_words(there) == "0.50 (0.50 to 0.50)"
    assert share_words([(0.5, True), (2.0, False)]) == "at least 1.00, 1 of 2"
    assert share_words([(1.0, False)]) == "none of 1" and share_words([]) == "-"


def test_a_share_of_which_one_is_only_a_bound_has_no_interval():
    """All that a run took says nothing of what it would have needed."""
    assert share_words([(0.5, True), (0.5, True), (1.0, False)]) == "at least 0.63, 2 of 3"


def test_a_run_that_does_not_get_there_counts_with_all_that_it_took():
    """Its last evaluation may be before its last step."""
    plain, slow = record("plain"), record("slow", generated_tokens=450, cpu_s=23.0)
    del slow["curve"][-1]
    assert share(slow, plain, 2) == (450 / 390, False) and share(slow, plain, 1) == (23.0 / 20.0, False)


def test_report_has_a_row_for_each_name_and_a_picture(tmp_path):
    fast = [record("fast", seed, 0.5) for seed in (0, 1)]
    for row in fast:
        row["curve"].append([50, 12.5, 240, 0.7])
    write([record("plain"), record("plain", 1), *fast], tmp_path)
    (row,) = [line for line in (tmp_path / "curriculum.md").read_text().splitlines() if line.startswith("| fast")]
    assert row.endswith("| 0.50 | 0.50 | - | - |") and "| 0, 1 |" in row
    rival = record(DYNAMIC_SAMPLING, 1, 2.0)
    write([record("plain"), record("plain", 1), rival, *fast], tmp_path)
    (row,) = [line for line in (tmp_path / "curriculum.md").read_text().splitlines() if line.startswith("| fast")]
    tokens, seconds = (f"{share(fast[1], rival, column)[0]:.2f}" for column in (2, 1))
    assert row.endswith(f"| 0.50 | 0.50 | {tokens} | {seconds} |") and tokens == seconds == "0.25"
    write([record("plain"), record("plain", 1), rival | {"cpu": "another"}, *fast], tmp_path)
    assert f"{row.split('| 0.50 | 0.50 |')[0]}| 0.50 | 0.50 | - | - |" in (tmp_path / "curriculum.md").read_text()
    assert (tmp_path / "curriculum.png").stat().st_size > 5000


def test_a_record_stands_for_a_run_as_long_as_its_settings_mean_the_same(tmp_path):
    config = Ground("sums", tmp_path, tmp_path / "records").config({}, seed=0, size=0.5)
    settings = config.model_dump(mode="json")
    assert is_of({"settings": json.loads(json.dumps(settings))}, config)
    del settings["save"]["older_moments"]  # of before there was such a setting
    assert is_of({"settings": settings}, config)
    assert not is_of({"settings": settings | {"seed": 1}}, config)
    sections = settings["accelerators"]
    other = settings | {"accelerators": sections | {"curriculum": sections["curriculum"] | {"floor": 0.2}}}
    assert is_of({"settings": other}, config)  # it is off
    on = Ground("sums", tmp_path, tmp_path / "records").config({"accelerators.enabled": ["curriculum"]}, 0, 0.5)
    other["accelerators"]["enabled"] = ["curriculum"]
    assert not is_of({"settings": other}, on) and is_of({"settings": on.model_dump(mode="json")}, on)
    older = on.model_dump(mode="json")  # of before there were databases, or answers to rehearse
    del older["accelerators"]["curriculum"]["database"]
    older["accelerators"]["curriculum"]["rehearsals"] = 1
    assert is_of({"settings": older}, on)
    read = Ground("sums", tmp_path, tmp_path / "records").config(
        {"accelerators.enabled": ["curriculum"], "accelerators.curriculum.database": "some.db"}, 0, 0.5
    )
    assert not is_of({"settings": older}, read)
    assert not is_of({"settings": settings | {"gone": 1}}, config)


def test_pass_at_8_is_of_the_last_policy_on_the_first_prompts(tmp_path, monkeypatch):
    settings = ["model.path=small", "task.train_size=4", "task.test_size=5", "rollout.max_completion_length=8"]
    settings += ["rollout.prompts_per_step=2", "rollout.num_generations=2", "max_steps=1", "evaluation.eval_limit=2"]
    config = load_config("configs/arithmetic.yaml", [*settings, "save.save_steps=1"])
    Trainer(config, tmp_path / "run", console=Console(quiet=True)).run()
    before = sorted((tmp_path / "run").iterdir())
    asked = []

    def judge(task, examples, texts, ids):
        asked.extend(examples)
        assert len(texts) == len(ids) == 6
        return SimpleNamespace(accuracy=[0, 0, 1, 0, 1, 1])

    for name, value in {"PROMPTS": 3, "ANSWERS": 2, "score": judge}.items():
        monkeypatch.setattr(pass_at, name, value)
    assert pass_at.pass_at_8(tmp_path / "run", config) == 0.6667
    assert asked == [example for example in config.task.load().test[:3] for _ in range(2)]
    assert sorted((tmp_path / "run").iterdir()) == before, "the model is taken away again"
