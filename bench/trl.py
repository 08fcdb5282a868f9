"""Training steps against TRL's GRPOTrainer: same policy, prompts, rewards, loss and optimizer, both on the CPU.

Every trainer has its own process and takes one step a turn. The learning rate is so small that all of them answer as
the base policy throughout; each samples its own answers, so only mean lengths agree. The row of the rollout is
generation, that of the update everything else: rewards, loss, gradients, optimizer and accelerators.

The workload of real size has one more trainer of TRL. On a CPU TRL applies the output layer to prompts too; "head on
answers" does not, as TRL on a GPU: it is the fair rival. The other vocabularies are too small for a difference. If
RLKERNELS_VLLM_PYTHON names a Python with vLLM, one trainer of that workload generates with a vLLM server on the same
cores; its rollout includes sending the weights. The rows of that workload have the share of a large product's rate:
two operations a weight and generated token in generation, six in the update. Prompts and recomputation do not count.

``--only`` picks workloads by their shapes: "1.6 M", "sums", "135 M".
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig

from bench import Measurement, Row, matmul_rate
from bench._trl import Step, run_ours, run_trl, run_trl_on_answers
from bench._turns import Worker
from bench._vllm_server import VLLMServer
from python_trainer import Config, load_config
from python_trainer.model.hub import SHIPPED
from python_trainer.model.loading import described_model

WARM_UP_STEPS = 3  # after which accelerators have seen every prompt
STEPS = 10
LARGE_STEPS = 3  # of the workload of real size, after one warm-up step: they are long
NUM_GENERATIONS = 8
VLLM_PYTHON = os.environ.get("RLKERNELS_VLLM_PYTHON")  # of an environment with vLLM, to time its generation too
COMMON = ["optimizer.learning_rate=1.0e-6", "optimizer.warmup_steps=0", "max_steps=1000", "max_seconds=null"]
ROUNDED = ", bfloat16 products"


@dataclass
class Workload:
    """A training workload, and the trainers to compare on it.

    Float32 with exact products, and with bfloat16 products; with a number of ``weights``, bfloat16 throughout.
    """

    name: str
    config: Config
    accelerators: list[list[str]] = field(default_factory=list)
    weights: int | None = None

    @property
    def shape(self) -> str:
        rollout = self.config.rollout
        answers = f"{rollout.prompts_per_step} x {rollout.num_generations}"
        return f"{self.name}: {answers}, up to {rollout.max_completion_length}"


def even(prompts: list, completions: list, completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the reward of random answers: the share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def random_policy(folder: Path, config: PretrainedConfig, settings: list[str]) -> Config:
    """Make the settings of a random policy with random prompts of 10 to 20 tokens."""
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SHIPPED / "sums").save_pretrained(folder)
    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789+", k=rng.randint(10, 20))) for _ in range(64)]
    for split in ("train", "test"):
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    files = [f"task.{split}_path={folder / split}.jsonl" for split in ("train", "test")]
    return load_config(None, [
        *COMMON, *files, "task.name=jsonl", "task.reward=bench.trl:even", f"model.path={folder}",
        f"rollout.num_generations={NUM_GENERATIONS}", *settings,
    ])  # fmt: skip


def small(folder: Path) -> Workload:
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    model = AutoConfig.from_pretrained(SHIPPED / "sums", dtype="float32", **layers)
    settings = ["rollout.prompts_per_step=16", "rollout.max_completion_length=64"]
    return Workload("1.6 M parameters, random answers", random_policy(folder, model, settings))


def real_size(folder: Path) -> Workload:
    """Make the workload in the shape of SmolLM2-135M, in bfloat16; nearly all answers have the full length."""
    model = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, rms_norm_eps=1e-5,
        dtype="bfloat16",
    )  # fmt: skip
    settings = ["rollout.prompts_per_step=4", "rollout.max_completion_length=126", "model.dtype=bfloat16"]
    config = random_policy(folder, model, settings)
    weights = sum(p.numel() for p in described_model(config.model).parameters())
    return Workload("135 M parameters, random answers", config, weights=weights)


def workloads(folder: Path, quick: bool) -> Iterator[Workload]:
    yield small(folder / "small")
    if not quick:
        prompts = ["task.train_size=64", "model.matmul_precision=highest"]
        config = load_config("configs/sums.yaml", [*COMMON, *prompts])
        yield Workload("sums, 1.2 M parameters", config, [["drafts"], ["rpo", "drafts"]])
        yield real_size(folder / "real")


@contextmanager
def vllm_server(work: Workload, folder: Path) -> Iterator[str | None]:
    """Start a vLLM server of the policy with the threads of the trainers; return its address, or None without vLLM."""
    if not (work.weights and VLLM_PYTHON):
        yield None
        return
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    options = ("--no-enforce-eager", "--dtype", str(work.config.model.dtype))
    server = VLLMServer(VLLM_PYTHON, Path(work.config.model.path), folder / "vllm.log", 1 << 30, *options)
    try:
        server.start()
        yield server.url
    finally:
        server.kill()


def providers(work: Workload, folder: Path, server: str | None = None) -> dict[str, Worker]:
    """Make the trainers, each with its own folder.

    Args:
        server: address of a vLLM server that generates for one of them.
    """
    rounded = work.config.model_copy(deep=True)
    rounded.model.matmul_precision = "medium"
    configs = {"": work.config} if work.weights else {"": work.config, ROUNDED: rounded}
    workers: dict[str, Worker] = {}

    def add(name: str, train: Callable[..., None], config: Config, *options: Any) -> None:
        workers[name] = Worker(train, config.model_dump(mode="json"), folder / str(len(workers)), *options)

    if find_spec("trl") is not None:
        for kind, config in configs.items():
            add(f"TRL {version('trl')}{kind}", run_trl, config)
        if work.weights:
            add(f"TRL {version('trl')}, head on answers", run_trl_on_answers, work.config)
    for kind, config in configs.items():
        add(f"python_trainer{kind}", run_ours, config)
    for names in work.accelerators:
        accelerated = rounded.model_copy(deep=True)
        accelerated.accelerators.enabled = names
        add(f"python_trainer with {', '.join(names)}{ROUNDED}", run_ours, accelerated)
    if server is not None:
        served = work.config.model_copy(deep=True)
        served.rollout.engine = "vllm"
        served.rollout.vllm_server = [server]
        add("python_trainer, generation by vLLM", run_ours, served)
    return workers


def measure(workers: dict[str, Worker], warm_up: int, steps: int) -> dict[str, list[Step]]:
    """Run the steps of every trainer after the warm-up, one each in turn."""
    step_reports: dict[str, list[Step]] = {name: [] for name in workers}
    try:
        for worker in workers.values():
            for _ in range(1 + warm_up):  # the first turn ends before the first step
                worker.turn()
        for _ in range(steps):
            for name, worker in workers.items():
                worker.turn()
                step_reports[name].append(worker.report)
    finally:
        for worker in workers.values():
            worker.stop()
    return step_reports


# op -> seconds of a step, and operations a weight and token
OPS: dict[str, tuple[Callable[[Step], float], int]] = {
    "training step": (lambda step: step.seconds, 8),
    "rollout of a step": (lambda step: step.rollout_s, 2),
    "update of a step": (lambda step: step.seconds - step.rollout_s, 6),
}


def rows(work: Workload, step_reports: dict[str, list[Step]]) -> Iterator[Row]:
    """Give the rows of steps, of rollouts and of updates."""
    rate = matmul_rate(torch.bfloat16, 2048) if work.weights else 0.0
    dtype = "bfloat16" if work.weights else "float32"
    for op, (seconds_of, operations) in OPS.items():
        for name, steps in step_reports.items():
            tokens = fmean(step.generated_tokens for step in steps)
            row = Row(op, name, work.shape, dtype).timed([*map(seconds_of, steps)])
            token_rate = tokens / median(map(seconds_of, steps))
            row.extra = f"{token_rate:.0f} tokens/s"
            if work.weights:
                achieved = operations * work.weights * token_rate
                row.extra += f", {achieved / 1e9:.0f} GFLOP/s, {achieved / rate:.0%} of a large product"
            if op == "training step":
                row.peak_bytes = max((step.peak_bytes for step in steps if step.peak_bytes is not None), default=None)
            yield row
        if op == "training step" and find_spec("trl") is None:
            yield Row(op, "TRL", work.shape, dtype, missing="pip install trl")


def train(work: Workload, folder: Path, quick: bool) -> Iterator[Row]:
    """Train on a workload, and give its rows."""
    warm_up, steps = (1, LARGE_STEPS) if work.weights else (WARM_UP_STEPS, 2 if quick else STEPS)
    with vllm_server(work, folder) as server:
        step_reports = measure(providers(work, folder / work.name, server), warm_up, steps)
    yield from rows(work, step_reports)


def cases(quick: bool) -> Iterator[Measurement]:
    with TemporaryDirectory() as folder:
        for work in workloads(Path(folder), quick):
            yield Measurement([work.shape], partial(train, work, Path(folder), quick))
