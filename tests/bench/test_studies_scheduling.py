"""The simulation of workers against cases worked out by hand, and the tables of the study."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.studies import scheduling, scheduling_report
from bench.studies.scheduling_model import POLICIES, Cost, Group, end, fit, pipelined, run, simulate

COST = Cost(a_pass=2.0, a_token=0.25)


def random_groups(count=24, samples=4, seed=0, error=0.0) -> list[Group]:
    rng = np.random.default_rng(seed)
    means = rng.integers(5, 200, count)
    return [
        Group(16, tuple(np.maximum(rng.normal(mean, 3, samples).astype(int), 1).tolist()),
              float(mean * np.exp(error * rng.normal())))
        for mean in means
    ]  # fmt: skip


def test_one_worker_by_hand():
    (station,) = simulate([Group(8, (3, 5), 4.0), Group(4, (5,), 4.0)], 1, "fifo", COST)
    # 5 passes; 3 of them draw 3 tokens, 2 draw 2
    assert station.clock == station.busy == pytest.approx(5 * 2.0 + (12 + 13) * 0.25)
    assert station.finished == 3 and station.moved == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [1, 3, 7])
def test_all_answers_are_finished_and_no_plan_beats_the_bounds(policy, workers):
    groups = random_groups(error=0.4)
    stations = simulate(groups, workers, policy, COST)
    assert sum(station.finished for station in stations) == 24 * 4 and not any(s.answers for s in stations)
    longest = max(length for group in groups for length in group.lengths)
    tokens = sum(sum(group.lengths) for group in groups)
    assert end(stations) >= max(COST.a_pass * longest, COST.a_token * tokens / workers)
    assert all(station.busy <= station.clock + 1e-9 for station in stations)


def test_moving_helps_a_worker_that_got_all_the_long_answers():
    groups = [Group(2, (200,) * 8, 200.0)] * 4 + [Group(2, (5,) * 8, 5.0)] * 4
    plan, cheap = [[0, 1, 2, 3], [4, 5, 6, 7]], Cost(0.1, 1.0)
    alone, helped = (run(groups, plan, cheap, moving=moving) for moving in (False, True))
    assert end(helped) < 0.7 * end(alone) and 8 <= helped[1].moved <= 24 and helped[0].moved == 0
    # where passes are all that costs, moving cannot help
    assert sum(station.moved for station in run(groups, plan, Cost(1.0, 1e-6), moving=True)) == 0


def test_lengths_that_cannot_be_told_do_no_harm():
    """Expected lengths that are off by half: no slower than in turn, over some steps, with spread as it then is."""
    slow, turn, scheduled = Cost(20.0, 0.25), 0.0, 0.0
    for seed in range(8):
        groups = [replace(group, spread=0.5) for group in random_groups(64, samples=1, seed=seed, error=0.6)]
        turn += end(simulate(groups, 4, "fifo", slow))
        scheduled += end(simulate(groups, 4, "balance", slow))
    assert scheduled < 1.02 * turn


def test_fit_finds_the_cost_that_made_the_seconds():
    rng = np.random.default_rng(0)
    rows = [tuple(row) for row in rng.integers(1, 400, (12, 2)).tolist()]
    found = fit(rows, [COST.seconds(*row) for row in rows])
    assert [found.a_pass, found.a_token, found.overhead] == pytest.approx([2.0, 0.25, 8.0])


def test_working_ahead_is_no_slower_than_a_barrier():
    steps = [random_groups(8, seed=seed) for seed in range(6)]
    barrier = sum(end(simulate(groups, 3, "fifo", COST)) for groups in steps)
    ahead = pipelined(steps, 3, COST, alternating=False)
    tokens = sum(sum(group.lengths) for groups in steps for group in groups)
    assert COST.a_token * tokens / 3 < ahead < barrier
    assert pipelined(steps[:1], 3, COST, alternating=False) == pytest.approx(end(simulate(steps[0], 3, "fifo", COST)))


def test_correlations_of_lengths_that_repeat_and_of_noise():
    rng = np.random.default_rng(1)
    same = {key: [[int(n), int(n)]] * 3 for key, n in enumerate(rng.integers(5, 500, 60))}
    noise = {key: [[int(n)] for n in rng.integers(5, 500, 3)] for key in range(60)}
    first, second = scheduling.correlations(list(range(60)), same)
    assert first["spearman"] == pytest.approx(1) and second["kendall"] == pytest.approx(1) and first["error"] == 0
    assert abs(scheduling.correlations(list(range(60)), noise)[1]["spearman"]) < 0.4


def test_tables_of_rows_that_the_model_made(tmp_path, capsys):
    """Rows as they are measured, made by the simulation itself: the check must then find no error."""
    rows, rng = [], np.random.default_rng(0)
    for step in range(4):
        groups = random_groups(32, samples=8, seed=step)
        for workers in (1, 2):
            for variant, policy in (("in turn", "fifo"), ("scheduled", "balance"), ("scheduled, drafts", "balance")):
                plan = simulate(groups, workers, policy, COST)
                did = []
                for station in plan:
                    tokens = 100.0 * (1 + station.finished)
                    read = float(rng.integers(1, 500))
                    rest = station.busy - (read + tokens) * COST.a_token
                    stats = {"forward_passes": rest / COST.a_pass, "sample_steps": tokens, "prefill_tokens": read,
                             "generated_tokens": tokens}  # fmt: skip
                    did.append({"answers": station.finished, "stats": stats, "cpu_s": station.busy, "busy_s": 1.0})
                rows.append({
                    "workload": "long and short", "workers": workers, "variant": variant, "step": step, "wall_s": 1.0,
                    "moved": 0, "spread": 0.1, "prompts": [g.prompt for g in groups],
                    "lengths": [list(g.lengths) for g in groups], "expected": [g.expected for g in groups],
                    "workers_did": did,
                })  # fmt: skip
    trace = (list(range(40)), {key: [[key + 3, key + 5]] * 3 for key in range(40)})
    scheduling_report.write(tmp_path, {"made up": trace}, {"made up": scheduling.correlations(*trace)}, rows)
    record = json.loads((tmp_path / "scheduling.json").read_text())
    assert record["cost"]["a_pass"] == pytest.approx(2.0, rel=1e-3)
    turn = [row for row in record["checks"] if row["variant"] == "in turn"]
    assert turn and all(row["simulated"] == pytest.approx(row["measured"], rel=1e-3) for row in turn)
    text = (tmp_path / "scheduling.md").read_text()
    assert text in capsys.readouterr().out + "\n" and "| made up | 2 |" in text and "| 64 |" in text
