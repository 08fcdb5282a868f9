"""RhymeRL on `lattice_paths`, with GRPO and with PPO: history of the run itself, and of a smaller policy's run.

Every arm reads a copy of the database that the smaller run has left; its tokens and seconds are shown apart. *s of
rhyme*: seconds within the accelerator, of all that the run took. Shares are of the stages that stage 1 keeps.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench._turns import Turns
from bench.studies import harness
from bench.studies.harness import Arm, Study, fewer_prompts
from tools.policies import lattice_paths

DATABASE = "accelerators.rhyme.database"
RHYME = ["accelerators.enabled=[rhyme]"]
PPO = ["algorithm.advantage=gae", "algorithm.lam=1.0", "critic.learning_rate=1e-3"]


def prepare(work: Path) -> None:
    """Make the policy of a quarter of the weights, whose run comes first."""
    if not (work / "small" / "tokenizer.json").exists():
        lattice_paths.main(["--size", "small", "--output", str(work / "small")])


def train(turns: Turns, config: str, overrides: Sequence[str], folder: Path) -> None:
    """Train a run on a database of its own, which begins as a copy of the one that its settings name, if any."""
    own = folder.with_name(f"{folder.name}.db")
    named = dict(text.split("=", 1) for text in overrides).get(DATABASE)
    if named is not None and not own.exists():
        shutil.copy(named, own)
    harness.train(turns, config, [*overrides, f"{DATABASE}={own}"], folder)


def measure(run: Path) -> dict[str, float]:
    """Return what the accelerator took of the run's seconds."""
    summary = json.loads((run / "summary.json").read_text())
    spent = summary["accelerator_s"].get("rhyme", 0.0)
    return {"s of rhyme": spent, "share of rhyme": spent / summary["training_s"]}


def after(name: str, *settings: str) -> Arm:
    """An arm that has the database of the smaller run."""
    return Arm(name, [*RHYME, f"{DATABASE}={{earlier}}.db", *settings], after="smaller", train=train)


def arms() -> list[Arm]:
    chosen = [f"accelerators.rhyme.{setting}" for setting in ("selection=random", "selection=retrodiction")]
    shares = [(share, f"accelerators.rhyme.fraction={share / 100}") for share in (5, 100)]
    return [
        Arm("plain"),
        *fewer_prompts(16),
        Arm("rhyme", RHYME),
        after("rhyme after the smaller run"),
        *(after(f"after it, {text.rpartition('.')[2].replace('=', ' ')}", text) for text in chosen),
        *(after(f"after it, {share} % of stages", text) for share, text in shares),
    ]


STUDIES = [
    Study(
        name=name,
        config="configs/lattice_paths.yaml",
        common=["max_steps=160", "task.test_size=2048", "save.save_total_limit=1", *settings],
        arms=arms(),
        levels=(0.6, 0.7),
        earlier=[Arm("smaller", ["model.path={work}/small"], rate=2.8e-4, train=train)],
        rates=(1.4e-4, 2.8e-4, 5.6e-4),
        tuning_steps=60,
        prepare=prepare,
        columns={"stored": "rhyme/stored_answers", "rehearsed": "rhyme/rehearsed_answers"},
        measure=measure,
    )
    for name, settings in (("grpo", []), ("ppo", PPO))
]
