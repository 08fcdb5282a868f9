"""Drafts inside vLLM: our history, its suffix decoding and its n-grams, over epochs in which the weights change.

A run of the trainer saves its weights after each epoch. Every arm answers the same prompts with each of them in turn,
and keeps the history of its drafts: seconds and tokens per step of a sequence by epoch, and the peak memory of its
process. The workloads: `sums` with its small policy, and sentences with given words (examples/sentences.py) by
SmolLM2-135M, if runs/smollm2 holds it. Needs vLLM in this environment, or in that of RLKERNELS_VLLM_PYTHON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench import Measurement, Row
from bench._runner import resident_peak

ARMS: dict[str, dict[str, Any] | None] = {
    "vLLM": None,
    "vLLM, rlkernels history": {
        "method": "custom_class", "model": "rlkernels.integrations.vllm.HistoryProposer", "num_speculative_tokens": 16,
    },
    "vLLM, n-gram": {"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_max": 5, "prompt_lookup_min": 3},
    "vLLM, suffix": {"method": "suffix"},
}  # fmt: skip
PACKAGES = {"vLLM, suffix": "arctic_inference"}  # that an arm needs
EXAMPLES = Path("examples")  # has the task of sentences
SMOLLM2 = Path("runs/smollm2")


class Workload(NamedTuple):
    """Prompts of a run of the trainer, which return each epoch, and how vLLM answers them."""

    config: str
    settings: list[str]
    prompts: int
    epoch_steps: int  # between two saved weights
    epochs: int
    dtype: str
    kv_cache_bytes: int
    sampling: dict[str, Any]


WORKLOADS = {
    "sums": Workload(
        config="configs/sums.yaml", settings=[], prompts=192, epoch_steps=12, epochs=4, dtype="float32",
        kv_cache_bytes=256 << 20, sampling={"n": 4, "max_tokens": 384},
    ),
    "sentences": Workload(
        config=str(EXAMPLES / "sentences.yaml"),
        settings=[f"model.path={SMOLLM2}", "model.dtype=bfloat16"],
        prompts=64, epoch_steps=4, epochs=6, dtype="bfloat16", kv_cache_bytes=1 << 30,
        sampling={"n": 8, "max_tokens": 40, "temperature": 0.7},
    ),
}  # fmt: skip


def train(folder: Path, workload: Workload, steps: int) -> list[list[int]]:
    """Save the weights before training and after every ``steps`` steps in folders; return all prompts."""
    from rich.console import Console

    from python_trainer import Callback, Trainer, load_config

    class Save(Callback):
        def on_step(self, trainer: Any, step: int, metrics: Any) -> None:
            if step % steps == 0:
                trainer.policy.inference_model.save_pretrained(folder / str(step // steps))

    sys.path.append(str(EXAMPLES))
    settings = [
        *workload.settings, f"task.train_size={workload.prompts}", "task.test_size=1", "max_seconds=null",
        "evaluation.eval_steps=0", "save.save_steps=0", f"max_steps={steps * (workload.epochs - 1)}",
    ]  # fmt: skip
    config = load_config(workload.config, settings)
    trainer = Trainer(config, folder / "run", console=Console(quiet=True), callbacks=[Save()])
    trainer.policy.inference_model.save_pretrained(folder / "0")
    trainer.policy.tokenizer.save_pretrained(folder / "0")
    trainer.run()
    return [list(ids) for ids in trainer.prompts.ids["train"]]


def generate(folder: Path, workload: Workload, arm: str) -> list[dict[str, float]]:
    """Answer all prompts with the weights of each epoch, in this process."""
    import vllm

    llm = vllm.LLM(
        str(folder / "0"), dtype=workload.dtype, enforce_eager=True, max_model_len=512,
        kv_cache_memory_bytes=workload.kv_cache_bytes, disable_log_stats=False, speculative_config=ARMS[arm],
        enable_chunked_prefill=False, worker_extension_cls="rlkernels.integrations.vllm_worker.PolicyWorker",
    )  # fmt: skip
    if ARMS[arm] is not None:
        from rlkernels.integrations.vllm import mend_sampler

        mend_sampler()  # vLLM 0.32 on a CPU accepts hardly any draft: the fix of our proposer serves all arms

    def count_accepted() -> int:
        name = "vllm:spec_decode_num_accepted_tokens"
        return sum(getattr(metric, "value", 0) for metric in llm.get_metrics() if metric.name == name)

    prompts = [{"prompt_token_ids": ids} for ids in json.loads((folder / "prompts.json").read_text())]
    rows = []
    for epoch in range(workload.epochs):
        llm.collective_rpc("load_policy", args=(str(folder / str(epoch)),))
        llm.reset_prefix_cache()
        earlier_accepted = count_accepted()
        start = time.perf_counter()
        answers = llm.generate(prompts, vllm.SamplingParams(**workload.sampling, seed=epoch), use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
        steps = tokens - (count_accepted() - earlier_accepted)
        rows.append({"s": seconds, "tokens": tokens, "tokens_per_step": tokens / steps})
    rows[-1]["peak_bytes"] = resident_peak()
    return rows


def run_arm(python: str, folder: Path, name: str, arm: str) -> list[dict[str, float]] | str:
    """Return the result of :func:`generate` in a separate process, or the reason why it failed."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env = os.environ | variables | {"PYTHONPATH": os.getcwd(), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [python, "-m", "bench.vllm_drafts", str(folder), name, arm]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if process.returncode:
        return (process.stderr.strip() or "no message").splitlines()[-1]
    return json.loads(process.stdout.splitlines()[-1])


