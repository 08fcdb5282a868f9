"""Steps of the trainer with its presets for 24 GB, under that limit, and with FSDP2 over NCCL in one process.

The models have the shapes of the presets, random weights, and a tokenizer with the same vocabulary size. All answers
have half the length limit of the presets, and the plan is for these.
"""

import gc
import json
import random
import statistics
import string
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

Message = dict[str, Any]
NAMES = ("gpu_0.5b_24gb", "gpu_1.5b_lora_24gb")
GPU = "24"  # GB
PROMPT_LENGTH = 256  # tokens
STEPS = 3
LETTERS = string.ascii_lowercase
HALF = ("rollout.max_completion_length=256",)
# in a rehearsal
FEW = ("rollout.prompts_per_step=2", "rollout.num_generations=2", "rollout.max_completion_length=4",
       "rollout.memory_bytes=1048576", "optimizer.micro_batch_tokens=64")  # fmt: skip
SHARDED = ("model.path=small", "model.dtype=float32", "task.name=sums", "task.variant=short", "save.save_steps=0",
           "rollout.engine=paged", "rollout.prompts_per_step=8", "rollout.num_generations=4",
           "rollout.max_completion_length=16", "task.train_size=16", "task.test_size=1")  # fmt: skip


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return the reward of random answers: whether the first token is even."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def write_policy(folder: Path, size: Any, device: torch.device) -> None:
    """Write a model of this size and a tokenizer: each letter is a token, all other tokens are unused words."""
    from transformers import Qwen2Tokenizer

    from bench.gpu.model import make_model

    last = size.config["vocab_size"] - 1
    words = {letter: i for i, letter in enumerate(LETTERS)} | {f"word{i}": i for i in range(len(LETTERS), last)}
    special: dict[str, Any] = {"pad_token": "<eos>", "eos_token": "<eos>", "unk_token": None}
    Qwen2Tokenizer(vocab=words | {"<eos>": last}, merges=[], **special).save_pretrained(folder)
    make_model(size, device).save_pretrained(folder)


def write_prompts(path: Path, count: int, length: int) -> None:
    generator = random.Random(0)
    rows = ["".join(generator.choices(LETTERS, k=length)) for _ in range(count)]
    path.write_text("".join(json.dumps({"question": row}) + "\n" for row in rows))


class Peaks:
    """Peak memory of generation and of the update, and the metrics of the steps.

    ``on_rollouts`` separates the two.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.phases = dict[str, int]()
        self.steps = list[Mapping[str, float]]()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # of the run before, in the same process

    def note(self, phase: str) -> None:
        if self.device.type == "cuda":
            self.phases[phase] = max(self.phases.get(phase, 0), torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)


def steps(config: Any, folder: Path, device: torch.device, ranks: Any = None) -> Peaks:
    """Take ``STEPS`` steps, without evaluations."""
    from rich.console import Console

    from python_trainer import Callback, Trainer

    peaks = Peaks(device)

    class Watch(Callback):
        def on_rollouts(self, *_: Any) -> None:
            peaks.note("generation")

        def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
            peaks.note("the update")
            peaks.steps.append(dict(metrics))

    trainer = Trainer(config, folder, callbacks=[Watch()], console=Console(quiet=True), ranks=ranks)
    with trainer.checkpointer.owning_folder():
        trainer.state.start_clock()
        with closing(trainer.engine), trainer.logger.recording(None):
            for number in range(1, STEPS + 1):
                trainer.step(number)
    return peaks


@contextmanager
def card(limit: int, device: torch.device) -> Iterator[None]:
    """Make the GPU appear to have ``limit`` bytes, for torch's allocator and for queries."""
    properties = torch.cuda.get_device_properties(device)
    values = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
    limited = SimpleNamespace(**values | {"total_memory": limit})
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / properties.total_memory, device)
    with patch.multiple(
        torch.cuda, get_device_properties=lambda *_: limited,
        mem_get_info=lambda *_: (limit - torch.cuda.memory_reserved(device), limit),
    ):  # fmt: skip
        yield


