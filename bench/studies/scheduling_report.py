"""Tables of the scheduling study, as Markdown and JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench._markdown import table_lines
from bench._runner import commit
from bench.studies.scheduling_model import POLICIES, Cost, Group, end, fit, pipelined, simulate
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.run_state import device_name

Row = dict[str, Any]
SIMULATED = (8, 16, 32, 64)  # workers; fewer would have more answers than places
SLOWER_PASSES = 10  # times the overhead of a pass: nearer to a GPU, whose decoding passes wait for memory
PIPELINED = (2, 4, 8)


def groups_of(prompts: Sequence[int], lengths: Sequence[Sequence[int]], expected: Sequence[float],
              spread: float) -> list[Group]:  # fmt: skip
    return [Group(p, tuple(answers), e, spread) for p, answers, e in zip(prompts, lengths, expected)]


def visits_of(prompts: Sequence[int], lengths: dict[int, list[list[int]]]) -> list[list[Group]]:
    """Every visit but the first, as one step, with what was expected before it."""
    history, found = LengthHistory(), []
    for visit in range(len(next(iter(lengths.values())))):
        if visit:
            expected = [length or 0.0 for length in history.predict([[key] for key in lengths])]
            found.append(groups_of(prompts, [visits[visit] for visits in lengths.values()], expected, history.spread))
        for key, visits in lengths.items():
            history.observe([key], visits[visit])
    return found


def oracle(groups: Sequence[Group]) -> list[Group]:
    """The same, as if the lengths were known."""
    return [replace(group, expected=fmean(group.lengths), spread=0.02) for group in groups]


def correlation_lines(correlations: dict[str, list[Row]]) -> list[str]:
    head = ["answers", "visit", "spread of prompts", "Spearman", "Kendall", "mean error", "Spearman of prompt length"]
    rows = [
        [name, row["visit"], f"{row['spread']:.0%}", f"{row['spearman']:.3f}", f"{row['kendall']:.3f}",
         f"{row['error']:.1%}", f"{row['prompt_spearman']:.3f}"]
        for name, found in correlations.items() for row in found
    ]  # fmt: skip
    return table_lines(head, rows)


def slowest(row: Row) -> float:
    return max(worker["cpu_s"] for worker in row["workers_did"])


def measured_table(rows: Sequence[Row]) -> list[Row]:
    """Sums over steps, by workload, number of workers and schedule."""
    found: list[Row] = []
    for key in dict.fromkeys((row["workload"], row["workers"], row["variant"]) for row in rows):
        chosen = [row for row in rows if (row["workload"], row["workers"], row["variant"]) == key]
        stats = [worker["stats"] for row in chosen for worker in row["workers_did"]]
        found.append({
            "workload": key[0], "workers": key[1], "variant": key[2], "steps": len(chosen),
            "slowest_cpu_s": sum(map(slowest, chosen)),
            "all_cpu_s": sum(worker["cpu_s"] for row in chosen for worker in row["workers_did"]),
            "wall_s": sum(row["wall_s"] for row in chosen), "moved": sum(row["moved"] for row in chosen),
            "passes": sum(one["forward_passes"] for one in stats),
            "tokens": sum(one["generated_tokens"] for one in stats),
        })  # fmt: skip
    return found


def measured_lines(table: Sequence[Row]) -> list[str]:
    head = ["prompts", "workers", "", "slowest worker, CPU s", "times faster than in turn", "all workers, CPU s",
            "busiest over mean", "wall s", "passes", "answers moved"]  # fmt: skip
    rows = []
    for row in table:
        plain = next(
            other for other in table
            if (other["workload"], other["workers"], other["variant"]) == (row["workload"], row["workers"], "in turn")
        )  # fmt: skip
        rows.append([
            row["workload"], row["workers"], row["variant"], f"{row['slowest_cpu_s']:.2f}",
            f"{plain['slowest_cpu_s'] / row['slowest_cpu_s']:.2f}", f"{row['all_cpu_s']:.2f}",
            f"{row['slowest_cpu_s'] * row['workers'] / row['all_cpu_s']:.2f}", f"{row['wall_s']:.1f}",
            f"{row['passes']:.0f}", row["moved"],
        ])  # fmt: skip
    return table_lines(head, rows)


def plain_rows(rows: Iterable[Row], odd: bool) -> list[Row]:
    return [row for row in rows if "drafts" not in row["variant"] and row["step"] % 2 == odd]


def fitted(rows: Iterable[Row]) -> Cost:
    """From the even steps: CPU seconds of each worker by passes, tokens and prompt tokens."""
    reports = [worker for row in plain_rows(rows, odd=False) for worker in row["workers_did"] if worker["answers"]]
    counts = [
        (one["stats"]["forward_passes"], one["stats"]["sample_steps"] + one["stats"]["prefill_tokens"])
        for one in reports
    ]
    return fit(counts, [one["cpu_s"] for one in reports])


def checked(rows: Iterable[Row], cost: Cost) -> list[Row]:
    """The odd steps: the time of the slowest worker, simulated from the lengths alone, against the measured one."""
    found = []
    for row in plain_rows(rows, odd=True):
        groups = groups_of(row["prompts"], row["lengths"], row["expected"], row["spread"])
        simulated = end(simulate(groups, row["workers"], "fifo" if row["variant"] == "in turn" else "history", cost))
        found.append({name: row[name] for name in ("workload", "workers", "variant", "step")}
                     | {"measured": slowest(row), "simulated": simulated})  # fmt: skip
    return found


def cost_lines(cost: Cost, checks: Sequence[Row], even: Sequence[Row]) -> list[str]:
    before = [
        f"CPU seconds of a worker: {cost.a_pass * 1e6:.0f} us a pass + {cost.a_token * 1e6:.1f} us a token of prompts "
        f"and answers, fitted to {len(even)} calls (even steps); a pass costs as much as {cost.overhead:.0f} tokens.",
        "",
    ]
    head = ["prompts", "workers", "", "slowest worker, CPU s, measured", "simulated", "mean error of a step", "largest"]
    rows = []
    for key in dict.fromkeys((row["workload"], row["workers"], row["variant"]) for row in checks):
        chosen = [row for row in checks if (row["workload"], row["workers"], row["variant"]) == key]
        errors = [abs(row["simulated"] / row["measured"] - 1) for row in chosen]
        sums = (f"{sum(row[name] for row in chosen):.2f}" for name in ("measured", "simulated"))
        rows.append([*key, *sums, f"{fmean(errors):.1%}", f"{max(errors):.1%}"])
    errors = [abs(row["simulated"] / row["measured"] - 1) for row in checks]
    after = f"All {len(checks)} steps: mean error {fmean(errors):.1%}, largest {max(errors):.1%}."
    return [*before, *table_lines(head, rows), "", after]


def simulated_rows(name: str, steps: Sequence[Sequence[Group]], cost: Cost) -> list[Row]:
    """Time of all steps, behind a barrier each, by number of workers and policy."""
    found: list[Row] = []
    for factor in (1, SLOWER_PASSES):
        slow = replace(cost, a_pass=cost.a_pass * factor)
        for workers in SIMULATED:
            row: Row = {"trace": name, "workers": workers, "pass_costs": factor, "overhead": slow.overhead}
            for policy in POLICIES:
                ends = [simulate(groups, workers, policy, slow) for groups in steps]
                row[policy] = sum(map(end, ends))
                row["moved"] = sum(station.moved for stations in ends for station in stations)
            row["oracle"] = sum(end(simulate(oracle(groups), workers, "history", slow)) for groups in steps)
            found.append(row)
    return found


def simulated_lines(rows: Sequence[Row]) -> list[str]:
    head = ["lengths of", "pass costs, tokens", "workers", "in turn, s", "balanced", "balanced and moved",
            "lengths known"]  # fmt: skip
    return table_lines(head, (
        [row["trace"], f"{row['overhead']:.0f}", row["workers"], *gains(row, ("balance", "history", "oracle"))]
        for row in rows
    ))  # fmt: skip


def gains(row: Row, policies: Sequence[str]) -> list[str]:
    """Seconds in turn, and how many times faster each policy is."""
    return [f"{row['fifo']:.2f}", *(f"{row['fifo'] / row[policy]:.2f}" for policy in policies)]


def pipelined_rows(name: str, steps: Sequence[Sequence[Group]], cost: Cost) -> list[Row]:
    found: list[Row] = []
    for workers in PIPELINED:
        barrier = {p: sum(end(simulate(groups, workers, p, cost)) for groups in steps) for p in ("fifo", "history")}
        ahead = {
            "ahead": pipelined(steps, workers, cost, alternating=False),
            "alternating": pipelined(steps, workers, cost, alternating=True),
        }
        found.append({"trace": name, "workers": workers, **barrier, **ahead})
    return found


def pipelined_lines(rows: Sequence[Row]) -> list[str]:
    head = [
        "lengths of",
        "workers",
        "in turn, s",
        "scheduled",
        "one step ahead, in turn",
        "one step ahead, alternating",
    ]
    return table_lines(head, (
        [row["trace"], row["workers"], *gains(row, ("history", "ahead", "alternating"))] for row in rows
    ))  # fmt: skip


def cut(groups: Sequence[Group], size: int) -> list[list[Group]]:
    return [list(groups[i : i + size]) for i in range(0, len(groups), size)]


def write(results: Path, traces: dict[str, Any], correlations: dict[str, list[Row]], rows: Sequence[Row]) -> None:
    """Tables as Markdown, and what they are made of as JSON."""
    torch.set_num_threads(1)
    machine, table, cost = device_name(torch.device("cpu")), measured_table(rows), fitted(rows)
    checks = checked(rows, cost)
    mixed = {row["step"]: row for row in rows if row["workload"] == "long and short"}
    short = [groups_of(row["prompts"], row["lengths"], row["expected"], row["spread"]) for row in mixed.values()]
    whole = {"long and short": [[group for step in short for group in step]]}  # all its prompts in one step
    whole |= {name: visits_of(*trace) for name, trace in traces.items()}
    simulated = [row for name, steps in whole.items() for row in simulated_rows(name, steps, cost)]
    parts = {"long and short": short}
    parts |= {name: [part for step in whole[name] for part in cut(step, 16 * 8 // len(step[0].lengths))]
              for name in traces}  # fmt: skip
    ahead = [row for name, steps in parts.items() for row in pipelined_rows(name, steps, cost)]
    lines = [
        f"{machine}, one for each worker; commit {commit()}.", "", "## Expected lengths", "",
        *correlation_lines(correlations), "", "## Measured", "", *measured_lines(table), "", "## Cost model", "",
        *cost_lines(cost, checks, plain_rows(rows, odd=False)), "", "## Simulated: behind a barrier", "",
        "Times faster than in turn. No worker here has run.", "", *simulated_lines(simulated), "",
        "## Simulated: one step ahead", "",
        "Times faster than in turn behind a barrier; answers of a step come from weights that are one update old.", "",
        *pipelined_lines(ahead),
    ]  # fmt: skip
    results.mkdir(parents=True, exist_ok=True)
    (results / "scheduling.md").write_text("\n".join(lines) + "\n")
    record = {
        "machine": machine, "commit": commit(), "correlations": correlations, "measured": table, "cost": asdict(cost),
        "checks": checks, "simulated": simulated, "one_step_ahead": ahead,
    }  # fmt: skip
    (results / "scheduling.json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(lines))
