"""Lossless deltas of weights, between the steps of real runs of SmolLM2-135M.

Mean bytes and median seconds of the steps of a run, at three learning rates, for exports of the same steps in bfloat16
and float32. Reads runs/smollm2 (``python tools/smollm2.py runs/smollm2``), or the folder in RLKERNELS_SMOLLM2. The
limits are a read of both versions, and a read and a write of the weights.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench import Measurement, Row, copy_bandwidth, read_bandwidth
from bench._runner import reset_resident_peak, resident_peak
from python_trainer.model.weights import checkpoint_weights
from rlkernels import weights

ROOT = Path(__file__).parents[1]
RATES = (1e-6, 1e-5, 1e-4)
STEPS = 20
SETTINGS = [
    "model.device=cpu", "model.dtype=float32", "optimizer.warmup_steps=0", "optimizer.lr_scheduler_type=constant",
    "rollout.prompts_per_step=6", "rollout.num_generations=6", "rollout.max_completion_length=24",
    "evaluation.eval_steps=0", "task.test_size=1", "save.save_steps=0",
]  # fmt: skip
Weights = dict[str, torch.Tensor]


@dataclass
class Figures:
    """Figures of one way to send the weights, for each step."""

    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)  # of weights that were received

    def measure(self, call: Callable[[], Any]) -> Any:
        """Call a function, and record its seconds and peak memory."""
        resident_bytes = reset_resident_peak()
        start = time.perf_counter()
        result = call()
        self.seconds.append(time.perf_counter() - start)
        if resident_bytes is not None:
            self.peaks.append(resident_peak() - resident_bytes)
        return result


def index_and_value(new: Weights, old: Weights) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return index and new value of every changed weight."""
    changes = {}
    for name, weight in new.items():
        indices = (weight.view(-1) != old[name].view(-1)).nonzero()[:, 0].int()
        changes[name] = indices, weight.view(-1)[indices]
    return changes


class Sender:
    """Send the weights of every step in all ways, in one dtype, and record the figures of each."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.old = Weights()
        self.nbytes = 0
        self.figures = {name: Figures() for name in ("encode", "apply_", "index and value", "whole weights, copied")}

    def __call__(self, exported: Weights) -> None:
        new = {name: weight.to(self.dtype, copy=True) for name, weight in exported.items()}
        old, self.old = self.old, new
        self.nbytes = sum(weight.nbytes for weight in new.values())
        if not old:
            return
        encode, apply_, pairs, copies = self.figures.values()
        delta = encode.measure(lambda: weights.encode(new, old))
        changes = pairs.measure(lambda: index_and_value(new, old))
        copies.measure(lambda: {name: weight.clone() for name, weight in new.items()})
        apply_.measure(lambda: weights.apply_(old, delta))
        apply_.exact.append(all(torch.equal(old[n].view(torch.uint8), new[n].view(torch.uint8)) for n in new))
        encode.sizes.append(len(delta))
        apply_.sizes.append(len(delta))
        pairs.sizes.append(sum(indices.nbytes + values.nbytes for indices, values in changes.values()))
        copies.sizes.append(self.nbytes)

    def rows(self, shape: str) -> Iterator[Row]:
        """Give a row for each way."""
        for name, figures in self.figures.items():
            only_reads = name in ("encode", "index and value")
            limit_s = 2 * self.nbytes / (read_bandwidth() if only_reads else copy_bandwidth())
            row = Row("weight delta", name, shape, str(self.dtype).removeprefix("torch.")).timed(figures.seconds)
            row.peak_bytes = max(figures.peaks, default=None)
            if figures.exact:
                row.match = "exact" if all(figures.exact) else "differs"
            row.limit = "memory bandwidth"
            row.of_limit = limit_s / median(figures.seconds)
            size = fmean(figures.sizes)
            row.extra = f"{size / 1e6:.2f} MB a step, {self.nbytes / size:.1f}x"
            yield row


def train(source: str, options: list[str], receive: Callable[[Weights], None]) -> None:
    """Train with these settings, and pass the weights before the first step and after every step to ``receive``."""
    from rich.console import Console

    from python_trainer import Callback, Trainer, load_config

    class Show(Callback):
        def on_step(self, trainer: Any, step: int, metrics: Any) -> None:
            receive(dict(checkpoint_weights(trainer.policy.inference_model)))

    sys.path.append(str(ROOT / "examples"))  # has the task
    with TemporaryDirectory() as folder:
        trainer = Trainer(load_config(source, options), folder, console=Console(quiet=True), callbacks=[Show()])
        receive(dict(checkpoint_weights(trainer.policy.inference_model)))
        trainer.run()


def rows(source: str, options: list[str], shape: str) -> Iterator[Row]:
    """Give the rows of a run in both dtypes."""
    senders = [Sender(dtype) for dtype in (torch.bfloat16, torch.float32)]

    def send(exported: Weights) -> None:
        for sender in senders:
            sender(exported)

    train(source, options, send)
    for sender in senders:
        yield from sender.rows(shape)


def cases(quick: bool) -> Iterator[Measurement]:
    model = os.environ.get("RLKERNELS_SMOLLM2", "runs/smollm2")
    if not quick and not Path(model, "config.json").is_file():
        reason = f"{model} is not there; python tools/smollm2.py runs/smollm2"
        yield Measurement.missing(Row("weight delta", "encode", "SmolLM2-135M", missing=reason))
        return
    source = "smoke" if quick else str(ROOT / "examples" / "sentences.yaml")
    options = [*SETTINGS] if quick else [*SETTINGS, f"model.path={model}"]
    steps = 2 if quick else STEPS
    for rate in RATES[-1:] if quick else RATES:
        shape = f"{'shipped policy' if quick else 'SmolLM2-135M'}, rate {rate:g}, {steps} steps"
        run = [*options, f"optimizer.learning_rate={rate}", f"max_steps={steps}"]
        yield Measurement([shape], partial(rows, source, run, shape))
