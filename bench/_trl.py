"""TRL's GRPOTrainer on the settings of python_trainer, and both trainers step by step in processes of their own."""

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from bench._runner import reset_resident_peak, resident_peak
from bench._vllm_server import VLLMServer
from python_trainer.config import Config
from python_trainer.model.loading import choose_dtype, count_weights, policy_folder
from python_trainer.model.policy import set_matmul_precision
from python_trainer.trainer import Trainer

TRL_BATCH = 32  # answers in a forward and backward pass: the fastest of 32, 64, 128 for TRL on both workloads


def make_grpo_trainer(config: Config, folder: Path, *, batch: int, callbacks: Sequence[Any] = ()) -> Any:
    """TRL's trainer with the same policy, prompts, rewards, loss and optimizer, in float32 and on the CPU.

    Args:
        config: of a run of GRPO that TRL can do: no accelerators, no critic, no filters.
        batch: answers in one forward and backward pass.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class SameWarmUp(TrainerCallback):
        """The first step has a learning rate of one warm-up step, not of 0."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a scheduler that steps before the optimizer, which is the point
                kwargs["lr_scheduler"].step()

    rollout, algorithm, optimizer = config.rollout, config.algorithm, config.optimizer
    answers = rollout.prompts_per_step * rollout.num_generations
    task, path = config.task.load(), policy_folder(config.model.path, config.model.revision)
    weights = partial(count_weights, path, config.model)
    dtype = str(choose_dtype(config.model.dtype, torch.device("cpu"), weights)).removeprefix("torch.")
    arguments = GRPOConfig(
        output_dir=str(folder), seed=config.seed, max_steps=config.max_steps,
        per_device_train_batch_size=batch, gradient_accumulation_steps=answers // batch,
        num_generations=rollout.num_generations, max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k,
        loss_type=algorithm.loss_type, epsilon=algorithm.epsilon, epsilon_high=algorithm.epsilon_high,
        delta=algorithm.delta, beta=algorithm.beta, num_iterations=algorithm.num_iterations,
        scale_rewards=algorithm.scale_rewards, mask_truncated_completions=algorithm.mask_truncated_completions,
        learning_rate=optimizer.learning_rate, warmup_steps=optimizer.warmup_steps,
        lr_scheduler_type="constant_with_warmup", weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1, adam_beta2=optimizer.adam_beta2, adam_epsilon=optimizer.adam_epsilon,
        max_grad_norm=optimizer.max_grad_norm, model_init_kwargs={"dtype": dtype},
        bf16=False, use_cpu=True, gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no",
    )  # fmt: skip
    assert optimizer.lr_scheduler_type == "constant", "the schedule of TRL's trainer here"
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
    """What one training step took."""

    seconds: float
    rollout_s: float  # of those, in generation
    cpu_s: float  # of all threads of the process
    peak_bytes: int | None  # above what was held before
    generated_tokens: int


class Finished(Exception):
    """The other side wants no more steps."""


class Meter:
    """Waits for leave to do a step, and reports what it took."""

    def __init__(self, connection: Connection):
        self.connection = connection

    def begin(self) -> None:
        self.connection.send(None)  # ready
        if not self.connection.recv():
            raise Finished
        self.held = reset_resident_peak()
        self.cpu, self.start = time.process_time(), time.perf_counter()

    def end(self, rollout_s: float, generated_tokens: int) -> None:
        seconds, cpu_s = time.perf_counter() - self.start, time.process_time() - self.cpu
        peak = None if self.held is None else resident_peak() - self.held
        self.connection.send(Step(seconds, rollout_s, cpu_s, peak, generated_tokens))


def run_ours(config: Config, folder: Path, meter: Meter) -> None:
    config = config.model_copy(update={"max_steps": config.max_steps + 1})
    trainer = Trainer(config, folder / "run", console=Console(quiet=True))
    (folder / "run").mkdir()
    trainer.begin()
    with trainer.logger.recording():
        for number in range(1, config.max_steps):  # the last step would evaluate and save
            meter.begin()
            row = trainer.step(number)
            meter.end(row["time/rollout_s"], int(row["tokens/generated"]))


def run_with_vllm(config: Config, folder: Path, meter: Meter, python: str) -> None:
    """:func:`run_ours`, its answers generated by a vLLM server of this Python, with as many threads."""
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    dtype = str(config.model.dtype)
    server = VLLMServer(
        python, Path(config.model.path), folder / "log", 1 << 30, "--no-enforce-eager", "--dtype", dtype
    )
    try:
        server.start()
        config.rollout.engine, config.rollout.vllm_server = "vllm", server.url
        run_ours(config, folder, meter)
    finally:
        server.kill()


def run_trl(config: Config, folder: Path, meter: Meter, batch: int) -> None:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end(generation.seconds, generation.tokens)

    trainer = make_grpo_trainer(config, folder, batch=batch, callbacks=[Steps()])
    generation = Generation(trainer)
    trainer.train()


class Generation:
    """Watches the generation of a trainer of TRL: what the last one took."""

    def __init__(self, trainer: Any):
        self.seconds, self.tokens = 0.0, 0
        self._generate = trainer._generate_single_turn
        trainer._generate_single_turn = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        ids, logprobs = self._generate(*arguments, **options)
        self.seconds, self.tokens = time.perf_counter() - start, sum(map(len, ids))
        return ids, logprobs


def _work(connection: Connection, run: Callable, values: dict[str, Any], threads: int, options: dict[str, Any]) -> None:
    torch.set_num_threads(threads)
    with TemporaryDirectory() as folder, connection, suppress(Finished):
        run(Config.model_validate(values), Path(folder), Meter(connection), **options)


class Worker:
    """A trainer in a process of its own, which does a step when it is told to.

    Args:
        run: :func:`run_ours`, :func:`run_with_vllm` or :func:`run_trl`.
        options: of ``run``.
    """

    def __init__(self, run: Callable, config: Config, **options: Any):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # as values: the classes of its sections are made as they are needed, and cannot be pickled
        arguments = (theirs, run, config.model_dump(mode="json"), torch.get_num_threads(), options)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def wait(self) -> None:
        """Until the trainer is ready for a step; EOFError when it has failed, which it has then said itself."""
        self.connection.recv()

    def step(self) -> Step:
        """One step, which ends when the trainer is ready for the next."""
        self.connection.send(True)
        step: Step = self.connection.recv()
        self.wait()
        return step

    def stop(self) -> None:
        self.connection.send(False)
        self.process.join()
