"""Record the rollouts of a training run, for replays: ``python -m bench._trace OUT.npz [--config FILE] [--set ...]``.

With RLKERNELS_TRACE=OUT.npz, ``python -m bench history`` replays them. An epoch is one visit to every prompt.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from python_trainer.accelerators.base import Accelerator, StepContext
from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.config import Config, load_config
from python_trainer.data import Rollout
from python_trainer.trainer import Trainer

DEFAULTS = ["max_seconds=null", "evaluation.eval_steps=0", "task.test_size=1", "save.save_steps=0"]


class RecorderSettings(AcceleratorSettings):
    name = "recorder"


class Recorder(Accelerator):
    """Collect every rollout and change nothing."""

    def __init__(self) -> None:
        super().__init__(RecorderSettings())
        self.rollouts: list[tuple[int, Rollout]] = []

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        self.rollouts += [(context.step, rollout) for rollout in rollouts]
        return rollouts


def flatten_rows(rows: list[list[int]]) -> dict[str, np.ndarray]:
    return {"ids": np.concatenate(rows).astype(np.int32), "lengths": np.array([len(row) for row in rows])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, default="configs/sums.yaml")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    record(load_config(arguments.config, [*DEFAULTS, *arguments.set]), arguments.out)


def record(config: Config, out: Path) -> None:
    """Train, and write the rollouts of all steps."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, Path(folder) / "run")
        trainer.accelerators.append(recorder)
        trainer.run()
    rollouts = [rollout for _, rollout in recorder.rollouts]
    per_epoch = len(trainer.prompts.ids["train"]) / config.rollout.prompts_per_step
    columns: dict[str, Any] = {f"prompt_{k}": v for k, v in flatten_rows(trainer.prompts.ids["train"]).items()}
    columns |= {f"answer_{k}": v for k, v in flatten_rows([r.response_ids for r in rollouts]).items()}
    np.savez_compressed(
        out,
        key=np.array([r.prompt_index for r in rollouts]),
        reward=np.array([r.reward for r in rollouts]),
        step=np.array([step for step, _ in recorder.rollouts]),
        epoch=np.array([int((step - 1) / per_epoch) for step, _ in recorder.rollouts]),
        **columns,
    )


if __name__ == "__main__":
    main()
