"""``python -m bench.gpu.train``: a full training on a GPU, in calls of limited time that resume where the last stopped.

It makes the base policy ``large``, then trains it on long answers with ``python -m python_trainer compare``, with no
accelerator and with all, and writes one JSON record. The folder ``--work-dir`` has all that a later call needs. Exit
code 1 if something failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu.build import Build
from bench.gpu.journal import ROOT, call_facts, record_path
from python_trainer.run.directory import read_metrics
from rlkernels._files import replace_file
from rlkernels.backend import extension_error
from rlkernels.proof.process import AFTER_KILL_S

SETTINGS = ROOT / "bench/gpu/train.yaml"
MIN_POLICY_S = 420.0  # least time to start making the policy
MIN_RUN_S = 60.0  # least time to start a training run
GRACE_S = 60.0  # for the running step and its checkpoint when the time is up
POLL_S = 0.05
FACTS = "pretrain.json"  # in the folder of the policy
# in a dry run
FEW = ("max_steps=3", "rollout.prompts_per_step=4", "rollout.num_generations=2", "rollout.max_completion_length=16",
       "save.save_steps=1", "accelerators.alpha.first_step=2", "accelerators.alpha.track_steps=1",
       "accelerators.rpo.fill=1", "task.variant=short", "task.train_size=8",
       "task.gate_size=8", "task.test_size=8")  # fmt: skip


def run_child(command: Sequence[str], stop_at: float, kill_at: float) -> str:
    """Run Python with SIGTERM and SIGKILL at these times of the monotonic clock; return how it failed, or ""."""
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env={**os.environ, "TOKENIZERS_PARALLELISM": "0"})
    failure = ""
    try:
        while process.poll() is None:
            if time.monotonic() >= kill_at:
                failure = "killed at the end of the budget"
                break
            if not failure and time.monotonic() >= stop_at:
                failure = "stopped by the budget"
                process.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.kill()
        code = process.wait(timeout=AFTER_KILL_S)  # a process that outlives SIGKILL sits in the driver
    return failure or (f"python {' '.join(command[:3])} ended with code {code}" if code else "")


def make_policy(work: Path, device: str, deadline: float) -> dict[str, Any]:
    """Make the base policy unless it is there, and return facts about it; ``failed`` says why there is none."""
    folder = work / "policy"
    if not (folder / FACTS).exists():
        size = "large" if device == "cuda" else "tiny"
        command = ["-m", "tools.policies.sums", "--size", size, "--device", device, "--output", str(folder)]
        if failure := run_child(command, deadline, deadline):
            return {"failed": failure}
    return json.loads((folder / FACTS).read_text())


def figures(folder: Path) -> dict[str, Any]:
    """Return the state of a run: its summary, or the last row of its metrics, and rates."""
    rows = read_metrics(folder)
    steps = [row for row in rows if row["step"] > 0]
    result: dict[str, Any] = {
        "finished": (folder / "summary.json").exists(),
        "steps": steps[-1]["step"] if steps else 0,
    }
    if result["finished"]:
        result["summary"] = json.loads((folder / "summary.json").read_text())
    elif rows:
        result["last_row"] = rows[-1]
    if steps:
        rollout, update = (sum(row.get(f"time/{name}_s", 0.0) for row in steps) for name in ("rollout", "train"))
        generated = sum(row.get("tokens/generated", 0) for row in steps)
        result |= {"generated_tokens": rows[-1]["total/generated_tokens"], "rollout_s": rollout, "update_s": update,
                "rollout_tokens_per_second": generated / max(rollout, 1e-9)}  # fmt: skip
    result["accuracies"] = [[row["step"], row["eval/accuracy"]] for row in rows if "eval/accuracy" in row]
    return result


def show(runs: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("run", "steps", "accuracy", "rollout s", "update s", "tokens", "tokens/s in rollouts", box=None)
    for name, run in runs.items():
        if "rollout_s" in run:
            accuracy = " → ".join(f"{value:.3f}" for _, value in run["accuracies"])
            rates = [f"{run['generated_tokens']:,}", f"{run['rollout_tokens_per_second']:,.0f}"]
            table.add_row(
                name, str(run["steps"]), accuracy, f"{run['rollout_s']:.1f}", f"{run['update_s']:.1f}", *rates
            )
    console.print(table)


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, f"{json.dumps(record, indent=1)}\n".encode())


def work(args: argparse.Namespace, console: Console) -> int:
    deadline = time.monotonic() + args.budget_seconds
    grace = min(GRACE_S, args.budget_seconds / 4)
    facts = call_facts(args.commit)
    path = args.output or record_path(facts, "-train.json")
    settings = [*(FEW if args.device == "cpu" else ()), *args.overrides]
    record: dict[str, Any] = {**facts, "cuda": torch.version.cuda, "settings": settings, "runs": {}, "failed": []}
    if extension_error():
        build = Build("cpu", with_cuda=False)  # training needs the host part
        record["build"] = build.found if build.done(deadline - time.monotonic()) else {"ok": False}
        build.stop()
    folder = args.work_dir.resolve()
    has_policy = (folder / "policy" / FACTS).exists()
    if has_policy or args.device == "cpu" or deadline - time.monotonic() >= MIN_POLICY_S:
        record["policy"] = make_policy(folder, args.device, deadline)
        record["failed"] += ["policy: " + record["policy"]["failed"]] if "failed" in record["policy"] else []
    if (folder / "policy" / FACTS).exists() and deadline - time.monotonic() >= min(MIN_RUN_S, args.budget_seconds / 4):
        settings += [f"model.path={folder / 'policy'}", f"model.device={args.device}"]
        command = ["-m", "python_trainer", "compare", "--config", str(SETTINGS), "--variants", args.variants, "--seeds",
                   "1", "--output-dir", str(folder / "runs"), "--set", *settings]  # fmt: skip
        failure = run_child(command, deadline - grace, deadline)
        record["failed"] += [failure] if failure.startswith("python") else []
    for variant in args.variants.split(","):
        record["runs"][variant] = figures(folder / "runs" / variant / "seed-0")
    record["finished"] = all(run["finished"] for run in record["runs"].values())
    write(path, record)
    show(record["runs"], console)
    console.print(f"record: {path}; {'finished' if record['finished'] else 'the same command goes on'}")
    for line in record["failed"]:
        console.print(f"failed: {line}", highlight=False, markup=False)
    return 1 if record["failed"] else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.train", description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="policy, runs and checkpoints to resume from")
    parser.add_argument("--budget-seconds", type=float, default=540, help="end after this long (default 540)")
    parser.add_argument("--output", type=Path, help="the record (default bench/gpu/records/DEVICE-COMMIT-train.json)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, about a minute")
    parser.add_argument("--variants", default="baseline,all", metavar="A,B,...", help="runs, in this order")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
                        help="change settings of bench/gpu/train.yaml")  # fmt: skip
    parser.add_argument("--commit", help="name of the commit in the record, without a git repository")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --device cpu is a dry run")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    return work(args, Console(width=None if sys.stdout.isatty() else 120))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the running child, too
    raise SystemExit(main())
