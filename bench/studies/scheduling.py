"""Scheduling of rollouts over workers: how well lengths are predicted, and what balancing by them saves.

    RLKERNELS_GSM8K_DIR=... python -m bench.studies scheduling --output-dir runs/studies/scheduling

1. Lengths: a training run on the long arithmetic task (5 visits to 128 prompts), and four models' answers to the test
   questions of GSM8K as four visits; rank correlation of what LengthHistory expects with what comes.
2. Measured: the policy `main` answers prompts with 1, 2 and 4 worker processes of one thread, in turn and scheduled,
   with drafts too. CPU seconds of every worker, so that other programs and missing cores count little; a step takes as
   long as its slowest worker.
3. A cost model, fitted to half of the measured steps and checked on the other half by simulating those from the lengths
   of their answers alone; then simulations of up to 64 workers.

What is finished is kept. Writes bench/studies/results/scheduling.md and .json.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import kendalltau, spearmanr

from bench._case import Missing
from bench.studies.scheduling_report import write
from python_trainer.keyed import keyed_seed
from python_trainer.rollout import Request, SamplingParams
from python_trainer.rollout.ordering import LengthHistory, remember

TRACE = [
    "task.train_size=128", "max_steps=40", "optimizer.learning_rate=2e-4", "save.save_model=false",
    "evaluation.eval_limit=1",
]  # fmt: skip
WORKLOADS = {"long": 16, "long and short": 32}  # prompts of a step
SAMPLES, STEPS = 8, 8
MAX_NEW = 320
Lengths = dict[int, list[list[int]]]  # by prompt: answers of each visit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/scheduling"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])


def run(args: argparse.Namespace) -> None:
    args.output_dir.mkdir(parents=True, exist_ok=True)
    traces = {"arithmetic, long": long_trace(args.output_dir), "GSM8K, four models": gsm8k_trace()}
    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        rows += measure(args.output_dir, workload, args.workers)
    known = {name: trace for name, trace in traces.items() if trace is not None}
    write(args.results, known, {name: correlations(*trace) for name, trace in known.items()}, rows)


def long_trace(folder: Path) -> tuple[list[int], Lengths]:
    """Tokens of the prompts, and of the answers in training; recorded when it is not there."""
    from bench._trace import DEFAULTS, record
    from python_trainer.config import load_config

    path = folder / "long.npz"
    if not path.exists():
        record(load_config("configs/arithmetic_long.yaml", [*DEFAULTS, *TRACE]), path)
    with np.load(path) as data:
        lengths: Lengths = {key: [] for key in range(len(data["prompt_lengths"]))}
        for epoch in range(int(data["epoch"].max()) + 1):
            for key, visits in lengths.items():
                visits.append(data["answer_lengths"][(data["key"] == key) & (data["epoch"] == epoch)].tolist())
        return data["prompt_lengths"].tolist(), lengths


def gsm8k_trace() -> tuple[list[int], Lengths] | None:
    from bench.history import gsm8k_trace as load

    trace = load(1319)
    if isinstance(trace, Missing):
        print(f"without GSM8K: {trace.reason}")
        return None
    lengths: Lengths = {key: [] for key in range(len(trace.prompts))}
    for answer in trace.answers:
        lengths[answer.prompt].append([len(answer.ids)])
    return [len(prompt) for prompt in trace.prompts], lengths


def correlations(prompts: Sequence[int], lengths: Lengths) -> list[dict[str, float]]:
    """By visit from the second on: mean length of a prompt's answers, against what was expected and the prompt's."""
    history, found = LengthHistory(), []
    for visit in range(len(next(iter(lengths.values())))):
        actual = [fmean(visits[visit]) for visits in lengths.values()]
        if visit:
            expected = [length or 0.0 for length in history.predict([[key] for key in lengths])]
            errors = [abs(a - e) / a for a, e in zip(actual, expected)]
            found.append({
                "visit": visit + 1,
                "spearman": float(spearmanr(expected, actual).statistic),
                "kendall": float(kendalltau(expected, actual).statistic),
                "prompt_spearman": float(spearmanr(prompts, actual).statistic),
                "error": fmean(errors),
                "spread": float(np.std(actual) / np.mean(actual)),
            })  # fmt: skip
        for key, visits in lengths.items():
            history.observe([key], visits[visit])
    return found


def prompts_of(workload: str, policy: Any) -> list[list[int]]:
    """Token ids; every step of the second kind has as many long sums as short ones."""
    from python_trainer.tasks.arithmetic import ArithmeticSettings

    sizes = {"long": ["long"], "long and short": ["long", "short"]}[workload]
    count = STEPS * WORKLOADS[workload] // len(sizes)
    tasks = [ArithmeticSettings(variant=size, train_size=count).load() for size in sizes]  # type: ignore[arg-type]
    encoded = [policy.encode([example.prompt for example in task.train]) for task in tasks]
    order = np.random.default_rng(0).permutation(STEPS * WORKLOADS[workload])
    together = [prompt for rows in zip(*encoded) for prompt in rows]
    return [together[i] for i in order]


def requests_of(prompts: Sequence[list[int]], step: int, size: int) -> list[Request]:
    chosen = prompts[step * size : (step + 1) * size]
    return [
        Request(p, num_samples=SAMPLES, max_new_tokens=MAX_NEW, sample_id=SAMPLES * i) for i, p in enumerate(chosen)
    ]


VARIANTS: dict[str, tuple[bool, bool]] = {  # scheduled, with drafts
    "in turn": (False, False), "scheduled": (True, False), "scheduled, drafts": (True, True),
}  # fmt: skip


def measure(folder: Path, workload: str, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Every step with every number of workers and every schedule, side by side; a first visit gives the history."""
    path = folder / f"measured {workload}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["workers"], row["variant"], row["step"]) for row in rows}
    wanted = [(n, v, s) for s in range(STEPS) for n in counts for v in VARIANTS]
    if set(wanted) <= done:
        return rows
    from python_trainer.model.policy import load_policy
    from python_trainer.model.settings import ModelConfig
    from python_trainer.rollout.drafting import Drafter
    from python_trainer.rollout.workers.pool import WorkerPool
    from rlkernels import RolloutHistory

    policy = load_policy(ModelConfig(path="main", device="cpu"))
    prompts, size = prompts_of(workload, policy), WORKLOADS[workload]
    pools = {n: WorkerPool(policy.model, workers=n, threads=1, eos_token_ids=policy.eos_token_ids) for n in counts}
    lengths, history = LengthHistory(), RolloutHistory()
    overhead = 0.0
    for step in range(STEPS):  # the first visit
        requests = requests_of(prompts, step, size)
        sampling = SamplingParams(seed=keyed_seed("first visit", step))
        answers = pools[counts[0]].generate(requests, sampling)
        remember(lengths, requests, answers)
        for i, answer in enumerate(answers):
            history.add(requests[i // SAMPLES].prompt_ids, answer.ids)
    state, first = lengths.state_dict(), dict[int, list[list[int]]]()
    for workers, variant, step in (key for key in wanted if key not in done):
        pool, (scheduled, drafted) = pools[workers], VARIANTS[variant]
        pool.lengths = LengthHistory() if scheduled else None
        if pool.lengths:
            pool.lengths.load_state_dict(state)
        if not overhead:
            overhead = measured_overhead(pool)
        pool._overhead = overhead  # one figure for all
        pool.drafter = Drafter(history, pass_overhead=overhead) if drafted else None
        pool.policy_updated()  # prompts are computed again, as in training
        requests, moved, started = requests_of(prompts, step, size), pool.moved, time.perf_counter()
        answers = pool.generate(requests, SamplingParams(seed=keyed_seed("second visit", step)))
        wall = time.perf_counter() - started
        if first.setdefault(step, [a.ids for a in answers]) != [a.ids for a in answers]:
            raise RuntimeError(f"step {step} with {workers} workers, {variant}: other tokens than with {counts[0]}")
        row = {
            "workload": workload, "workers": workers, "variant": variant, "step": step, "wall_s": wall,
            "moved": pool.moved - moved, "overhead": overhead, "spread": lengths.spread,
            "prompts": [len(request.prompt_ids) for request in requests],
            "lengths": [[len(a.ids) for a in answers[i : i + SAMPLES]] for i in range(0, len(answers), SAMPLES)],
            "expected": [x or 0.0 for x in lengths.predict([r.prompt_ids for r in requests])],
            "workers_did": [asdict(report) for report in pool.reports],
        }  # fmt: skip
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
        print(f"{workload}, step {step}, {workers} workers, {variant}: slowest "
              f"{max(report.cpu_s for report in pool.reports):.2f} CPU s")  # fmt: skip
    for pool in pools.values():
        pool.close()
    return rows


def measured_overhead(pool: Any) -> float:
    """What a pass costs on top of its tokens: the quickest of some passes, as the pool itself would measure it."""
    from python_trainer.rollout.drafting import pass_overhead
    from python_trainer.rollout.workers.pool import MEASURED_SEQUENCES

    return pass_overhead({n: min(pool.pass_seconds(n, 1) for _ in range(5)) for n in MEASURED_SEQUENCES})
