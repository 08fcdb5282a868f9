"""The page of a run: complete, closed to the network, and no text of a model or a file becomes markup."""

import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from conftest import QUIET, full_disk, merged, run_settings, train
from rich.console import Console
from support import write_jsonl
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from python_trainer.command_line.report import (
    by_variant,
    caveats,
    draw_curves,
    escape_controls,
    find_runs,
    report,
    summary_rows,
    table_rows,
    verdicts,
)
from python_trainer.config import flatten, load_config
from python_trainer.data import Rollout
from python_trainer.errors import UserError
from python_trainer.run.directory import EVALUATIONS, read_metrics, read_samples
from python_trainer.run.logger import SAMPLES, Logger, choose_samples

VOID = {"meta", "img"}
EVIL = "<script>alert(1)</script>&<b>\x1b[2J"


class Page(HTMLParser):
    """Check that elements nest, and collect tags, attributes and texts."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.tags = []
        self.addresses = []
        self.texts = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


@pytest.fixture(scope="module")
def trained(tiny_policy, jsonl_files, tmp_path_factory):
    """Make two short runs that differ in two settings; tamper with the answers of one."""
    folder = tmp_path_factory.mktemp("trained")
    for name, changes in (("a&b", {}), ("other", {"seed": 1, "algorithm": {"beta": 0.1}})):
        values = merged(run_settings(tiny_policy, jsonl_files), {"max_steps": 3} | changes)
        train(load_config(values), folder / name)
    path = folder / "a&b" / "samples.jsonl"
    text = path.read_text().replace('"prompt": "', '"prompt": ' + json.dumps(EVIL)[:-1], 1)
    for accuracy in (1.0, 0.0):
        text = text.replace('"accuracy": null', f'"accuracy": {accuracy}', 1)
    path.write_text(text)
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    """Return a copy of these runs."""
    return shutil.copytree(trained, tmp_path / "runs")


def test_page_of_two_runs(runs, monkeypatch):
    monkeypatch.chdir(runs / "a&b")
    report([runs / "other", Path()], QUIET)
    assert not [*runs.glob("*/report.html")], "the page of each run stays as it is"
    text = (runs / "report.html").read_text()
    page = Page(text)
    assert "script" not in page.tags and "\x1b" not in text and "a&b" in page.texts
    assert "<script>alert(1)</script>&<b>\\x1b[2J" in "".join(page.texts)
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert "url(http" not in text and "@import" not in text
    for words in (
        "Accuracy on test prompts", "share of generation", "algorithm.beta", "accuracy after", "device", "torch",
        "step 3",
    ):  # fmt: skip
        assert words in page.texts, words
    assert page.tags.count("img") == 1
    assert [text.count(f'<td class="{words[2:]}">{words}</td>') for words in ("✓ right", "✗ wrong")] == [1, 1]
    assert ".text td { overflow-wrap" not in text  # many runs would squeeze the names in the first column to letters
    before_shared = text[text.index("<h2>Settings") : text.index("Settings that all runs share")]
    assert before_shared.count("<tr>") == 3  # the head, algorithm.beta and seed
    report([runs / "a&b"], QUIET)
    assert "Settings that all runs share" not in (runs / "a&b" / "report.html").read_text()


def test_a_picture_that_does_not_fit_on_the_disk_is_named(runs):
    """The earlier one stays."""
    report([runs / "other"], QUIET)
    picture = runs / "other" / "accuracy.png"
    before = picture.read_bytes()
    with full_disk(1000), pytest.raises(OSError, match=f"too large: '{picture}'"):
        report([runs / "other"], QUIET)
    assert picture.read_bytes() == before


@pytest.mark.parametrize(("file", "change", "problem"), [
    ("metrics.jsonl", {"step": 10**400}, "line 1: step: "),
    ("evaluations.jsonl", {"correct": [1e300, 0.0]}, "line 1: correct.0: "),
    ("evaluations.jsonl", {"correct": [float("nan")]}, "line 1: correct.0: "),
    ("summary.json", {"steps": 10**400}, "steps: "),
])  # fmt: skip
def test_absurd_numbers_are_named(runs, file, change, problem):
    path = runs / "other" / file
    first, *others = path.read_text().splitlines() if file.endswith("jsonl") else [path.read_text()]
    path.write_text("\n".join([json.dumps(json.loads(first) | change), *others, ""]))
    with pytest.raises(UserError, match=re.escape(f"{path} is damaged ({problem}")):
        report([runs], QUIET)


@pytest.mark.parametrize("value", [1e300, float("nan"), float("inf"), None])
def test_other_absurd_numbers_are_shown(runs, value):
    for name in ("a&b", "other"):
        rows = [json.loads(line) | {"eval/accuracy": value, "time/training_s": value} for line in
                (runs / name / "metrics.jsonl").read_text().splitlines()]  # fmt: skip
        write_jsonl(runs / name / "metrics.jsonl", rows)
        (runs / name / "summary.json").unlink()
    report([runs], QUIET)
    assert "steps" in Page((runs / "report.html").read_text()).texts


def test_earlier_runs_are_charged(runs):
    """Their cost moves the curve, and is part of the totals, of the cost to the target and of the verdict."""
    (runs / "a&b").rename(runs / "baseline")
    other = runs / "other"
    runs_before = {run.name: run for run in find_runs([runs])}
    summary = json.loads((other / "summary.json").read_text()) | {"seconds_to_target": 2.0, "tokens_to_target": 10.0}
    (other / "summary.json").write_text(json.dumps(summary))
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        row |= {"rhyme/earlier_tokens": 3e6, "rhyme/earlier_seconds": 450.0}  # three runs, each found in another step
    write_jsonl(other / "metrics.jsonl", rows)
    runs_after = find_runs([runs])
    line = "other learned from earlier runs: their 9,000,000 tokens and 1,350 s count as its own"
    assert line in caveats(runs_after)
    for axes, (x, cost) in zip(
        draw_curves(runs_after).axes, (("time/training_s", 1350.0), ("total/generated_tokens", 9e6))
    ):
        curve = axes.lines[1]
        assert list(curve.get_xdata()) == [row[x] + cost for row in rows if "eval/accuracy" in row]
        assert curve.get_label() == "other, after an earlier run"
    table = {name: cells for name, *cells in summary_rows(runs_after)}
    tokens, seconds = (runs_before["other"].summary[key] for key in ("generated_tokens", "training_s"))
    assert table["generated tokens"][1] == f"{tokens + 9e6:,.0f}"
    assert table["seconds without evaluation"][1] == f"{seconds + 1350:.1f}"
    assert table["seconds to target"][1] == "1352.0" and table["tokens to target"][1] == "9,000,010"
    (verdict,) = verdicts(runs_after)
    plain = runs_before["baseline"].summary["generated_tokens"]
    assert verdict.startswith(f"other: {(tokens + 9e6) / plain - 1:.0%} more generated tokens, "), verdict


def test_answers_before_and_after_are_shown(runs, jsonl_files):
    """Every run's page shows them, and the terminal those of a single run; their text becomes no markup."""
    path = runs / "other" / "evaluations.jsonl"
    start, final = map(json.loads, path.read_text().splitlines())
    assert [row["name"] for row in (start, final)] == ["start", "final"]
    prompts = [json.loads(line)["prompt"] for line in Path(jsonl_files[1]).read_text().splitlines()]
    assert [sample["prompt"] for row in (start, final) for sample in row["samples"]] == prompts[:SAMPLES] * 2
    assert all(isinstance(sample["answer"], str) for sample in start["samples"])
    start["samples"][0] |= {"answer": EVIL}
    final["samples"][0] |= {"answer": "right\n" + 500 * "and so on "}
    final["samples"][1] |= {"prompt": "another"}
    path.write_text(json.dumps(start) + "\n" + json.dumps(final) + "\n")
    console = Console(file=io.StringIO(), width=100)
    report([runs], console)
    assert "before: " not in console.file.getvalue() and "another" not in (runs / "report.html").read_text()
    report([runs / "other"], console)
    output = console.file.getvalue()
    assert f"prompt: {prompts[0]}\n  before: {escape_controls(EVIL)}\n  after:  right and so on and so on" in output
    assert max(map(len, output.splitlines())) < 300
    text = (runs / "other" / "report.html").read_text()
    page = Page(text)
    assert "script" not in page.tags and "<script>alert(1)</script>&<b>\\x1b[2J" in page.texts
    assert text.count("before training") == 1 and "right\nand so on" in text
    path.write_text(json.dumps({"step": 0, "name": "start", "correct": [1.0]}) + "\n")  # of an older version
    report([runs / "other"], QUIET)
    assert "before training" not in (runs / "other" / "report.html").read_text()


