"""What studies find out about the update of a run, on paths whose answer is known."""

import math
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from support import write_jsonl

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
    """Write the weights of a run as the trainer does."""
    (base := run / "weights" / "base").mkdir(parents=True)
    save_file(path[0], base / "model.safetensors")
    for number, (old, new) in enumerate(pairwise(path), 1):
        (run / "weights" / f"step-{number:06d}.delta").write_bytes(encode(new, old))


def write_snapshots(run, path):
    """Write the weights of a run by the callback of the studies."""
    writer = SnapshotWriter()
    for number, weights in enumerate(path):
        model = SimpleNamespace(named_parameters=weights.items)
        trainer = SimpleNamespace(folder=run, policy=SimpleNamespace(model=model))
        report = writer.on_step if number else writer.on_evaluate
        report(trainer, number, {})


@pytest.fixture(params=[write_history, write_snapshots])
def straight_run(request, tmp_path, monkeypatch):
    """Write a run whose matrix moves along one direction by the same distance each step, while accuracy rises to 1."""
    monkeypatch.setattr(ranks, "SMOOTHING_STEPS", 1)
    monkeypatch.setattr(ranks, "SNAPSHOT_STEPS", 2)
    base = {MATRIX: torch.randn(12, 8, generator=torch.Generator().manual_seed(0)) / 8, NORM: torch.ones(8)}
    step_update = torch.outer(direction(12, 1), direction(8, 2)) / STEPS
    path = [{MATRIX: base[MATRIX] + number * step_update, NORM: base[NORM] + number} for number in range(STEPS + 1)]
    request.param(tmp_path, path)
    rows = [{"step": 0, "eval/accuracy": 0.0}]
    rows += [{"step": number, "accuracy": number / STEPS} for number in range(1, STEPS + 1)]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    return tmp_path, path


def apply_changes(changes, final_weights):
    """Return the matrix and the norm that each change leaves, by its name."""
    matrix, norm = final_weights[MATRIX], final_weights[NORM]
    return {name: (change(MATRIX, matrix), change(NORM, norm)) for name, change in changes}


def test_ranks_of_an_update_of_rank_1(straight_run):
    run, path = straight_run
    weights = apply_changes(ranks.at_ranks(run), path[-1])
    names = [f"rank {rank}{rest}" for rank in (1, 4, 16) for rest in ("", ", norm kept")]
    assert [*weights] == ["rank 0", *names]
    for name, (matrix, norm) in weights.items():
        torch.testing.assert_close(matrix, path[0 if name == "rank 0" else -1][MATRIX], rtol=0, atol=1e-6)
        assert torch.equal(norm, path[-1][NORM]), "what is no projection stays as trained"


def test_a_straight_path_is_predicted_to_its_end(straight_run):
    run, path = straight_run
    weights = apply_changes(ranks.predictions(run), path[-1])
    matrix_at_8, norm_at_8 = weights.pop("step 8")
    assert torch.equal(matrix_at_8, path[8][MATRIX]) and torch.equal(norm_at_8, path[8][NORM])
    assert len(weights) == 5 and {name.split(", ")[1] for name in weights} == {"then pls", "then secant", "then full"}
    for name, (matrix, norm) in weights.items():
        torch.testing.assert_close(matrix, path[-1][MATRIX], rtol=0, atol=1e-5, msg=name)
        assert torch.equal(norm, path[8][NORM])


def test_predictors_without_enough_points_are_left_out(straight_run, monkeypatch):
    monkeypatch.setattr(ranks, "MAX_POINTS", 10)
    monkeypatch.setattr(ranks, "KNOWN_SHARE", 0.2)  # two of the points
    assert {name.split(", ")[1] for name, _ in [*ranks.predictions(straight_run[0])][1:]} == {
        "then secant",
        "then full",
    }


def test_the_shape_of_a_straight_path(straight_run):
    shape = shape_of_path(straight_run[0])
    assert shape == pytest.approx({"R^2 of a line": 1.0, "lowest R^2": 1.0, "norm in rank 1": 1.0}, abs=1e-4)


def test_training_accuracy_is_averaged_over_five_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"accuracy": {number}}}\n' for number in range(7)))
    assert training_accuracy(tmp_path) == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_an_update_is_cut_to_its_leading_ranks(shape):
    """Compare with torch's SVD; with ``norm_kept`` the truncated update has the norm of the full one."""
    update = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(update, full_matrices=False)
    vectors = leading_vectors(update, 4)
    for rank in (1, 2, 4):
        truncated = (u[:, :rank] * s[:rank]) @ v[:rank]
        torch.testing.assert_close(cut(update, vectors[:, :rank], norm_kept=False), truncated)
        rescaled = cut(update, vectors[:, :rank], norm_kept=True)
        torch.testing.assert_close(rescaled, truncated * update.norm() / truncated.norm())
    assert not cut(update, vectors[:, :0], norm_kept=True).any()
    zero_update = torch.zeros(shape)
    assert not cut(zero_update, leading_vectors(zero_update, 2), norm_kept=True).any()


def test_evaluations_with_other_weights_go_on_where_they_were_killed(tmp_path, monkeypatch):
    """The first call is killed in its second evaluation; the next one does not repeat the first."""
    evaluated_ranks = []

    @contextmanager
    def pretend(run, change):
        evaluated_ranks.append(change("", None))
        if len(evaluated_ranks) == 2:
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
    accuracies = other_weights(tmp_path)
    assert evaluated_ranks == [1, 4, 4] and {*accuracies} == {"start", "end", "rank 1", "rank 4"}
    assert accuracies["start"] == (0.0, 0.0) and accuracies["end"] == (1.0, 0.0)
    assert accuracies["rank 4"] == (0.25, 0.25)  # the deviation of the four is 0.5


def test_shares_of_a_gain():
    weights = {"start": (0.1, 0.02), "end": (0.9, 0.02), "rank 1": (0.7, 0.03)}
    assert share_of_gain(weights, "rank 1") == pytest.approx(0.75)
    small_gain = weights | {"end": (0.15, 0.02)}
    assert math.isnan(share_of_gain(small_gain, "rank 1"))
    rows = [
        {"seed": seed, "more": {OTHER_WEIGHTS: weights | {"rank 1": (accuracy, 0.03)}}}
        for seed, accuracy in enumerate((0.7, 0.5))
    ]
    assert report.weights_table("plain", rows)[2:] == [
        "| start | 0.100 ± 0.020, 0.100 ± 0.020 | 0 [0, 0] % |",
        "| end | 0.900 ± 0.020, 0.900 ± 0.020 | 100 [100, 100] % |",
        "| rank 1 | 0.700 ± 0.030, 0.500 ± 0.030 | 62 [-96, 221] % |",
    ]


def test_answers_of_one_pattern_are_counted():
    answers = ["An island, a storm and a river were there.", "A cat, a dog and an owl were there.", "Cats sleep."]
    prompt_words = [["island", "storm", "river"], ["cat", "dog", "owl"], ["cat", "dog", "owl"]]
    assert sentences.commonest_pattern(answers, prompt_words) == pytest.approx(2 / 3)
