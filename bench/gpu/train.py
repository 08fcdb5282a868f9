"""``python -m bench.gpu.train``: a full training on a GPU, in calls of limited time that go on where the last stopped.

Makes the base policy ``large``, then trains it on long answers with each accelerator, all and none, and writes one
JSON record. Everything to go on from lies in the folder ``--work-dir``. Exit code 1 when something failed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import _runner
from bench.gpu.build import Build
from bench.gpu.journal import ROOT, call_facts, record_path
from bench.gpu.process import AFTER_KILL_S
from bench.gpu.proven import passed, read_record
from bench.gpu.record import Record
from bench.gpu.subjects import SUBJECTS, Scale, Subject, choose
from bench.gpu.trainee import FACTS, STOPPED
from python_trainer.checkpoint import list_checkpoints, step_of
from python_trainer.compare import enabled_in, finished
from python_trainer.config import Config, check_config, load_config
from python_trainer.errors import UserError
from python_trainer.run_directory import read_metrics
from python_trainer.run_state import versions
from rlkernels import backend as backends

VARIANTS = ("baseline", "all", "rpo", "drafts", "rhyme", "alpha")  # the most telling first
PARTS = "parts.json"  # of a run: what each process that worked on it did
POLL_S = 0.05
MOST_FAILURES = 2  # of a run; the second is without proven backends
PATIENCE_S = 240.0  # without a step, after which a run hangs; what comes before the first is the longest
HUNG = "killed because no step came"
now = time.monotonic  # the clock of the budget


def child(command: Sequence[str], stop_at: float, kill_at: float, watched: Path | None = None) -> tuple[int, str]:
    """Runs Python with these arguments; SIGTERM and SIGKILL at these times of ``now`` -> (exit code, how it ended).

    It is also killed where ``watched`` is a file that has not changed for too long.
    """
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env)
    ended, changed, seen = "", now(), None
    try:
        while process.poll() is None:
            stamp = watched.stat().st_mtime_ns if watched is not None and watched.exists() else None
            if stamp != seen:
                changed, seen = now(), stamp
            hangs = watched is not None and now() - changed >= PATIENCE_S
            if hangs or now() >= kill_at:
                ended = f"{HUNG}, for {PATIENCE_S:.0f} s" if hangs else "killed at the end of the budget"
                process.kill()
                break
            if not ended and now() >= stop_at:
                ended = "stopped by the budget"
                process.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.kill()
        code = process.wait(timeout=AFTER_KILL_S)  # what outlives SIGKILL sits in the driver: nothing else would run
    return code, ended


def make_policy(subject: Subject, work: Path, settings: Sequence[str], deadline: float) -> dict[str, Any]:
    """Makes the base policy where there is none yet -> what was found of it; ``failed`` says why there is none."""
    folder, aside = work / "policy", work / ".policy.tmp"
    if not (folder / subject.facts).exists():
        shutil.rmtree(aside, ignore_errors=True)
        command = subject.maker(aside, [*settings])
        code, ended = child(command, deadline, deadline, aside / subject.watched if subject.watched else None)
        if code:
            return {"failed": ended or f"python {' '.join(command[:3])} ended with code {code}"}
        aside.replace(folder)
    return json.loads((folder / subject.facts).read_text())


def variant_config(base: Config, variant: str, policy: Path, device: str) -> Config:
    values = base.model_dump(mode="json")
    values["model"] |= {"path": str(policy.resolve()), "device": device}
    values["accelerators"]["enabled"] = enabled_in(variant)
    return check_config(values, source=f"variant {variant}")


def check_same(folder: Path, wanted: Config) -> None:
    """Raises UserError where the folder holds a run with other settings; the policy may lie elsewhere by now."""
    path = folder / "config.yaml"
    if path.exists():
        found = load_config(path)
        found.model.path = wanted.model.path
        if found != wanted:
            raise UserError(f"{folder} holds a run with other settings: choose another --work-dir, or remove it")


def read_parts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / PARTS).read_text()) if (folder / PARTS).exists() else []


def run_variant(config: Config, folder: Path, label: str, proven: dict[str, Any], commit: str, stop_at: float,
                kill_at: float) -> dict[str, Any]:  # fmt: skip
    """Trains, or goes on, in a process of its own -> what that did, which is also noted in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).unlink(missing_ok=True)
    job = {"config": config.model_dump(mode="json"), "folder": str(folder), "label": label, "proven": proven}
    start, date, saved = now(), _runner.stamp()["date"], [-1, *map(step_of, list_checkpoints(folder / "checkpoints"))]
    code, ended = child(["-m", "bench.gpu.trainee", json.dumps(job)], stop_at, kill_at, folder / "metrics.jsonl")
    how = {0: "finished", STOPPED: "stopped by the budget"}.get(code, ended or "failed")
    part = {"end": how, "date": date, "commit": commit, "seconds": round(now() - start, 1)}
    steps = [row["step"] for row in read_metrics(folder)]
    idle = max(steps, default=-1) <= saved[-1] and part["seconds"] >= PATIENCE_S  # less says nothing about the run
    if how.startswith(HUNG) or (how.startswith("killed") and idle):
        part |= {"end": "failed", "message": how}
    elif (folder / FACTS).exists():
        part |= json.loads((folder / FACTS).read_text())
    elif how == "failed":
        part["message"] = f"the process died with code {code}"
    (folder / PARTS).write_text(json.dumps([*read_parts(folder), part], indent=1) + "\n")
    return part