def rows(python: str, name: str, num_prompts: int, steps: int, shape: str) -> Iterator[Row]:
    """Train on a workload with ``steps`` between saved weights, then answer its first prompts by every arm."""
    workload = WORKLOADS[name]
    with TemporaryDirectory() as path:
        folder = Path(path)
        prompts = train(folder, workload, steps)[:num_prompts]
        (folder / "prompts.json").write_text(json.dumps(prompts))
        for arm in ARMS:
            row = Row("vllm drafts", arm, shape, workload.dtype)
            epochs = run_arm(python, folder, name, arm)
            if isinstance(epochs, str):
                install = f"pip install {PACKAGES[arm].replace('_', '-')}: " if arm in PACKAGES else ""
                row.missing = install + epochs
            else:
                figures = (f"{epoch['tokens_per_step']:.2f} tokens a step, {epoch['s']:.1f} s" for epoch in epochs)
                row.extra = "; ".join(figures)
                row.median_s = sum(epoch["s"] for epoch in epochs)
                row.peak_bytes = int(epochs[-1]["peak_bytes"])
            yield row


def cases(quick: bool) -> Iterator[Measurement]:
    python = sys.executable if find_spec("vllm") is not None else os.environ.get("RLKERNELS_VLLM_PYTHON")
    for name, workload in WORKLOADS.items():
        num_prompts, steps = (8, 1) if quick else (workload.prompts, workload.epoch_steps)
        shape = f"{name}, {num_prompts} prompts x {workload.sampling['n']}, {workload.epochs} epochs"
        missing = ""
        if python is None:
            missing = "no vLLM; make test-vllm sets it up, and RLKERNELS_VLLM_PYTHON names its Python"
        elif name == "sentences" and not SMOLLM2.exists():
            missing = f"python tools/smollm2.py {SMOLLM2}"
        if missing:
            yield Measurement.missing(*(Row("vllm drafts", arm, shape, missing=missing) for arm in ARMS))
        else:
            yield Measurement([shape], partial(rows, str(python), name, num_prompts, steps, shape))


if __name__ == "__main__":
    path, name, arm = sys.argv[1:]
    print(json.dumps(generate(Path(path), WORKLOADS[name], arm)))
