"""Settings and helpers that tests of the trainer's vLLM engine share."""

import json

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from python_trainer.config import load_config
from python_trainer.rollout.engine import SamplingParams
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer

MEMORY = 8 << 20
GREEDY = SamplingParams(temperature=0.0)
EOS = 63
MAX_POSITIONS = 128
PROMPTS = [[7], [5, 6, 7, 8, 9], list(range(40)), [*range(40), 3, 1, 4, 1, 5], list(range(60, 20, -1)) * 2]
SAMPLINGS = [SamplingParams(seed=1), SamplingParams(temperature=0.7, top_k=9, seed=2), SamplingParams(top_p=0.8)]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def count_since(engine, old_stats):
    return {name: count - old_stats[name] for name, count in engine.stats.items()}


def run_settings(folder, path, **rollout):
    prompts = path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("AB", "CDE", "FFAB", "G")))
    return {
        "max_steps": 3,
        # weighed so that the paper's reward, which is never below 0.5, tells answers apart
        "task": {"name": "jsonl", "train_path": str(prompts), "test_path": str(prompts), "reward": "tiny:digits",
                 "reward_weights": [6.0]},
        "model": {"path": str(folder), "device": "cpu"},
        "rollout": {"engine": "vllm", "prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12,
                    "memory_bytes": MEMORY, **rollout},
        "optimizer": {"learning_rate": 1e-2},
        "accelerators": {"enabled": ["rpo"], "rpo": {"preset": "paper"}},
            }  # fmt: skip


def train(settings, folder):
    config = load_config(settings)
    summary = Trainer(config, folder, console=Console(quiet=True)).run()
    rows = read_metrics(folder)
    assert summary["steps"] == 3 and summary["generated_tokens"] > 0 and summary["prefill_tokens"] > 0
    # each step samples from the current policy: weights one step old give a difference of 0.1 and more
    assert max(row["sampling/logp_difference/max"] for row in rows[1:]) < 1e-3
    assert all(row["grad_norm"] > 0 for row in rows[1:])
    return rows
