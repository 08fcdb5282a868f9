"""The logger of a run, metrics of a step's rollouts, and the choice of samples to keep."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter  # takes a second, which no run should count

from python_trainer.algorithms.advantages import group_statistics
from python_trainer.data import Rollout, filter_scores, select_fresh
from python_trainer.run.directory import EVALUATIONS, append_row, naming, read_rows, write_text
from rlkernels._text import escape_controls

LINE_SECONDS = 10.0  # between lines where the output is no terminal
SAMPLES = 4  # answers of a step in samples.jsonl
SAMPLE_CHARACTERS = 4000  # of a prompt or an answer there
# metrics in the line of a step, and how they are written
SHOWN_METRICS = {
    "reward": "reward {:.3f}",
    "sft/loss": "loss {:.3f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "grad_norm": "grad {:.2f}",
}


def group_spread(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of the rewards within the groups that are trained on; ``reward_std`` is their mean deviation.

    Stored answers count too: they decide whether a group has a spread. Stored answers with a success rate, and other
    groups of one answer, have no deviation; without other groups there are no metrics.
    """
    grouped = [rollout for rollout in rollouts if rollout.success_rate is None]
    rewards = torch.tensor([rollout.reward for rollout in grouped], dtype=torch.float64)
    size, _, deviation = group_statistics(rewards, torch.tensor([rollout.group for rollout in grouped]))
    deviation = deviation[size > 1]
    if not len(deviation):
        return {}
    return {"reward_std": float(deviation.mean()), "frac_reward_zero_std": float((deviation == 0).double().mean())}


def rollout_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of what the policy has generated in a step, by TRL's names; stored answers do not count.

    - Rewards and accuracy cover rollouts that the policy generated from their first token on; without any they are
      missing. Rollouts with a given prefix have ``continued/`` metrics: most continuations of a right prefix are right.
    - ``entropy`` is the mean of -log p over all generated tokens: an estimate without bias, which takes no further
      pass. Where top-k or top-p leave tokens out, it is below the entropy of all tokens.
    """
    rollouts = [rollout for rollout in rollouts if rollout.importance_cap is None]
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    ended = [n for n, rollout in zip(lengths, rollouts) if rollout.finish_reason != "length"]
    surprisals = [-logprob for rollout in rollouts for logprob in rollout.policy_logprobs]
    row: dict[str, float] = {}
    if rollouts:
        row["completions/clipped_ratio"] = 1 - len(ended) / len(rollouts)
        row["completions/generated_length"] = len(surprisals) / len(rollouts)
    if surprisals and math.isfinite(entropy := fmean(surprisals)):  # NaN: the engine cannot tell
        row["entropy"] = entropy
    continued = [rollout for rollout in rollouts if rollout.prefix_len]
    row |= reward_statistics(select_fresh(rollouts))
    row |= {f"continued/{name}": value for name, value in reward_statistics(continued).items()}
    if continued:
        row["continued/share"] = len(continued) / len(rollouts)
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if episodes:
        row["environment/turns"] = sum(episode.turns for episode in episodes) / len(episodes)
        row["environment/failures"] = float(sum(bool(episode.failure) for episode in episodes))
    for kind, values in (("length", lengths), ("terminated_length", ended)):
        if values:
            row |= {
                f"completions/mean_{kind}": sum(values) / len(values),
                f"completions/min_{kind}": min(values),
                f"completions/max_{kind}": max(values),
            }
    return row


def reward_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of the rewards of these rollouts; empty without any."""
    if not rollouts:
        return {}
    row = {
        "reward": fmean(rollout.reward for rollout in rollouts),
        "accuracy": fmean(rollout.accuracy for rollout in rollouts),
    }
    for name in rollouts[0].rewards:
        column = torch.tensor([r.rewards[name] for r in rollouts if r.rewards[name] is not None], dtype=torch.float64)
        if len(column):
            row[f"rewards/{name}/mean"] = float(column.mean())
            row[f"rewards/{name}/std"] = float(column.std(correction=min(len(column) - 1, 1)))
    return row


def choose_samples(
    rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str], prompt_text: Callable[[Rollout], str]
) -> list[dict[str, Any]]:
    """Choose up to SAMPLES rollouts of a step for samples.jsonl: a right and a wrong one first, then of other prompts.

    If nothing is right or wrong, the best and the worst take their places, and the accuracy is None.
    """
    fresh = [rollout for rollout in rollouts if rollout.importance_cap is None]
    scores = filter_scores(fresh)
    best_and_worst = [scores.index(extreme(scores)) for extreme in (max, min) if scores]
    first_of_group: dict[int, int] = {}
    for i, rollout in enumerate(fresh):
        first_of_group.setdefault(rollout.group, i)
    shown_groups = {fresh[i].group for i in best_and_worst}
    other_groups = [i for group, i in first_of_group.items() if group not in shown_groups]
    chosen = list(dict.fromkeys([*best_and_worst, *other_groups, *range(len(fresh))]))[:SAMPLES]
    return [
        {
            "prompt": clip(prompt_text(rollout)),
            "given": clip(decode(rollout.response_ids[: rollout.prefix_len])),
            "answer": clip(rollout.text),
            "reward": finite(rollout.reward),
            "accuracy": rollout.accuracy if rollout.filter_score is None else None,
            "tokens": len(rollout.response_ids),
            "given_tokens": rollout.prefix_len,
            "finish_reason": rollout.finish_reason,
        }
        for rollout in (fresh[i] for i in sorted(chosen))
    ]


