"""How far a run has come, where its time went, and what it says about itself at the end."""

import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# generated; of prompts and prefixes computed; of those taken from the KV cache instead; in forward-backward passes
TOKENS = ("generated_tokens", "prefill_tokens", "cached_tokens", "trained_tokens")


@dataclass
class RunState:
    """What a run has done so far; saved with every checkpoint."""

    step: int = 0
    prompts: int = 0  # drawn so far
    policy_version: int = 0  # of the engine
    wall_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # by part of the loop
    counts: dict[str, int] = field(default_factory=dict)  # of TOKENS
    evaluations: list[list[float]] = field(default_factory=list)  # [step, accuracy, by what the best is found]
    results: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # all metrics of the one at the start, at the end
    judged: bool = True  # no reward has shown yet that the task has no right and wrong
    target: float | None = None  # accuracy that the next two are about
    seconds_to_target: float | None = None
    tokens_to_target: int | None = None

    def count(self, name: str, amount: float) -> None:
        self.counts[name] = self.counts.get(name, 0) + int(amount)


def best_evaluated(evaluations: Sequence[Sequence[float]], steps: Collection[int]) -> int | None:
    """Of these steps the one whose evaluation was best, the later of equals; None where none was evaluated."""
    rows = [(row[-1], int(row[0])) for row in evaluations if row[0] in steps]
    return max(rows)[1] if rows else None


class Clock:
    """Seconds by name. Nested stretches count for the inner name only. ``timer`` tells the time."""

    def __init__(self, seconds: dict[str, float] | None = None, timer: Callable[[], float] = time.perf_counter):
        self.seconds: dict[str, float] = dict(seconds or {})
        self._timer = timer
        self._inner = [0.0]

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = self._timer()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = self._timer() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
            self._inner[-1] += spent


def summarise(state: RunState, seconds: Mapping[str, float], *, wall_s: float) -> dict[str, Any]:
    """The main part of summary.json.

    ``wall_s`` covers everything from the first evaluation to the last; ``training_s`` is the same without
    evaluations, whose time is ``eval_s``. Token counts leave evaluations out. ``seconds_to_target`` is on the clock
    of ``training_s``.
    """
    prefix = "accelerator/"
    accuracies = [row[1] for row in state.evaluations]
    return {
        "steps": state.step,
        "wall_s": wall_s,
        "training_s": wall_s - seconds.get("eval", 0.0),
        **{f"{part}_s": seconds.get(part, 0.0) for part in ("rollout", "train", "reward", "eval", "checkpoint")},
        "accelerator_s": {name.removeprefix(prefix): s for name, s in seconds.items() if name.startswith(prefix)},
        **{name: state.counts.get(name, 0) for name in TOKENS},
        "eval_accuracy_start": accuracies[0] if accuracies else None,
        "eval_accuracy_final": accuracies[-1] if accuracies else None,
        "evaluation": state.results,
        "seconds_to_target": state.seconds_to_target,
        "tokens_to_target": state.tokens_to_target,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """What ran."""
    found = {"python": platform.python_version()}
    for name in ("rlkernels", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that was built in place
            found[name] = __import__(name).__version__
    return found


def device_name(device: torch.device) -> str:
    """``cuda: NVIDIA ...`` or ``cpu: model name, n threads``."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"cpu: {name}, {torch.get_num_threads()} threads"