def test_variants_have_a_verdict_and_one_order(runs):
    """The baseline comes first wherever it lies; what did not do the same, or has not ended, is said."""
    (runs / "other").rename(runs / "baseline")
    (runs / "baseline" / "summary.json").unlink()
    with (runs / "baseline" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "time/training_s": 60.0, "time/wall_s": 61.0, "reward": None}) + "\n")
    found_runs = find_runs([runs])
    assert [run.ended for run in found_runs] == [True, False] and list(by_variant(found_runs)) == ["baseline", "a&b"]
    evaluations = {part: {"eval/reward": value} for part, value in (("start", 0.25), ("final", 0.5))}
    graded = replace(found_runs[0], summary=found_runs[0].summary | {
        "eval_accuracy_start": 0.0, "eval_accuracy_final": 0.0, "evaluation": evaluations,
    })  # fmt: skip
    assert verdicts([graded])[0].startswith("a&b: reward 0.250 -> 0.500 in 3 steps, ")  # nothing is right or wrong
    graded.summary["evaluation"] = {"start": {}, "final": {}}  # of an older version
    assert verdicts([graded])[0].startswith("a&b: accuracy 0.0% -> 0.0% in 3 steps, ")
    (verdict,) = verdicts(found_runs)
    assert verdict.startswith("a&b: ") and "generated tokens, " in verdict and "less time, accuracy " in verdict
    ended, steps = caveats(found_runs)
    assert ended.startswith("baseline has not ended: ") and "4 steps" in ended
    assert "different numbers of steps (baseline 4, a&b 3)" in steps
    report([runs], QUIET)
    page = Page((runs / "report.html").read_text())
    assert verdict in page.texts and f"Note: {steps}." in page.texts
    assert (runs / "accuracy.png").stat().st_size > 5000


