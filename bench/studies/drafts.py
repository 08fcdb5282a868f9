"""Lossless drafts from earlier answers: forward passes and seconds, and that training does not change.

192 prompts of `sums` come back every twelve steps; float32 with exact products. *same training* is 1 where all rewards,
losses, gradients and lengths equal those of the plain run, to the bit. In an environment with vLLM (`make test-vllm`),
`--set rollout.engine=vllm` drafts inside vLLM, whose sampled tokens are others of the same distribution.
"""

import json
from pathlib import Path
from typing import Any

from bench.studies.harness import Arm, Study, fewer_prompts

# depends on the clock, or on what else is in a forward pass: its last digits, in the sampler's log-probabilities
OTHER = ("time/", "drafts/", "tokens_per_second", "rollout_tokens_per_second", "sampling/")


def learning(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics, without what depends on the clock."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if not key.startswith(OTHER)} for row in rows]


def measure(run: Path) -> dict[str, float]:
    """Compare the run with the plain one of its seed, and add up its generation."""
    plain = run.parents[1] / "plain" / run.name
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {"s of rollouts": sum(row.get("time/rollout_s", 0.0) for row in rows)}
    if plain.exists():
        found["same training"] = float(learning(run) == learning(plain))
    drafted = [row for row in rows if row.get("drafts/tokens_per_step")]
    for epoch, start in enumerate(range(0, len(drafted), 12), 1):
        steps = drafted[start : start + 12]
        passes = sum(row["tokens/generated"] / row["drafts/tokens_per_step"] for row in steps)
        found[f"tokens a pass, epoch {epoch}"] = sum(row["tokens/generated"] for row in steps) / passes
    return found


STUDIES = [
    Study(
        name="drafts",
        config="configs/sums.yaml",
        common=[
            "model.matmul_precision=highest", "max_steps=48", "evaluation.eval_steps=12", "task.test_size=512",
            "save.save_steps=12", "save.save_total_limit=1",
        ],
        arms=[Arm("plain"), Arm("drafts", ["accelerators.enabled=[drafts]"]), *fewer_prompts(16)],
        levels=(0.5, 0.6),
        measure=measure,
    )
]  # fmt: skip