def failures(folder: Path) -> int:
    return sum(part["end"] == "failed" for part in read_parts(folder))


def train(config: Config, folder: Path, label: str, proven: dict[str, Any], commit: str, deadline: float, scale: Scale
          ) -> bool:  # fmt: skip
    """One variant as far as the time reaches; after a failure once more, without proven backends -> finished."""
    while not finished(folder) and failures(folder) < MOST_FAILURES and deadline - now() >= scale.run_s:
        trusted = {} if failures(folder) else proven
        part = run_variant(config, folder, label, trusted, commit, deadline - scale.grace_s, deadline)
        if part["end"] != "failed":
            break
    return finished(folder)


def warm_up(config: Config, proven: dict[str, Any], commit: str, deadline: float, scale: Scale) -> None:
    """One step of the first run, once on a machine: the first run should not pay for compiling Triton's kernels."""
    marker = Path(tempfile.gettempdir()) / f"rlkernels-warm-{commit}-{os.getuid()}"
    if proven and not marker.exists() and deadline - now() >= 2 * scale.run_s:
        values = config.model_dump(mode="json")
        values["max_steps"], values["evaluation"]["eval_limit"] = 1, 8
        with tempfile.TemporaryDirectory() as aside:
            run_variant(check_config(values, source="the warm-up"), Path(aside) / "run", "warm-up", proven, commit,
                        deadline - scale.grace_s, deadline)  # fmt: skip
        marker.touch()


def figures(folder: Path) -> dict[str, Any]:
    """What a run has come to: its summary, or the last row of its metrics; its parts; rates."""
    parts, rows = read_parts(folder), read_metrics(folder)
    steps = [row for row in rows if row["step"] > 0]
    out: dict[str, Any] = {"finished": finished(folder), "steps": steps[-1]["step"] if steps else 0, "parts": parts}
    if out["finished"]:
        out["summary"] = json.loads((folder / "summary.json").read_text())
    elif rows:
        out["last_row"] = rows[-1]
    totals = {name: sum(row.get(f"time/{name}_s", 0.0) for row in steps) for name in ("rollout", "train")}
    # answers outside of steps, such as those that rpo begins with, are in the first two only
    tokens, training = (rows[-1][key] if rows else 0 for key in ("total/generated_tokens", "time/training_s"))
    in_steps = sum(row.get("tokens/generated", 0) for row in steps)
    if steps:
        out |= {"generated_tokens": tokens, "training_s": training}
        out |= {f"{name}_s": seconds for name, seconds in totals.items()}
        out["tokens_per_second"] = tokens / max(training, 1e-9)
        out["rollout_tokens_per_second"] = in_steps / max(totals["rollout"], 1e-9)
        out["rollout_share"] = totals["rollout"] / max(training, 1e-9)
    out["accuracies"] = [[row["step"], row["eval/accuracy"]] for row in rows if "eval/accuracy" in row]
    peaks = [part["peak_gpu_bytes"] for part in parts if "peak_gpu_bytes" in part]
    return out | ({"peak_gpu_bytes": max(peaks)} if peaks else {})


