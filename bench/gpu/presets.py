"""``python -m bench.gpu.presets``: a few steps by each preset ``configs/gpu_*.yaml`` for one GPU.

The model has the shape that the preset is for and random weights, so that nothing has to be fetched; prompts have 256
tokens, and a reward by chance makes some answers better than others. The record holds the seconds of a step, and the
memory that tensors took, beside what ``train --dry-run`` tells. Each preset has a process of its own.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from bench.gpu.build import run
from bench.gpu.journal import ROOT, call_facts, record_path
from bench.gpu.model import QWEN, TINY, make_model, peak_bytes
from bench.gpu.train import write
from python_trainer import Trainer, load_config
from python_trainer.distributed import start
from python_trainer.memory import PROMPT_TOKENS, device_here, plan_memory
from python_trainer.run_directory import read_metrics

SHAPES = {  # of Qwen2.5: width, width of the MLP, layers, heads, key heads
    "0.5b": (896, 4864, 24, 14, 2), "1.5b": (1536, 8960, 28, 12, 2), "3b": (2048, 11_008, 36, 16, 2),
    "7b": (3584, 18_944, 28, 28, 4),
}  # fmt: skip
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
ALL = ("accelerators.enabled=[rhyme, alpha, rpo]", "task.gate_size=16", "accelerators.alpha.first_step=2",
       "accelerators.alpha.track_steps=1", "accelerators.rpo.fill=1")  # fmt: skip
PPO = ("algorithm.advantage=gae", "algorithm.beta=0.02")
OFFLOAD = ("parallel=fsdp2", "optimizer.offload=true")
# name -> (preset, changes)
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "0.5b_24gb": ("0.5b_24gb", ()), "0.5b_24gb, offload": ("0.5b_24gb", OFFLOAD),
    "0.5b_24gb, accelerators": ("0.5b_24gb", ALL), "0.5b_24gb, PPO": ("0.5b_24gb", PPO),
    "1.5b_lora_24gb": ("1.5b_lora_24gb", ()), "1.5b_80gb": ("1.5b_80gb", ()), "3b_80gb": ("3b_80gb", ()),
    "7b_lora_80gb": ("7b_lora_80gb", ()),
}  # fmt: skip
PROMPTS = 64
FEW = ("rollout.prompts_per_step=2", "rollout.num_generations=2", "rollout.max_completion_length=4",
       "rollout.memory_bytes=1048576")  # in a dry run  # fmt: skip
RUN_S = 300.0


def chance(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward: 1 for every other answer."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def make_folder(folder: Path, shape: Sequence[int], device: torch.device) -> list[str]:
    """Writes a model and prompts -> what the settings must name."""
    size = QWEN if device.type == "cuda" else TINY
    config = {**size.config, **(dict(zip(FIELDS, shape)) if device.type == "cuda" else {})}
    make_model(replace(size, config=config), device).save_pretrained(folder / "model")
    vocab = config["vocab_size"] - 8  # special tokens that a tokenizer adds when it is read
    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(vocab)}, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0").save_pretrained(folder / "model")
    words = min(PROMPT_TOKENS, config["max_position_embeddings"] // 2)
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", PROMPTS), ("test", 4)):
        prompts = torch.randint(1, vocab, (count, words), generator=generator).tolist()
        lines = [json.dumps({"question": " ".join(map(str, prompt))}) for prompt in prompts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    data = [f"task.{name}_path={folder / name}.jsonl" for name in ("train", "test")]
    return [f"model.path={folder / 'model'}", *data]


def measured(name: str, steps: int, device: torch.device) -> dict[str, Any]:
    """Trains by a preset -> its row of the record."""
    preset, changes = RUNS[name]
    taken: dict[str, int] = {}

    def watch(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            out: list[Any] = []
            peak = peak_bytes(lambda: out.append(call(*args, **kwargs)), device)
            taken[phase] = max(peak or 0, taken.get(phase, 0))
            return out[0]

        return watched

    with TemporaryDirectory() as place:
        folder = Path(place)
        paths = make_folder(folder, SHAPES[preset.split("_")[0]], device)
        torch.cuda.empty_cache()
        always = [f"max_steps={steps}", f"model.device={device.type}", "task.chat=false", "evaluation.eval_steps=0",
                  "task.reward=bench.gpu.presets:chance", "algorithm.mask_truncated_completions=false"]  # fmt: skip
        few = FEW if device.type == "cpu" else ()
        config = load_config(ROOT / f"configs/gpu_{preset}.yaml", [*paths, *always, *changes, *few])
        told = plan_memory(config, device_here(device.type, 1)).phases
        with start(config.parallel, device.type) as ranks:
            trainer = Trainer(config, folder / "run", ranks=ranks)
            trainer.engine.generate = watch("generation", trainer.engine.generate)  # type: ignore[method-assign]
            trainer.learner.update = watch("the update", trainer.learner.update)  # type: ignore[method-assign]
            trainer.run()
        last = read_metrics(folder / "run")[-1]
    told["the update"] = max(told["the update"], told.pop("the optimizer step"))
    spent = {f"{part}_s": last[f"time/{key}_s"] for part, key in (("rollout", "rollout"), ("update", "train"))}
    return {"ok": True, "preset": name, "taken": taken, "told": told, **spent, "tokens": last["tokens/generated"]}


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table("preset", "rollout s", "update s", "generation GB, told", "update GB, told", box=None)
    for row in rows:
        if row["ok"]:
            memory = [f"{row['taken'][phase] / 1e9:.1f}, {told / 1e9:.1f}" for phase, told in row["told"].items()]
            table.add_row(row["preset"], f"{row['rollout_s']:.1f}", f"{row['update_s']:.1f}", *memory)
        else:
            console.print(f"failed: {row['preset']}: {row['said'][-600:]}", highlight=False, markup=False)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.presets", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, default=3, help="of each (default 3); the last is in the record")
    parser.add_argument("--output", type=Path, help="the record (default bench/gpu/records/DEVICE-COMMIT-presets.json)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with a tiny model")
    parser.add_argument("--commit", help="what the record names where there is no git repository")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        print(json.dumps(measured(args.only[0], args.steps, torch.device(args.device))))
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --device cpu is a dry run")
    facts, console, rows = call_facts(args.commit), Console(width=120), []
    for name in args.only:
        command = [sys.executable, "-m", "bench.gpu.presets", "--here", "--only", name, "--steps", str(args.steps)]
        code, said = run([*command, "--device", args.device], os.environ, RUN_S)
        failed = {"ok": False, "preset": name, "said": said[-3000:]}
        rows.append(failed if code else json.loads(said.splitlines()[-1]))
        write(args.output or record_path(facts, "-presets.json"), {**facts, "cuda": torch.version.cuda, "runs": rows})
    show(rows, console)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