@contextmanager
def raising_once() -> Iterator[None]:
    """Print no traceback of TensorBoard's thread, whose error the next call of its writer raises."""
    before = threading.excepthook

    def print_others(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            before(failed)

    threading.excepthook = print_others
    try:
        yield
    finally:
        threading.excepthook = before


def clip(text: str) -> str:
    """Return as much of a text as a file of samples holds."""
    return text[:SAMPLE_CHARACTERS]


class Logger:
    """Progress on the terminal, and the files of metrics: metrics.jsonl, samples.jsonl and TensorBoard events.

    Args:
        folder: the run directory.
        max_steps: length of the progress bar.
        label: text in front of the bar.
        console: where progress goes; None for standard error, ``Console(quiet=True)`` for nowhere.
    """

    def __init__(self, folder: Path, max_steps: int, *, label: str = "train", console: Console | None = None):
        self.folder = folder
        self.max_steps = max_steps
        self.label = label
        self.console = console or Console(stderr=True)
        self.work = "answers"  # what the engine generates now
        self._metrics_path = folder / "metrics.jsonl"
        self._samples_path = folder / "samples.jsonl"
        self._events_path = folder / "tensorboard"
        self._accuracy: float | None = None  # of the newest evaluation
        self._step = 0
        self._facts = ""  # accuracy and reward of the newest step
        self._last_line = time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            speed_estimate_period=math.inf,  # a step may take minutes
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._bar = self._progress.add_task(label, total=max_steps, facts="")

    @contextmanager
    def recording(self, after_step: int | None = None) -> Iterator[None]:
        """Open the files and show the bar; within the block rows may be logged.

        Args:
            after_step: last step of a run that is resumed; rows of later steps are dropped. None: a new run.
        """
        for path in (self._metrics_path, self._samples_path, self.folder / EVALUATIONS):
            rows = [row for row in read_rows(path) if after_step is not None and row["step"] <= after_step]
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        accuracies = [row["eval/accuracy"] for row in read_rows(self._metrics_path) if "eval/accuracy" in row]
        self._accuracy = accuracies[-1] if accuracies else None
        self._step = after_step or 0
        self._last_line = time.monotonic()
        self._progress.update(self._bar, total=self.max_steps, completed=self._step)
        purge_step = 0 if after_step is None else after_step + 1  # TensorBoard drops this step and later ones
        with raising_once():
            with naming(self._events_path):
                self._writer = SummaryWriter(str(self._events_path), purge_step=purge_step)
            try:
                with self._progress:
                    yield
            finally:
                with suppress(OSError):  # the row that could not be written has raised it
                    self._writer.close()

    def note(self, text: str) -> None:
        """Print a fact for the user that is no error but may be unintended."""
        self.console.print(f"note: {escape_controls(text)}", highlight=False, markup=False, soft_wrap=True)

    def log(self, step: int, row: dict[str, float]) -> None:
        """Append a row to metrics.jsonl, send it to TensorBoard and show it."""
        append_row(self._metrics_path, {"step": step, **{key: finite(value) for key, value in row.items()}})
        with naming(self._events_path):
            for key, value in row.items():
                if finite(value) is not None:
                    self._writer.add_scalar(key, value, step)
            self._writer.flush()
        self._accuracy = row.get("eval/accuracy", self._accuracy)
        facts = [] if self._accuracy is None else [f"accuracy {self._accuracy:.3f}"]
        facts += [text.format(row[key]) for key, text in SHOWN_METRICS.items() if key in row]
        line = " ".join(facts)
        self._step = step
        self._facts = " ".join(facts[:2])  # leaves room for the next step's work in 80 columns
        self._progress.update(self._bar, completed=step, facts=line)
        seconds_left = self._progress.tasks[self._bar].time_remaining  # None up to the second step
        if seconds_left is not None:
            line = f"{line}  {seconds_left:.0f} s left"
        self._print(line, at_once=step in (0, self.max_steps))

    def log_work(self, done: int, total: int, what: str | None = None) -> None:
        """Show the progress of a part of a step, by default of what the engine generates: ``evaluation 12/100``."""
        work = f"{what or self.work} {done}/{total}"
        self._progress.update(self._bar, facts=f"{self._facts}  {work}" if self._facts else work)
        self._print(work)

    def _print(self, text: str, at_once: bool = False) -> None:
        """Print a line now and then if the output is no terminal."""
        now = time.monotonic()
        if not self.console.is_terminal and self._progress.live.is_started:  # the terminal is lost
            self._progress.stop()
        if not self.console.is_terminal and (at_once or now - self._last_line >= LINE_SECONDS):
            self._last_line = now
            self.console.print(f"{self.label} {self._step}/{self.max_steps}  {text}", highlight=False, soft_wrap=True)

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Append the rollouts of :func:`choose_samples` to samples.jsonl."""
        append_row(self._samples_path, {"step": step, "samples": samples})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_text(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def finite(value: float) -> float | None:
    """Return the number, or None if it is NaN or infinite, which JSON cannot hold."""
    return float(value) if math.isfinite(value) else None
