"""Training steps against TRL's GRPOTrainer: same policy, prompts, rewards, loss and optimizer, both on the CPU.

Every trainer lives in a process of its own and does one step when it is its turn. The learning rate is small, so that
all of them answer as the base policy does throughout; each draws its own answers, so lengths agree in the mean only.
A row of the rollout is generation, one of the update everything else: rewards, loss, gradients, optimizer, and what
the accelerators do. The workload of real size also says what share of a large product's rate the products that
generated tokens need come to: two operations a weight and token in generation, six in the update. Prompts and what is
computed twice do not count.
"""

import json
import random
import timeit
from collections.abc import Iterator
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

from bench import Row
from bench._runner import quantile
from bench._trl import TRL_BATCH, Step, Worker, run_ours, run_trl
from python_trainer.config import Config, load_config
from python_trainer.model.dtype import count_weights
from python_trainer.model.shipped import SHIPPED

WARM_UP = 3  # steps; accelerators have seen every prompt by then
STEPS = 10
LARGE_STEPS = 3  # of the workload of real size, after one that warms up: they are long
SAMPLES = 8
COMMON = ["optimizer.learning_rate=1.0e-6", "optimizer.warmup_steps=0", "max_steps=1000", "max_seconds=null"]
ROUNDED = ", bfloat16 products"


@dataclass
class Workload:
    """What is trained, and which trainers are compared on it.

    Float32 with exact products, and in turn with those of bfloat16; but with ``weights``, a number, in bfloat16.
    """

    name: str
    config: Config
    accelerators: list[list[str]] = field(default_factory=list)
    weights: int | None = None


def even(prompts: list, completions: list, completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward for random answers: share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def random_policy(folder: Path, config: PretrainedConfig, settings: list[str]) -> Config:
    """A random policy with random prompts of 10 to 20 tokens."""
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SHIPPED / "main").save_pretrained(folder)
    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789+", k=rng.randint(10, 20))) for _ in range(64)]
    for split in ("train", "test"):
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    files = [f"task.{split}_path={folder / split}.jsonl" for split in ("train", "test")]
    return load_config(None, [
        *COMMON, *files, "task.name=jsonl", "task.reward=bench.trl:even", f"model.path={folder}",
        f"rollout.num_generations={SAMPLES}", *settings,
    ])  # fmt: skip


def small(folder: Path) -> Workload:
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    model = AutoConfig.from_pretrained(SHIPPED / "main", dtype="float32", **layers)
    settings = ["rollout.prompts_per_step=16", "rollout.max_completion_length=64"]
    return Workload("1.6 M parameters, random answers", random_policy(folder, model, settings))


def real_size(folder: Path) -> Workload:
    """The shape of SmolLM2-135M, in bfloat16; answers almost never end before their limit."""
    model = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, rms_norm_eps=1e-5,
        dtype="bfloat16",
    )  # fmt: skip
    settings = ["rollout.prompts_per_step=4", "rollout.max_completion_length=126", "model.dtype=bfloat16"]
    config = random_policy(folder, model, settings)
    return Workload("135 M parameters, random answers", config, weights=count_weights(folder, config.model))


def workloads(folder: Path, quick: bool) -> Iterator[Workload]:
    yield small(folder / "small")
    if not quick:
        prompts = ["task.train_size=64", "model.matmul_precision=highest"]
        config = load_config("configs/arithmetic.yaml", [*COMMON, *prompts])
        yield Workload("arithmetic, 1.2 M parameters", config, [["drafts"], ["rpo", "drafts"]])
        yield real_size(folder / "real")


def providers(work: Workload) -> dict[str, partial[Worker]]:
    rounded = work.config.model_copy(deep=True)
    rounded.model.matmul_precision = "medium"
    configs = {"": work.config} if work.weights else {"": work.config, ROUNDED: rounded}
    found = {}
    if find_spec("trl") is not None:
        name = f"TRL {version('trl')}"
        found = {name + kind: partial(Worker, run_trl, x, batch=TRL_BATCH) for kind, x in configs.items()}
    found |= {"python_trainer" + kind: partial(Worker, run_ours, x) for kind, x in configs.items()}
    for names in work.accelerators:
        accelerated = rounded.model_copy(deep=True)
        accelerated.accelerators.enabled = names
        found[f"python_trainer with {', '.join(names)}{ROUNDED}"] = partial(Worker, run_ours, accelerated)
    return found


def measure(makers: dict[str, partial[Worker]], warm_up: int, steps: int) -> dict[str, list[Step]]:
    """Steps of every provider after the warm-up, one each in turn."""
    workers = {name: make() for name, make in makers.items()}
    for worker in workers.values():
        worker.wait()
    for worker in workers.values():
        for _ in range(warm_up):
            worker.step()
    taken: dict[str, list[Step]] = {name: [] for name in workers}
    for _ in range(steps):
        for name, worker in workers.items():
            taken[name].append(worker.step())
    for worker in workers.values():
        worker.stop()
    return taken


def product_rate() -> float:
    """Operations per second of a large product in bfloat16, at its best."""
    x = torch.randn(2048, 2048).bfloat16()
    return 2 * 2048**3 / min(timeit.repeat(lambda: x @ x, number=1, repeat=10))


def rows(work: Workload, taken: dict[str, list[Step]]) -> Iterator[list[Row]]:
    """A table each of whole steps, rollouts and updates."""
    rate = product_rate() if work.weights else 0.0
    rollout = work.config.rollout
    shape = (
        f"{work.name}: {rollout.prompts_per_step} x {rollout.num_generations}, up to {rollout.max_completion_length}"
    )
    tables: dict[str, list[Row]] = {"training step": [], "rollout of a step": [], "update of a step": []}
    for name, steps in taken.items():
        tokens = fmean(step.generated_tokens for step in steps)
        seconds = [step.seconds for step in steps], [step.rollout_s for step in steps]
        parts = [*seconds, [a - b for a, b in zip(*seconds)]]
        for (op, table), values, count in zip(tables.items(), parts, (8, 2, 6), strict=True):
            whole, extra = op == "training step", f"{tokens / median(values):.0f} tokens/s"
            if work.weights:
                reached = count * work.weights * tokens / median(values)
                extra += f", {reached / 1e9:.0f} GFLOP/s, {reached / rate:.0%} of a large product"
            table.append(Row(
                op, name, shape, "bfloat16" if work.weights else "float32", median_s=median(values),
                q20_s=quantile(values, 0.2), q80_s=quantile(values, 0.8), extra=extra,
                peak_bytes=max(step.peak_bytes or 0 for step in steps) if whole else None,
            ))  # fmt: skip
    if find_spec("trl") is None:
        tables["training step"].append(Row("training step", "TRL", shape, missing="pip install trl"))
    yield from tables.values()


def cases(quick: bool) -> Iterator[list[Row]]:
    with TemporaryDirectory() as folder:
        for work in workloads(Path(folder), quick):
            warm_up, steps = (1, LARGE_STEPS) if work.weights else (WARM_UP, 2 if quick else STEPS)
            yield from rows(work, measure(providers(work), warm_up, steps))
