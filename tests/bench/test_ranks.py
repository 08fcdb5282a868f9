"""What studies find out about the update of a run, on paths whose answer is known."""

import json
import math
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from bench.studies import ranks, report, sentences
from bench.studies.harness import OTHER_WEIGHTS
from bench.studies.ranks import (
    SnapshotWriter,
    cut,
    leading_vectors,
    other_weights,
    shape_of_path,
    share_of_gain,
    training_accuracy,
)
from rlkernels.weights import encode

MATRIX, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
STEPS = 20


def direction(size, seed):
    vector = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return vector / vector.norm()


def write_history(run, path):
    """As the trainer writes it."""
    (base := run / "weights" / "base").mkdir(parents=True)
    save_file(path[0], base / "model.safetensors")
    for number, (before, after) in enumerate(pairwise(path), 1):
        (run / "weights" / f"step-{number:06d}.delta").write_bytes(encode(after, before))


def write_snapshots(run, path):
    """By the callback of the studies, of a trainer with these weights."""
    writer = SnapshotWriter()
    for number, weights in enumerate(path):
        model = SimpleNamespace(named_parameters=weights.items)
        trainer = SimpleNamespace(folder=run, policy=SimpleNamespace(model=model))
        writer.on_step(trainer, number, {}) if number else writer.on_evaluate(trainer, number, {})


@pytest.fixture(params=[write_history, write_snapshots])
def straight_run(request, tmp_path, monkeypatch):
    """A run whose matrix moves along one direction, by as much in every step, while its accuracy rises to 1."""
    monkeypatch.setattr(ranks, "SMOOTHING_STEPS", 1)
    monkeypatch.setattr(ranks, "EVERY", 2)
    base = {MATRIX: torch.randn(12, 8, generator=torch.Generator().manual_seed(0)) / 8, NORM: torch.ones(8)}
    step = torch.outer(direction(12, 1), direction(8, 2)) / STEPS
    path = [{MATRIX: base[MATRIX] + number * step, NORM: base[NORM] + number} for number in range(STEPS + 1)]
    request.param(tmp_path, path)
    rows = [{"step": 0, "eval/accuracy": 0.0}]
    rows += [{"step": number, "accuracy": number / STEPS} for number in range(1, STEPS + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path, path


def weights_of(changes, last):
    """The matrix and the norm by name of the weights."""
    return {name: (change(MATRIX, last[MATRIX]), change(NORM, last[NORM])) for name, change in changes}


def test_ranks_of_an_update_of_rank_1(straight_run):
    run, path = straight_run
    found = weights_of(ranks.at_ranks(run), path[-1])
    kept = [f"rank {rank}{rest}" for rank in (1, 4, 16) for rest in ("", ", norm kept")]
    assert [*found] == ["rank 0", *kept]
    for name, (matrix, norm) in found.items():
        torch.testing.assert_close(matrix, path[0 if name == "rank 0" else -1][MATRIX], rtol=0, atol=1e-6)
        assert torch.equal(norm, path[-1][NORM]), "what is no projection stays as trained"


def test_a_straight_path_is_predicted_to_its_end(straight_run):
    run, path = straight_run
    found = weights_of(ranks.predictions(run), path[-1])
    now_matrix, now_norm = found.pop("step 8")
    assert torch.equal(now_matrix, path[8][MATRIX]) and torch.equal(now_norm, path[8][NORM])
    assert len(found) == 5 and {name.split(", ")[1] for name in found} == {"then pls", "then secant", "then full"}
    for name, (matrix, norm) in found.items():
        torch.testing.assert_close(matrix, path[-1][MATRIX], rtol=0, atol=1e-5, msg=name)
        assert torch.equal(norm, path[8][NORM])


def test_predictors_without_enough_points_are_left_out(straight_run, monkeypatch):
    monkeypatch.setattr(ranks, "POINTS", 10)
    monkeypatch.setattr(ranks, "KNOWN", 0.2)  # two of the points
    assert {name.split(", ")[1] for name, _ in [*ranks.predictions(straight_run[0])][1:]} == {
        "then secant",
        "then full",
    }


def test_the_shape_of_a_straight_path(straight_run):
    found = shape_of_path(straight_run[0])
    assert found == pytest.approx({"R^2 of a line": 1.0, "lowest R^2": 1.0, "norm in rank 1": 1.0}, abs=1e-4)


def test_training_accuracy_is_averaged_over_five_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"accuracy": {number}}}\n' for number in range(7)))
    assert training_accuracy(tmp_path) == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_an_update_is_cut_to_its_leading_ranks(shape):
    """Against torch's SVD; with its norm kept, the part has the norm of the whole."""
    update = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(update, full_matrices=False)
    vectors = leading_vectors(update, 4)
    for rank in (1, 2, 4):
        part = (u[:, :rank] * s[:rank]) @ v[:rank]
        torch.testing.assert_close(cut(update, vectors[:, :rank], norm_kept=False), part)
        whole = cut(update, vectors[:, :rank], norm_kept=True)
        torch.testing.assert_close(whole, part * update.norm() / part.norm())
    assert not cut(update, vectors[:, :0], norm_kept=True).any()
    still = torch.zeros(shape)
    assert not cut(still, leading_vectors(still, 2), norm_kept=True).any()


