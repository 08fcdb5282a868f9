"""Lossless drafts from earlier answers: forward passes and seconds, and proof that training does not change.

*drafts*: 192 prompts of `sums` return every twelve steps; float32 with exact products. *keys*: 64 prompts of
examples/sentences.py return every four; SmolLM2-135M in bfloat16, whose rounding may change a token. *same training* is
1 if all rewards, losses, gradients and lengths equal those of the plain run bit for bit. In an environment with vLLM
(`make test-vllm`), `--set rollout.engine=vllm` drafts inside vLLM, which samples other tokens from the same
distribution.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.studies import sentences
from bench.studies.harness import Arm, Study, fewer_prompts
from python_trainer.run.directory import read_metrics

# metrics that depend on the clock, or, in the last digits of the sampler's log-probabilities, on the forward passes
NOT_COMPARED = ("time/", "drafts/", "tokens_per_second", "rollout_tokens_per_second", "sampling/")


def drop_timing(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of metrics without those that drafts may change."""
    return [{key: value for key, value in row.items() if not key.startswith(NOT_COMPARED)} for row in rows]


def measure(epoch_steps: int, run: Path) -> dict[str, float]:
    """Compare the run with the plain one of its seed, and sum up its generation. Empty until the plain run finishes."""
    plain = run.parents[1] / "plain" / run.name
    if not (plain / "summary.json").exists():
        return {}
    rows = read_metrics(run)
    figures = {
        "s of rollouts": sum(row.get("time/rollout_s", 0.0) for row in rows),
        "same training": float(drop_timing(rows) == drop_timing(read_metrics(plain))),
    }
    drafted_rows = [row for row in rows if row.get("drafts/tokens_per_step")]
    for epoch, start in enumerate(range(0, len(drafted_rows), epoch_steps), 1):
        epoch_rows = drafted_rows[start : start + epoch_steps]
        passes = sum(row["tokens/generated"] / row["drafts/tokens_per_step"] for row in epoch_rows)
        figures[f"tokens a pass, epoch {epoch}"] = sum(row["tokens/generated"] for row in epoch_rows) / passes
    return figures


EXACT = ["model.matmul_precision=highest", "save.save_total_limit=1"]
DRAFTS = ["accelerators.enabled=[drafts]"]
STUDIES = [
    Study(
        name="drafts",
        config="configs/sums.yaml",
        common=[*EXACT, "max_steps=48", "evaluation.eval_steps=12", "task.test_size=512", "save.save_steps=12"],
        arms=[Arm("plain"), Arm("drafts", DRAFTS), *fewer_prompts(16)],
        levels=(0.5, 0.6),
        measure=partial(measure, 12),
    ),
    Study(
        name="keys",
        config=sentences.CONFIG,
        common=[*EXACT, *sentences.common("keys", steps=24, eval_steps=8), "task.train_size=64"],
        arms=[Arm("plain"), Arm("drafts", DRAFTS), *fewer_prompts(16)],
        levels=(0.3,),
        prepare=sentences.prepare,
        measure=partial(measure, 4),
    ),
]