def test_unfinished_runs_have_the_summary_of_their_steps(runs):
    """Sums of rows equal the summary of a finished run, but for what happens between steps."""
    (run,) = find_runs([runs / "other", runs / "other", runs / "other" / "."])
    (runs / "other" / "summary.json").unlink()
    (unfinished,) = find_runs([runs / "other"])
    assert run.ended and not unfinished.ended and unfinished.summary.keys() < run.summary.keys()
    for key in ("steps", "generated_tokens", "trained_tokens", "eval_accuracy_start", "eval_accuracy_final"):
        assert unfinished.summary[key] == run.summary[key], key
    for key in ("training_s", "rollout_s", "train_s"):
        assert 0.5 * run.summary[key] < unfinished.summary[key] <= run.summary[key], key
    metrics = runs / "other" / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if '"step": 3' not in line))  # without its evaluation
    (two_steps,) = find_runs([runs / "other"])
    assert (
        two_steps.summary["steps"] == 2
        and two_steps.summary["eval_accuracy_start"] == run.summary["eval_accuracy_start"]
    )
    assert two_steps.summary["eval_accuracy_final"] is None and "% -> - in 2 steps" in verdicts([two_steps])[0]
    with pytest.raises(UserError, match=r"no run \(metrics.jsonl\)"):
        find_runs([runs / "other" / "checkpoints"])
    for place in ("nowhere", "other/config.yaml"):
        with pytest.raises(UserError, match=f"there is no folder .*/{place}$"):
            find_runs([runs / "other", runs / place])


