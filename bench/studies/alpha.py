"""AlphaRL up to the plateau: a prediction after 40 % of 200 steps, at a rate that is too low and at the tuned one.

*gain at 40 %*: gain after 80 steps, with the prediction if there is one, over the gain of plain training of the same
seed in 200 steps. All arms train on to step 200. The rivals are higher rates and fewer prompts a step. Checkpoints of
the plain run show how much of its gain the leading ranks of its update keep, and how straight its path is.
"""

from pathlib import Path
from typing import Any

from bench.studies.harness import OTHER_WEIGHTS, Arm, Study, evaluations, fewer_prompts
from bench.studies.ranks import HISTORY, other_weights, shape_of_path

STEPS = 200
PREDICTION_STEP = 80  # step of the prediction
LOW_RATE = 3e-5
TUNED_RATE = 2e-4
PAPER = ["accelerators.enabled=[alpha]", "accelerators.alpha.preset=paper"]
GATED = [
    "accelerators.enabled=[alpha]", "accelerators.alpha.every=0",
    f"accelerators.alpha.horizon={STEPS / PREDICTION_STEP}",
]  # fmt: skip


def measure(run: Path) -> dict[str, Any]:
    """Return the gain after 40 % of the steps; of a plain run also its ranks. Empty until the plain run finishes."""
    plain = run.parents[1] / "plain" / run.name
    if not (plain / "summary.json").exists():
        return {}
    start, *_, end = (accuracy for *_, accuracy in evaluations(plain))
    (predicted,) = (accuracy for step, *_, accuracy in evaluations(run) if step == PREDICTION_STEP)
    figures: dict[str, Any] = {"gain at 40 %": (predicted - start) / max(end - start, 1e-9)}
    if run == plain:
        figures |= shape_of_path(run) | {OTHER_WEIGHTS: other_weights(run)}
    return figures


def arms(rate: float) -> list[Arm]:
    """Make the arms of one learning rate."""
    rivals = [*fewer_prompts(16), Arm("paper preset", PAPER), Arm("rank 1, gated", GATED)]
    return [
        Arm("plain", [HISTORY], rate=rate),
        *(Arm(arm.name, arm.settings, rate=rate) for arm in rivals),
        *(Arm(f"{word} the rate", rate=factor * rate) for word, factor in (("twice", 2), ("four times", 4))),
    ]


STUDIES = [
    Study(
        name=name,
        config="configs/sums.yaml",
        common=[
            "task.variant=short", "task.gate_size=512", "task.test_size=2048", f"max_steps={STEPS}",
            "rollout.max_completion_length=128", "evaluation.eval_steps=20", "evaluation.eval_limit_during=1024",
            "save.save_total_limit=1", f"accelerators.alpha.first_step={PREDICTION_STEP}",
        ],
        arms=arms(rate),
        levels=(0.8, 0.85, 0.9),
        columns={"jumped": "alpha/accepted"},
        measure=measure,
    )
    for name, rate in (("low rate", LOW_RATE), ("tuned rate", TUNED_RATE))
]  # fmt: skip