def show(runs: dict[str, dict[str, Any]], console: Console) -> None:
    columns = ("steps", "accuracy", "training s", "rollout s", "update s", "tokens", "tokens/s in rollouts")
    table = Table("run", *columns, box=None)
    for name, run in runs.items():
        if "rollout_s" in run:
            accuracy = " → ".join(f"{value:.3f}" for _, value in run["accuracies"])
            seconds = [f"{run[key]:.1f}" for key in ("training_s", "rollout_s", "train_s")]
            rates = [f"{run['generated_tokens']:,}", f"{run['rollout_tokens_per_second']:,.0f}"]
            table.add_row(name, str(run["steps"]), accuracy, *seconds, *rates)
    console.print(table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.train", description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="what was made so far, and what to go on from")
    parser.add_argument("--budget-seconds", type=float, default=540, help="end after this long (default 540)")
    parser.add_argument("--output", type=Path, help="the record (default bench/gpu/records/DEVICE-COMMIT-SUBJECT.json)")
    parser.add_argument("--checks", type=Path, metavar="RECORD",
                        help="what passed (default bench/gpu/records/DEVICE-COMMIT.jsonl)")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, about a minute")
    parser.add_argument("--subject", choices=SUBJECTS, default="sums", help="what is trained (default sums)")
    parser.add_argument("--weights", type=Path, metavar="FOLDER",
                        help="of gsm8k: the model, or pieces of its GGUF file")  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="of gsm8k: train.jsonl and test.jsonl")
    parser.add_argument("--variants", default=",".join(VARIANTS), metavar="A,B,...", help="runs, in this order")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
                        help="change settings of the subject, in bench/gpu")  # fmt: skip
    parser.add_argument("--commit", help="what the record names where there is no git repository")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --device cpu is a dry run")
    if args.checks is not None and not args.checks.is_file():
        parser.error(f"--checks: there is no file {args.checks}")
    return args


def trusted_backends(path: Path, device: str, commit: str, console: Console) -> dict[str, Any]:
    """What passed its checks on this device at this commit; nothing where there is no record of them."""
    if not path.is_file():
        console.print(f"[yellow]no record {path}: plain torch everywhere; run python -m bench.gpu first[/yellow]")
        return {}
    try:
        found = passed(read_record(path, device, commit))
    except ValueError as error:
        raise UserError(f"--checks: {error}") from error
    console.print(f"right, and quicker than all else: {found}", highlight=False)
    return {op: list(names) for op, names in found.items()}


def work(args: argparse.Namespace, console: Console) -> int:
    deadline = now() + args.budget_seconds
    subject = choose(args)
    scale = subject.cuda if args.device == "cuda" else subject.cpu
    grace = min(scale.grace_s, args.budget_seconds / 4)
    scale = replace(scale, grace_s=grace)
    facts = call_facts(args.commit)
    device = facts["gpu"] or "cpu"
    folder = args.work_dir.resolve()
    settings = [*subject.given(), *scale.settings, *args.overrides]
    base, made = load_config(subject.settings, settings), folder / "policy" / subject.facts
    plans = {v: variant_config(base, v, subject.policy(made.parent), args.device) for v in args.variants.split(",")}
    for variant, config in plans.items():
        check_same(folder / "runs" / variant, config)
    proven = trusted_backends(args.checks or record_path(facts), device, facts["commit"], console)
    triton = version("triton") if find_spec("triton") else None
    record = Record(
        args.output or record_path(facts, subject.ending), **facts, device=device,
        versions={**versions(), "cuda": torch.version.cuda, "triton": triton}, settings=base.model_dump(mode="json"),
        proven=proven, policy={}, runs={}, left_out=[], failed=[],
    )  # fmt: skip
    console.print(f"record: {record.path}; budget: {args.budget_seconds:.0f} s", highlight=False)
    if backends.extension_error():
        # of the extension, training needs the host part
        build = Build("cpu", with_cuda=False)
        record.data["build"] = build.found if build.done(deadline - now()) else {"ok": False, "log": "not done in time"}
        build.stop()
        record.save()

    left_out, failed = record.data["left_out"], record.data["failed"]
    if not made.exists() and deadline - now() < scale.policy_s:
        left_out.append("policy")
    else:
        record.data["policy"] = make_policy(subject, folder, settings, deadline)
        if "failed" in record.data["policy"]:
            failed.append("policy")
    record.save()
    ready = made.exists()
    if ready and any(not finished(folder / "runs" / variant) for variant in plans):
        warm_up(next(iter(plans.values())), proven, facts["commit"], deadline, scale)
    hopeless = 0  # runs that never came to a step: the next would not either
    for number, (variant, config) in enumerate(plans.items()):
        run, label = folder / "runs" / variant, f"{variant} (run {number + 1} of {len(plans)})"
        begin = ready and hopeless < 2
        if not (begin and train(config, run, label, proven, facts["commit"], deadline, scale)):
            (failed if failures(run) >= MOST_FAILURES else left_out).append(variant)
            hopeless += failures(run) >= MOST_FAILURES and not read_metrics(run)
        record.data["runs"][variant] = figures(run)
        record.save()
    record.data["finished"] = not left_out and not failed
    record.save()
    show(record.data["runs"], console)
    for line in [*(f"failed: {x}" for x in failed), *(f"left out: {x}" for x in left_out)]:
        console.print(line, highlight=False)
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code; 2 after one line on what the user can fix."""
    args = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        args.work_dir.mkdir(parents=True, exist_ok=True)
        return work(args, console)
    except (UserError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the run that is under way, too
    raise SystemExit(main())
