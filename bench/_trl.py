"""TRL's GRPOTrainer on the settings of python_trainer, and the time and memory of a step of either trainer."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from bench._runner import reset_resident_peak, resident_peak
from bench._turns import Turns
from python_trainer import Callback, Config, Trainer, load_config
from python_trainer.model.hub import policy_folder
from python_trainer.model.loading import dtype_name, find_dtype
from python_trainer.model.precision import set_matmul_precision

TRL_BATCH = 32  # answers in a forward and backward pass: the fastest of 32, 64, 128 for TRL on both workloads

# settings of python_trainer, by section, that TRL has by the same names
SHARED = {
    "rollout": ("num_generations", "max_completion_length", "temperature", "top_p", "top_k"),
    "algorithm": ("loss_type", "epsilon", "epsilon_high", "delta", "beta", "num_iterations", "scale_rewards",
                  "mask_truncated_completions"),
    "optimizer": ("learning_rate", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
                  "max_grad_norm"),
}  # fmt: skip

# target and value of a patch: TRL applies the output layer to answers only, as it does on a GPU
HEAD_ON_ANSWERS = "trl.trainer.utils._use_triton", lambda device: True


def make_grpo_trainer(config: Config, folder: Path, *, batch: int = TRL_BATCH, callbacks: Sequence[Any] = ()) -> Any:
    """Make TRL's trainer with the same policy, prompts, rewards, loss and optimizer, in float32 and on the CPU.

    Args:
        config: of a GRPO run that TRL supports: no accelerators, no critic, no filters.
        batch: answers in one forward and backward pass, at most.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class SameWarmUp(TrainerCallback):
        """Give the first step the learning rate of one warm-up step, not 0."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the scheduler steps before the optimizer on purpose
                kwargs["lr_scheduler"].step()

    shared = {name: getattr(getattr(config, section), name) for section, names in SHARED.items() for name in names}
    batch_answers = config.rollout.prompts_per_step * config.rollout.num_generations
    batch = min(batch, batch_answers)
    task = config.task.load()
    path = policy_folder(config.model.path)
    dtype = dtype_name(find_dtype(config.model, torch.device("cpu")))
    arguments = GRPOConfig(
        output_dir=str(folder), seed=config.seed, max_steps=config.max_steps, **shared,
        per_device_train_batch_size=batch, gradient_accumulation_steps=batch_answers // batch,
        lr_scheduler_type="constant_with_warmup", model_init_kwargs={"dtype": dtype},
        bf16=False, use_cpu=True, gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no",
    )  # fmt: skip
    assert config.optimizer.lr_scheduler_type == "constant", "the schedule of TRL's trainer here"
    names = {name for example in task.train for name in example.columns}
    columns = {name: [example.columns[name] for example in task.train] for name in sorted(names)}
    prompts = Dataset.from_dict({"prompt": [example.prompt for example in task.train], **columns})
    trainer = GRPOTrainer(
        model=str(path), args=arguments, train_dataset=prompts,
        reward_funcs=list(task.reward_functions.values()), callbacks=[SameWarmUp(), *callbacks],
    )  # fmt: skip
    set_matmul_precision(config.model.matmul_precision)
    return trainer


@dataclass(frozen=True)
class Step:
    """Time and memory of one training step."""

    seconds: float
    rollout_s: float  # seconds of generation among them
    peak_bytes: int | None  # above the memory held before
    generated_tokens: int


class Meter(Callback):
    """Make each training step a turn, and report it as a :class:`Step`."""

    def __init__(self, turns: Turns):
        self.turns = turns

    def begin(self) -> None:
        self.turns.end_turn()
        self._start()

    def _start(self) -> None:
        self.resident = reset_resident_peak()
        self.start = time.perf_counter()

    def end(self, rollout_s: float, generated_tokens: int) -> None:
        seconds = time.perf_counter() - self.start
        peak = None if self.resident is None else resident_peak() - self.resident
        self.turns.end_turn(Step(seconds, rollout_s, peak, generated_tokens))
        self._start()

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.begin()  # the only evaluation is that before the first step

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.end(metrics["time/rollout_s"], int(metrics["tokens/generated"]))


def run_ours(turns: Turns, values: dict[str, Any], folder: Path) -> None:
    """Train without end with this trainer, a step in each turn.

    Args:
        values: all settings; as a dictionary they can be sent to another process.
    """
    config = load_config(values, ["task.test_size=1", "evaluation.eval_steps=0", "save.save_steps=0"])
    Trainer(config, folder, console=Console(quiet=True), callbacks=[Meter(turns)]).run()


def run_trl(turns: Turns, values: dict[str, Any], folder: Path) -> None:
    """Train without end with TRL's trainer, a step in each turn."""
    from transformers import TrainerCallback

    meter = Meter(turns)

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end(generation.seconds, generation.tokens)

    trainer = make_grpo_trainer(load_config(values), folder, callbacks=[Steps()])
    generation = Generation(trainer)
    trainer.train()


def run_trl_on_answers(turns: Turns, values: dict[str, Any], folder: Path) -> None:
    """Train as :func:`run_trl`, with the output layer applied to answers only."""
    with patch(*HEAD_ON_ANSWERS):
        run_trl(turns, values, folder)


class Generation:
    """Measures the generation of TRL's trainer: seconds and tokens of the last call."""

    def __init__(self, trainer: Any):
        self.seconds = 0.0
        self.tokens = 0
        self._generate = trainer._generate_single_turn
        trainer._generate_single_turn = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        ids, logprobs = self._generate(*arguments, **options)
        self.seconds = time.perf_counter() - start
        self.tokens = sum(map(len, ids))
        return ids, logprobs
