"""This trainer against TRL's GRPOTrainer: seconds to the same accuracy.

The same policy, prompts, rewards, loss and optimizer, float32 with exact products everywhere, on one thread.
python_trainer evaluates both; the seconds exclude evaluations.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench._trl import Generation, make_grpo_trainer
from bench._turns import Turns
from bench.studies.harness import ACCURACY, SECONDS, TOKENS, Arm, Study, fewer_prompts
from python_trainer import Trainer, load_config
from python_trainer.run.run_state import device_name


def train_trl(turns: Turns, config: str, overrides: Sequence[str], folder: Path) -> None:
    """Train one run with TRL's trainer, without resumption, and write the files that the harness reads."""
    from transformers import TrainerCallback

    settings = load_config(config, overrides)
    evaluating_trainer = Trainer(settings, folder / "judge", console=Console(quiet=True))  # evaluates only
    rows: list[dict[str, float]] = []

    class Watch(TrainerCallback):
        seconds = 0.0
        tokens = 0
        turn_start = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._evaluate(0, kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds += turns.clock() - self.turn_start
            self.tokens += generation.tokens
            if state.global_step % settings.evaluation.eval_steps == 0 or state.global_step == settings.max_steps:
                self._evaluate(state.global_step, kwargs["model"])
            turns.end_turn()
            self.turn_start = turns.clock()

        def _evaluate(self, step: int, model: torch.nn.Module) -> None:
            evaluating_trainer.policy.model.load_state_dict(model.state_dict())
            evaluating_trainer.engine.policy_updated()
            accuracy = evaluating_trainer.evaluate("test")
            rows.append({"step": step, ACCURACY: accuracy, SECONDS: self.seconds, TOKENS: self.tokens})
            model.train()
            turns.end_turn()
            self.turn_start = turns.clock()

    trainer = make_grpo_trainer(settings, folder / "trl", callbacks=[Watch()])
    generation = Generation(trainer)
    trainer.train()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = rows[-1]
    summary = {"steps": last["step"], "generated_tokens": last[TOKENS], "eval_accuracy_final": last[ACCURACY]}
    (folder / "summary.json").write_text(
        json.dumps(summary | {"device": device_name(evaluating_trainer.policy.device)})
    )


STUDIES = [
    Study(
        name="trl",
        config="configs/sums.yaml",
        common=[
            "task.variant=short", "model.path=small", "model.matmul_precision=highest", "max_steps=40",
            "rollout.prompts_per_step=32", "rollout.max_completion_length=128", "optimizer.learning_rate=2e-4",
            "evaluation.eval_steps=4", "task.test_size=1024", "evaluation.eval_limit_during=1024",
        ],
        arms=[
            Arm("TRL", train=train_trl),
            Arm("python_trainer"),
            *fewer_prompts(32),
            Arm("python_trainer, all accelerators", ["accelerators.enabled=[rpo,rhyme,drafts,alpha]"]),
        ],
        levels=(0.8, 0.85),
    )
]  # fmt: skip
