"""Where the seconds of a training step go: generation and update by operation, and the least the products need.

    python -m bench.studies profile

Runs the shipped task without accelerators (``--accelerators all`` or names), lets the first steps pass unmeasured, and
traces the steps after them with torch's profiler, on one thread. Tracing itself costs some per cent. The least time of
the matrix products is their operations over the rate that this machine reaches on large ones of the same precision.
Prints the table and writes it to bench/studies/results/profile_ACCELERATORS.md.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function

from bench import _limits
from bench._markdown import table_lines
from bench._runner import commit, cpu_model
from bench.studies.together import enabled
from python_trainer.config import Config, load_config
from python_trainer.data import Request, Rollout
from python_trainer.files import write_text
from python_trainer.run import Trainer

CONFIG = "configs/arithmetic.yaml"
PARTS = ("generation", "update")
OTHER = "other tensor operations"
# what an operation's name begins with -> its row; the first that fits
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "mkldnn::",
                        "aten::mkldnn"),
    "attention": ("rlkernels::paged", "rlkernels::shared_prefix", "rlkernels::grouped", "rlkernels::merge",
                  "rlkernels::write_kv", "aten::scaled_dot", "aten::_scaled_dot", "aten::_flash"),
    "norms, rotary, SwiGLU": ("rlkernels::add_rms", "rlkernels::rms", "rlkernels::rope", "rlkernels::silu_mul"),
    "sampling, log-probabilities": ("rlkernels::sample", "rlkernels::verify", "rlkernels::keyed",
                                    "rlkernels::token_log", "rlkernels::linear_token", "aten::log_softmax",
                                    "aten::_log_softmax"),
    "rank-1 tracking": ("rlkernels::top1", "rlkernels::delta"),
    "optimizer": ("Optimizer.step", "aten::_fused_adamw", "aten::_foreach"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--accelerators", default="baseline", help="as a variant of together: rhyme+drafts, all, ...")
    parser.add_argument("--skip", type=int, default=20, help="steps that are not measured (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--steps", type=int, default=4, help="steps that are (default: %(default)s)")


def kind_of(name: str) -> str:
    """The row of an operation."""
    return next((kind for kind, starts in KINDS.items() if name.startswith(starts)), OTHER)


class Traced(Trainer):
    """Adds up what the operations of generation and update take themselves, from a step on."""

    def __init__(self, config: Config, folder: Path, skip: int):
        super().__init__(config, folder, console=Console(quiet=True))
        self.skip = skip
        self.seconds: dict[str, dict[str, float]] = {part: defaultdict(float) for part in PARTS}
        self.flops = dict.fromkeys(PARTS, 0.0)

    def generate(self, requests: Sequence[Request], seed: int) -> list[Rollout]:
        return self._trace("generation", lambda: super(Traced, self).generate(requests, seed))

    def update(self, rollouts: list[Rollout], number: int) -> dict[str, float]:
        return self._trace("update", lambda: super(Traced, self).update(rollouts, number))

    def _trace(self, part: str, call: Callable[[], Any]) -> Any:
        if self.state.step < self.skip:
            return call()
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as found, record_function("all"):
            out = call()
        for event in found.key_averages():
            kind = "Python" if event.key == "all" else kind_of(event.key)  # what no operation accounts for
            self.seconds[part][kind] += event.self_cpu_time_total / 1e6
            self.flops[part] += event.flops
        return out


def settings(args: argparse.Namespace) -> Config:
    return load_config(CONFIG, [
        f"accelerators.enabled=[{', '.join(enabled(args.accelerators))}]", "evaluation.eval_steps=0",
        "evaluation.eval_limit=64", "save.save_steps=0", "save.save_model=false", f"max_steps={args.skip + args.steps}",
    ])  # fmt: skip


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Traced(settings(args), Path(folder) / "run", args.skip)
        trainer.run()
    text = "\n".join(report(trainer, args)) + "\n"
    print(text, end="")
    args.results.mkdir(parents=True, exist_ok=True)
    write_text(args.results / f"profile_{args.accelerators}.md", text)


def report(trainer: Traced, args: argparse.Namespace) -> list[str]:
    """The table: milliseconds of a step and shares."""
    rate = _limits.matmul_rate(torch.bfloat16, 2048, "cpu")
    totals = {part: sum(trainer.seconds[part].values()) for part in PARTS}

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds / args.steps:.0f} ms"

    rows = [
        [kind, *(f"{milliseconds(trainer.seconds[part][kind])} ({trainer.seconds[part][kind] / totals[part]:.0%})"
                 for part in PARTS)]
        for kind in [*KINDS, OTHER, "Python"] if any(trainer.seconds[part][kind] for part in PARTS)
    ]  # fmt: skip
    rows.append(["all", *(milliseconds(totals[part]) for part in PARTS)])
    rows.append(["least time of the products", *(milliseconds(trainer.flops[part] / rate) for part in PARTS)])
    head = [f"{args.accelerators}, steps {args.skip + 1} to {args.skip + args.steps}", *PARTS]
    note = f"{cpu_model()}, 1 thread, torch {torch.__version__}, commit {commit()}; products {rate / 1e9:.0f} GFLOP/s."
    return [note, "", *table_lines(head, rows)]
