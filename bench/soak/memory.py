"""Resident memory of one long run, read from outside after every step, and how fast it grows."""

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bench.faults.case import VARIANTS
from bench.faults.training import Training, make_inputs, write_settings

CHOICES = [name for name, values in VARIANTS.items() if "parallel" not in values and "rollout" not in values]
WARM_UP = 0.2  # of the steps: caches fill
BLOCKS = 40  # of neighbouring steps; their means are nearly independent
FLAT = 1024  # bytes a step that would be no leak to speak of: 1 GB in a million steps


def run(args: argparse.Namespace) -> dict[str, Any]:
    root = args.work_dir.resolve() / "memory"
    shutil.rmtree(root, ignore_errors=True)
    make_inputs(root)
    changes = {
        **VARIANTS[args.variant],
        "max_steps": args.steps,
        "optimizer": {"learning_rate": 1e-5},
        "evaluation": {"eval_steps": max(args.steps // 10, 1)},
        "save": {"save_steps": 100},
    }
    training = Training(write_settings(root, root / "run.yaml", changes), root / "run")
    seen = watch(training)
    ended = training.end()
    problems = [] if ended.code == 0 and not ended.left else [f"ended with {ended.code} {ended.left}: {ended.line}"]
    sampled = [(step, size) for step, size in seen if step >= WARM_UP * args.steps]
    slope, low, high = growth(sampled)
    if low > FLAT:
        problems.append(f"it grows by {slope:,.0f} bytes a step")
    first, last = (np.mean([size for _, size in part]) / 2**20 for part in (sampled[:20], sampled[-20:]))
    said = f"{slope:+,.0f} bytes a step (95 %: {low:+,.0f} to {high:+,.0f}); {first:.1f} MB, at the end {last:.1f} MB"
    return {"what": f"memory of {args.steps:,} steps, {args.variant}", "found": said, "problems": problems,
            "slope": slope, "interval": [low, high], "samples": len(sampled)}  # fmt: skip


def watch(training: Training) -> list[tuple[int, int]]:
    """(step, bytes) as steps end, while it runs."""
    rows, seen, done = training.folder / "metrics.jsonl", list[tuple[int, int]](), 0
    offset = 0
    while training.alive():
        time.sleep(0.02)
        if not rows.exists():
            continue
        with rows.open("rb") as file:
            file.seek(offset)
            new = file.read()
        offset += len(new)
        if count := new.count(b"\n"):
            done += count
            size = resident(training.pids[0])
            if size:
                seen.append((done - 1, size))
    return seen


def resident(pid: int) -> int:
    """Bytes; 0 where the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def growth(seen: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Bytes a step: least squares over the means of BLOCKS neighbours, and its 95 % interval."""
    steps, sizes = (np.array([np.mean(part) for part in np.array_split(column, BLOCKS)]) for column in zip(*seen))
    fit = stats.linregress(steps, sizes)
    reach = stats.t.ppf(0.975, BLOCKS - 2) * fit.stderr
    return float(fit.slope), float(fit.slope - reach), float(fit.slope + reach)