def test_a_clock_that_another_program_left_out(tmp_path):
    row = {"step": 1, "time/training_s": None, "time/wall_s": None, "eval/accuracy": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    report([tmp_path], QUIET)
    (run,) = find_runs([tmp_path])
    assert run.summary["training_s"] == run.summary["wall_s"] == 0.0


def test_cost_is_compared_over_the_seeds_of_both_variants(tmp_path):
    """A seed that the baseline alone has, and that is dear, makes no variant cheap."""

    def write(variant, seed, tokens, seconds):
        folder = tmp_path / variant / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        summary = {"steps": 1, "generated_tokens": tokens, "training_s": seconds, "seconds_to_target": seconds}
        (folder / "summary.json").write_text(json.dumps(summary))

    write("baseline", 0, 100, 10.0)
    write("rpo", 0, 100, 10.0)
    assert not caveats(find_runs([tmp_path]))
    write("baseline", 1, 900, 70.0)
    runs = find_runs([tmp_path])
    (verdict,) = verdicts(runs)
    assert verdict.startswith("rpo: 0% more generated tokens, 0% more time")
    table = {name: cells for name, *cells in summary_rows(runs)}
    assert table["speed to target, times baseline"][1] == "1.00" and table["generated tokens"] == ["500", "100"]
    (caveat,) = caveats(runs)
    assert caveat.startswith("rpo and baseline have other seeds: comparisons are of seeds that both have")


def test_tensorboard_has_every_metric(runs):
    rows = read_metrics(runs / "other")
    events = EventAccumulator(str(runs / "other" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {key for row in rows for key in row} - {"step"}
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("entropy")] == pytest.approx([r["entropy"] for r in rows[1:]])


def test_tensorboard_forgets_a_run_that_begins_anew(tmp_path):
    """A kill before the first checkpoint has left its curves."""
    for second, values in enumerate(([1.0, 2.0, 3.0], [4.0, 5.0])):
        logger = Logger(tmp_path, 3, console=QUIET)
        with logger.recording():
            for step, value in enumerate(values):
                logger.log(step, {"reward": value})
        (file,) = (tmp_path / "tensorboard").glob("events.out.*")
        file.rename(file.with_name(f"{second}.tfevents"))  # names have whole seconds
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(0, 4.0), (1, 5.0)]


def rollout(accuracy, *, text="42", cap=None):
    facts = {"text": text, "reward": accuracy, "accuracy": accuracy, "importance_cap": cap}
    return Rollout([1], [2, 3], 1, [0.0], "stop", **facts)


def chosen(rollouts):
    return choose_samples(rollouts, str, lambda sample: str(sample.prompt_ids))


def test_samples_show_right_and_wrong():
    rollouts = [rollout(1.0, cap=2.0), *[rollout(0.0, text=str(i)) for i in range(9)], rollout(1.0, text="x" * 9999)]
    samples = chosen(rollouts)
    assert [sample["accuracy"] for sample in samples] == [0.0, 0.0, 0.0, 1.0]
    assert [sample["answer"][:2] for sample in samples] == ["0", "1", "2", "xx"] and len(samples[3]["answer"]) == 4000
    assert samples[0] | {"answer": ""} == {
        "prompt": "[1]", "given": "[2]", "answer": "", "reward": 0.0, "accuracy": 0.0, "tokens": 2, "given_tokens": 1,
        "finish_reason": "stop",
    }  # fmt: skip
    assert chosen([rollout(1.0, cap=2.0)]) == []
    assert chosen([rollout(torch.nan)])[0]["reward"] is None


def test_samples_of_a_task_without_right_and_wrong_are_neither():
    """The best and the worst are among them."""
    rollouts = [rollout(0.0, text=str(i)) for i in range(9)]
    for answer, score in zip(rollouts, (0.2, 0.2, 0.3, 0.2, 0.2, 0.7, 0.2, 0.2, 0.1)):
        answer.filter_score = answer.reward = score
    samples = chosen(rollouts)
    assert {"5", "8"} < {sample["answer"] for sample in samples}
    assert {sample["accuracy"] for sample in samples} == {None}


def test_samples_are_of_different_prompts():
    rollouts = [rollout(0.0, text=f"{group}{i}") for group in range(3) for i in range(3)]
    for i, sample_rollout in enumerate(rollouts):
        sample_rollout.group = i // 3
    rollouts[5].accuracy = 1.0
    samples = choose_samples(rollouts, str, lambda sample_rollout: f"prompt {sample_rollout.group}")
    assert [(sample["prompt"], sample["answer"]) for sample in samples] == [
        ("prompt 0", "00"), ("prompt 0", "01"), ("prompt 1", "12"), ("prompt 2", "20"),
    ]  # fmt: skip


def test_samples_of_a_resumed_run_are_those_of_its_steps(tmp_path):
    logger = Logger(tmp_path, 100, console=QUIET)
    with logger.recording():
        for step in range(1, 6):
            logger.log_samples(step, [{"answer": str(step)}])
    assert read_samples(tmp_path) == {step: [{"answer": str(step)}] for step in range(1, 6)}
    with Logger(tmp_path, 100, console=QUIET).recording(after_step=3):
        assert list(read_samples(tmp_path)) == [1, 2, 3]
    assert read_samples(tmp_path / "nowhere") == {}


def test_a_step_at_work_fits_into_80_columns(tmp_path):
    seconds = [0.0]
    options = {"width": 80, "force_terminal": True, "color_system": None, "get_time": lambda: seconds[0]}
    console = Console(file=io.StringIO(), **options)
    logger = Logger(tmp_path, 1000, console=console)
    with logger.recording():
        for step in (997, 998, 999):
            seconds[0] += 100
            logger.log(step, {"eval/accuracy": 0.5, "reward": 0.25, "tokens_per_second": 12345.0, "grad_norm": 0.5})
        logger.log_work(512, 512, "evaluation")
    console.print(logger._progress.get_renderable())
    assert console.file.getvalue().endswith(" 999/1000 accuracy 0.500 reward 0.250  evaluation 512/512 0:01:40\n")


def test_small_parts():
    assert flatten({"a": {"b": [1], "c": {}}, "d": None}) == {"a.b": "[1]", "a.c": "{}", "d": "null"}
    assert table_rows([{"a": "1", "b": "2"}, {"a": "1"}]) == [("a", "1", "1"), ("b", "2", "-")]


@pytest.mark.parametrize(("name", "shown"), [("_hidden", " _hidden"), ("lr_$LR_$SEED", r"lr_\$LR_\$SEED")])
def test_pictures_name_a_run_in_the_current_folder_as_it_is(runs, monkeypatch, name, shown):
    """Matplotlib hides names with an underscore first, and reads a formula between dollars."""
    monkeypatch.chdir((runs / "other").rename(runs / name))
    report([Path()], QUIET)
    (run,) = find_runs([Path()])
    assert run.name == name
    assert [text.get_text() for legend in draw_curves([run]).legends for text in legend.get_texts()] == [shown]


def test_runs_of_one_name_in_other_folders_are_not_seeds_of_a_variant(runs, tmp_path):
    for place in ("x", "y"):
        shutil.copytree(runs / "other", tmp_path / place / "run")
    found_runs = find_runs([tmp_path / "x", tmp_path / "y"])
    assert [(run.name, run.label) for run in found_runs] == [("x/run", "x/run"), ("y/run", "y/run")]


def test_a_seed_of_two_comparisons_is_not_paired_with_the_baseline_of_the_other(tmp_path):
    for comparison, right in (("x", 1.0), ("y", 0.0)):
        for variant in ("baseline", "rpo"):
            folder = tmp_path / comparison / variant / "seed-0"
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text('{"step": 1}\n')
            (folder / EVALUATIONS).write_text(json.dumps({"step": 1, "name": "final", "correct": [right] * 9}) + "\n")
    found_runs = find_runs([tmp_path / "x", tmp_path / "y"])
    assert list(by_variant(found_runs)) == ["x/baseline", "x/rpo", "y/baseline", "y/rpo"]
    assert found_runs[0].label == "x/baseline seed-0"
    (tmp_path / "y" / "baseline" / "seed-0").rename(tmp_path / "y" / "baseline" / "seed-1")
    (tmp_path / "y" / "rpo" / "seed-0").rename(tmp_path / "y" / "rpo" / "seed-1")
    found_runs = find_runs([tmp_path / "x", tmp_path / "y"])  # other seeds of the same variants
    assert list(by_variant(found_runs)) == ["baseline", "rpo"]
    assert "accuracy not told apart (95 %: +0.0 to +0.0 points)" in verdicts(found_runs)[0]
