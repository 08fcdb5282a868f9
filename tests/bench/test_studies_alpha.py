"""The tables of the study of extrapolated weights, from results with known values."""

import json

import numpy
from safetensors.numpy import save_file

from bench.studies import alpha_report


def part(folder, seed, accepted):
    """A part whose predictor ``full`` doubles what is still missing at the cut, or is rejected."""
    home = folder / "dapo" / f"seed-{seed}"
    home.mkdir(parents=True)
    rights = {"base": 100, "cut": 300, "full": 500, "gated full": 400 if accepted else 300, "ungated full": 400,
              "same cost": 350, alpha_report.RANKS[0]: 450}  # fmt: skip
    answers = {name: (numpy.arange(1000) < right).astype(numpy.uint8) for name, right in rights.items()}
    save_file(answers, home / "answers.safetensors")
    tries = [
        {
            "factor": 1.0,
            "before": 0.3,
            "after": 0.4,
            "prompts": 256,
            "e_value": 50.0,
            "needed": 40.0,
            "accepted": accepted,
        }
    ]
    modules = {f"m{i}": {"share": 0.5, "gap": 0.3, "r2": 0.9 + 0.01 * i, "cosine_at_half": 0.99} for i in range(3)}
    numbers = {
        "commit": "abc", "same cost steps": 7, "modules": modules,
        "scan": {"factors": [0.0, 1.0], "accuracy": [0.1, 0.5], "prompts": 100},
        "cut_cost": {"cpu_s": 40.0, "track_cpu_s": 1.0}, "full_cost": {"cpu_s": 61.0, "track_cpu_s": 2.0},
        "attempt full": {"accepted": accepted, "tries": tries, "cpu_s": 9.0},
        "attempt pls": {"accepted": False, "refused": "no skill", "detail": "", "cpu_s": 0.0},
    }  # fmt: skip
    (home / "results.json").write_text(json.dumps(numbers))


def test_tables_and_pictures(tmp_path):
    for seed, accepted in ((0, True), (1, False)):
        part(tmp_path / "runs", seed, accepted)
    answers = tmp_path / "runs" / "dapo" / "seed-0" / "results.json"
    text = json.loads(answers.read_text())
    del text["attempt pls"]
    answers.write_text(json.dumps(text))
    alpha_report.write(tmp_path / "runs", tmp_path / "results", 24, 60)
    page = (tmp_path / "results" / "alpha.md").read_text()
    for words in (
        "| after 24 of 60 steps | 0.3000, 0.3000 | 50.0 % [",
        "| full, gated | 0.4000, 0.3000 | 62.5 % [",
        "| full, ungated | 0.4000, 0.4000 | 75.0 % [",
        "(steps: 7, 7) | 0.3500, 0.3500 |",
        "| full | 0 | accepted at 1 (gate 0.300 -> 0.400) | +0.1000 [",
        "| full | 1 | rejected 1 times (gate 0.300 -> 0.400) | +0.1000 [",
        "| 0 | full | 40.0 | 1.0 | 9.0 | 98.0 | 2.00x |",
        "| rank 1, scale a, rest trained | 0.4500, 0.4500 | 87.5 % [",
        "0.910 (0.900)",
    ):
        assert words in page, words
    assert json.loads((tmp_path / "results" / "alpha.json").read_text())["dapo"]["0"]["accuracy"]["cut"] == 0.3
    for name in ("alpha_accuracy.png", "alpha_shape.png"):
        assert (tmp_path / "results" / name).stat().st_size > 5000
