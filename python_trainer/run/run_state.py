"""How far a run has come, where its time went, and its summary."""

import platform
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import InitVar, asdict, dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

import torch
import transformers
from pydantic import ConfigDict, Field, FiniteFloat

import rlkernels
from python_trainer.run.directory import ENDS, Count, on_all_prompts

# generated; of prompts and prefixes computed; of those taken from the KV cache instead; in forward-backward passes
TOKENS = ("generated_tokens", "prefill_tokens", "cached_tokens", "trained_tokens")


@dataclass
class RunState:
    """Progress of a run, and its clock. Every checkpoint holds the fields, which pydantic checks when it is loaded.

    Interruptions do not count as time.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count = 0
    prompts: Count = 0  # drawn so far
    policy_version: Count = 0  # of the engine
    wall_s: FiniteFloat = 0.0  # at the newest checkpoint
    seconds: dict[str, FiniteFloat] = field(default_factory=dict)  # by part of the loop
    counts: dict[str, Count] = field(default_factory=dict)  # of TOKENS
    # [step, eval/accuracy, eval/reward]
    evaluations: list[Annotated[list[float], Field(min_length=3, max_length=3)]] = field(default_factory=list)
    # [digest of what they ask, number of prompts in all of them, digests of evaluation.sets by name]
    evaluated: list[Any] = field(default_factory=list)
    # [training seconds, generated tokens] before each evaluation
    costs: list[Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # all metrics of the evaluations start and final
    id: str = field(default_factory=lambda: token_hex(8))  # by which experiment trackers know the run
    judged: bool = True  # False once a reward has shown that answers of this task are not simply right or wrong

    timer: InitVar[Callable[[], float]] = time.perf_counter

    def __post_init__(self, timer: Callable[[], float]) -> None:
        self._timer = timer
        self._inner = [0.0]  # seconds of nested stretches, by level
        self.start_clock()

    def load(self, saved: "RunState") -> None:
        """Take the fields of a state that a checkpoint holds."""
        for name, value in asdict(saved).items():
            setattr(self, name, value)

    def copy(self) -> "RunState":
        """Return a state with copies of the fields, without the timer, which may belong to a callback."""
        return RunState(**asdict(self))

    def start_clock(self) -> None:
        """Let the wall time go on from that of the newest checkpoint."""
        self._began = self._timer() - self.wall_s

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time within it for ``name``. Nested stretches count for the inner name only."""
        start = self._timer()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = self._timer() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
            self._inner[-1] += spent

    @property
    def wall_seconds(self) -> float:
        """Return the seconds since training began, without loading the model."""
        return self._timer() - self._began

    @property
    def training_seconds(self) -> float:
        """Return the wall time without evaluations."""
        return self.wall_seconds - self.seconds.get("eval", 0.0)

    def count(self, name: str, amount: float) -> None:
        self.counts[name] = self.counts.get(name, 0) + int(amount)

    def metrics_since(self, earlier: "RunState") -> dict[str, float]:
        """Return seconds and tokens since an ``earlier`` state of the run.

        The rates are those of training: evaluations and saving, which comes after a row is written, do not count.
        """
        spent = {name: seconds - earlier.seconds.get(name, 0.0) for name, seconds in self.seconds.items()}
        training = sum(spent.values()) - spent.get("eval", 0.0) - spent.get("checkpoint", 0.0)
        tokens = {name: count - earlier.counts.get(name, 0) for name, count in self.counts.items()}
        generated = tokens["generated_tokens"]
        return {
            **{f"tokens/{name.removesuffix('_tokens')}": count for name, count in tokens.items()},
            "tokens_per_second": generated / max(training, 1e-9),
            "rollout_tokens_per_second": generated / max(spent["rollout"], 1e-9),
            **{f"time/{name}_s": seconds for name, seconds in spent.items()},
        }


def best_evaluated(state: RunState, steps: Collection[int]) -> int | None:
    """Return the step out of ``steps`` with the best evaluation, the later of equals; None if none was evaluated.

    All evaluations count the same prompts. The accuracy decides, or the reward if nothing is right or wrong.
    """
    rows = [(row[1 if state.judged else 2], int(row[0])) for row in state.evaluations if row[0] in steps]
    return max(rows)[1] if rows else None


def summarise(state: RunState, target: float | None, device: torch.device) -> dict[str, Any]:
    """Return the main part of summary.json.

    ``wall_s`` covers everything from the first evaluation to the last; ``training_s`` is the same without
    evaluations, whose time is ``eval_s``. Token counts leave evaluations out. ``eval_accuracy_start`` and ``_final``
    cover all test prompts. ``seconds_to_target`` is on the clock of ``training_s``, until the first evaluation whose
    ``eval/accuracy`` is at least ``target``: the accuracy on the prompts that every evaluation answers.
    """
    prefix = "accelerator/"
    seconds = state.seconds
    wall_s = state.wall_seconds
    accuracies = (row[1] for row in state.evaluations)
    reached = (cost for accuracy, cost in zip(accuracies, state.costs) if target is not None and accuracy >= target)
    seconds_to_target, tokens_to_target = next(reached, (None, None))
    return {
        "steps": state.step,
        "wall_s": wall_s,
        "training_s": wall_s - seconds.get("eval", 0.0),
        **{f"{part}_s": seconds.get(part, 0.0) for part in ("rollout", "train", "reward", "eval", "checkpoint")},
        "accelerator_s": {name.removeprefix(prefix): s for name, s in seconds.items() if name.startswith(prefix)},
        **{name: state.counts.get(name, 0) for name in TOKENS},
        **{f"eval_accuracy_{name}": on_all_prompts(state.results.get(name, {}), "accuracy") for name in ENDS},
        "evaluation": state.results,
        "target_accuracy": target,
        "seconds_to_target": seconds_to_target,
        "tokens_to_target": tokens_to_target,
        "device": device_name(device),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that decide what a run computes."""
    modules = {"rlkernels": rlkernels, "torch": torch, "transformers": transformers}
    return {"python": platform.python_version()} | {name: module.__version__ for name, module in modules.items()}


def device_name(device: torch.device) -> str:
    """Return ``cuda: NVIDIA ...`` or ``cpu: model name, n threads``."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"cpu: {name}, {torch.get_num_threads()} threads"