def test_evaluations_with_other_weights_go_on_where_they_were_killed(tmp_path, monkeypatch):
    """The first call is killed in its second evaluation; the next one does not repeat the first."""
    asked = []

    @contextmanager
    def pretend(run, change):
        asked.append(change("", None))
        if len(asked) == 2:
            raise KeyboardInterrupt
        evaluator = SimpleNamespace(evaluate_each=lambda split, rows: [float(row < 1) for row in rows])
        yield SimpleNamespace(evaluator=evaluator)

    ends = {"start": [0.0] * 4, "final": [1.0] * 4}
    monkeypatch.setattr(ranks, "trainer_with", pretend)
    monkeypatch.setattr(ranks, "read_evaluations", lambda run: ends)
    monkeypatch.setattr(ranks, "at_ranks", lambda run: [("rank 1", lambda *_: 1), ("rank 4", lambda *_: 4)])
    monkeypatch.setattr(ranks, "predictions", lambda run: [])
    with pytest.raises(KeyboardInterrupt):
        other_weights(tmp_path)
    found = other_weights(tmp_path)
    assert asked == [1, 4, 4] and {*found} == {"start", "end", "rank 1", "rank 4"}
    assert found["start"] == (0.0, 0.0) and found["end"] == (1.0, 0.0)
    assert found["rank 4"] == (0.25, 0.25)  # the deviation of the four is 0.5


def test_shares_of_a_gain():
    weights = {"start": (0.1, 0.02), "end": (0.9, 0.02), "rank 1": (0.7, 0.03)}
    assert share_of_gain(weights, "rank 1") == pytest.approx(0.75)
    within_chance = weights | {"end": (0.15, 0.02)}
    assert math.isnan(share_of_gain(within_chance, "rank 1"))
    rows = [
        {"arm": "plain", "seed": seed, "more": {OTHER_WEIGHTS: weights | {"rank 1": (accuracy, 0.03)}}}
        for seed, accuracy in enumerate((0.7, 0.5))
    ]
    assert report.weights_table(rows)[2:] == [
        "| start | 0.100 ± 0.020, 0.100 ± 0.020 | 0 [0, 0] % |",
        "| end | 0.900 ± 0.020, 0.900 ± 0.020 | 100 [100, 100] % |",
        "| rank 1 | 0.700 ± 0.030, 0.500 ± 0.030 | 62 [-96, 221] % |",
    ]
    assert report.weights_table([{"more": {}}]) == []


def test_answers_of_one_pattern_are_counted():
    answers = ["An island, a storm and a river were there.", "A cat, a dog and an owl were there.", "Cats sleep."]
    given = [["island", "storm", "river"], ["cat", "dog", "owl"], ["cat", "dog", "owl"]]
    assert sentences.commonest_pattern(answers, given) == pytest.approx(2 / 3)