def preset(name: str, device: torch.device) -> Message:
    """Return a step's time, the peaks of its phases, and what ``train --dry-run --gpus 24`` plans for them."""
    from bench.gpu.journal import ROOT
    from bench.gpu.model import QWEN, TINY
    from bench.gpu.updates import SIZES
    from python_trainer import load_config
    from python_trainer.loop.memory import parse_gpus, plan_memory

    on_gpu = device.type == "cuda"
    shape = SIZES["Qwen2.5-1.5B" if "1.5b" in name else "Qwen2.5-0.5B"]
    size = replace(QWEN, config={**QWEN.config, **shape}) if on_gpu else TINY
    limit = parse_gpus(GPU)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_policy(folder / "model", size, device)
        length = PROMPT_LENGTH if on_gpu else 5
        for split in ("train", "test"):
            write_prompts(folder / f"{split}.jsonl", 64, length)
        settings = [
            f"model.path={folder / 'model'}", f"model.device={device.type}", "task.chat=false",
            f"task.train_path={folder / 'train.jsonl'}", f"task.test_path={folder / 'test.jsonl'}",
            "task.reward=bench.gpu.presets:reward", "rollout.engine=paged", f"max_steps={STEPS + 1}",
            "evaluation.eval_steps=0", "save.save_steps=0", *(HALF if on_gpu else FEW),
        ]  # fmt: skip
        config = load_config(ROOT / f"configs/{name}.yaml", settings)
        plan = plan_memory(config, limit, prompt=length)
        with card(limit.memory, device) if on_gpu else nullcontext():
            peaks = steps(config, folder / "run", device)
    peak = max(peaks.phases.values(), default=None)
    return {
        "ok": len(peaks.steps) == STEPS, "peak_bytes": peak, "peaks": peaks.phases, "planned": plan.phases,
        "of_plan": None if peak is None else peak / max(plan.phases.values()), **times(peaks.steps),
    }  # fmt: skip


def times(rows: Sequence[Mapping[str, float]]) -> Message:
    """Return the medians of all steps but the first, which compiles and records."""
    medians = {
        phase: statistics.median(row.get(f"time/{phase}_s", 0.0) for row in rows[1:]) for phase in ("rollout", "train")
    }
    return {"median_s": sum(medians.values()), "rollout_s": medians["rollout"], "update_s": medians["train"]}


def sharded(device: torch.device) -> Message:
    """Return the times of steps with fsdp2 in one process, and their difference from steps without."""
    from python_trainer import load_config
    from python_trainer.distributed import start

    peaks = {}
    with tempfile.TemporaryDirectory() as folder_name:
        for parallel in ("none", "fsdp2"):
            settings = [
                *SHARDED, f"model.device={device.type}", f"parallel={parallel}", f"max_steps={STEPS + 1}",
            ]  # fmt: skip
            config = load_config({}, settings)
            with start(config.parallel, device.type) as ranks:
                peaks[parallel] = steps(config, Path(folder_name) / parallel, device, ranks)
    names = ("loss", "reward/mean", "grad_norm", "tokens/generated")
    figures = {
        name: [(row[name], sharded_row[name]) for row, sharded_row in zip(peaks["none"].steps, peaks["fsdp2"].steps)]
        for name in names if all(name in row for row in peaks["none"].steps)
    }  # fmt: skip
    pairs = [pair for metric_pairs in figures.values() for pair in metric_pairs]
    error = max((abs(a - b) / max(abs(a), 1e-3) for a, b in pairs), default=float("inf"))
    return {"ok": error <= 1e-2, "error": error, "allowed": 1e-2, "figures": figures, **times(peaks["fsdp2"].steps)}


def measure(op: str, name: str, device: torch.device) -> Message:
    """Return the row of a job of the worker."""
    return preset(name, device) if op == "preset" else sharded(device)
