"""Drafts inside vLLM: our history, its suffix decoding and its n-grams, over four epochs in which the weights change.

A run of the trainer on `sums` saves its weights after each epoch. Every arm answers the same prompts with each of them
in turn, four answers a prompt, and keeps the history of its drafts: seconds and tokens per step of a sequence by epoch,
and the peak memory of its process. Needs vLLM in this environment, or in that of RLKERNELS_VLLM_PYTHON.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import Row

ARMS: dict[str, dict[str, Any] | None] = {
    "vLLM": None,
    "vLLM, rlkernels history": {
        "method": "custom_class", "model": "rlkernels.integrations.vllm.HistoryProposer", "num_speculative_tokens": 16,
    },
    "vLLM, n-gram": {"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_max": 5, "prompt_lookup_min": 3},
    "vLLM, suffix": {"method": "suffix"},
}  # fmt: skip
PACKAGES = {"vLLM, suffix": "arctic_inference"}  # that an arm needs
EPOCHS = 4
NUM_GENERATIONS = 4


def train(folder: Path, steps: int) -> list[str]:
    """Save the weights before training and after every ``steps`` steps in folders; return all prompts."""
    from rich.console import Console

    from python_trainer import Callback, Trainer, load_config

    class Save(Callback):
        def on_step(self, trainer: Any, step: int, metrics: Any) -> None:
            if step % steps == 0:
                trainer.policy.inference_model.save_pretrained(folder / str(step // steps))

    settings = ["max_seconds=null", "evaluation.eval_steps=0", "task.test_size=1", "save.save_steps=0"]
    config = load_config("configs/sums.yaml", [*settings, f"max_steps={steps * (EPOCHS - 1)}"])
    trainer = Trainer(config, folder / "run", console=Console(quiet=True), callbacks=[Save()])
    trainer.policy.inference_model.save_pretrained(folder / "0")
    trainer.policy.tokenizer.save_pretrained(folder / "0")
    trainer.run()
    return [str(example.prompt) for example in trainer.task.train]


def generate(folder: Path, arm: str) -> list[dict[str, float]]:
    """Answer all prompts with the weights of each epoch, in this process."""
    import vllm

    llm = vllm.LLM(
        str(folder / "0"), dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=256 << 20,
        disable_log_stats=False, speculative_config=ARMS[arm], enable_chunked_prefill=False,
        worker_extension_cls="rlkernels.integrations.vllm_worker.PolicyWorker",
    )  # fmt: skip
    if ARMS[arm] is not None:
        from rlkernels.integrations.vllm import mend_sampler

        mend_sampler()  # vLLM 0.32 on a CPU accepts hardly any draft: the fix of our proposer serves all arms

    def count_accepted() -> int:
        name = "vllm:spec_decode_num_accepted_tokens"
        return sum(getattr(metric, "value", 0) for metric in llm.get_metrics() if metric.name == name)

    prompts = json.loads((folder / "prompts.json").read_text())
    rows = []
    for epoch in range(EPOCHS):
        llm.collective_rpc("load_policy", args=(str(folder / str(epoch)),))
        llm.reset_prefix_cache()
        earlier_accepted = count_accepted()
        start = time.perf_counter()
        sampling = vllm.SamplingParams(n=NUM_GENERATIONS, max_tokens=384, seed=epoch)
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
        steps = tokens - (count_accepted() - earlier_accepted)
        rows.append({"s": seconds, "tokens": tokens, "tokens_per_step": tokens / steps})
    rows[-1]["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return rows


def run_arm(python: str, folder: Path, arm: str) -> list[dict[str, float]] | str:
    """Return the result of :func:`generate` in a separate process, or the reason why it failed."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env = os.environ | variables | {"PYTHONPATH": os.getcwd(), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [python, "-m", "bench.vllm_drafts", str(folder), arm]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if process.returncode:
        return (process.stderr.strip() or "no message").splitlines()[-1]
    return json.loads(process.stdout.splitlines()[-1])


def cases(quick: bool) -> Iterator[list[Row]]:
    python = sys.executable if find_spec("vllm") is not None else os.environ.get("RLKERNELS_VLLM_PYTHON")
    if python is None:
        reason = "no vLLM; make test-vllm sets it up, and RLKERNELS_VLLM_PYTHON names its Python"
        yield [Row("vllm drafts", arm, "", missing=reason) for arm in ARMS]
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        prompts = train(folder, 1 if quick else 12)[: 8 if quick else None]
        (folder / "prompts.json").write_text(json.dumps(prompts))
        table = []
        for arm in ARMS:
            epochs = run_arm(python, folder, arm)
            shape = f"{len(prompts)} prompts x {NUM_GENERATIONS}, 4 epochs"
            if isinstance(epochs, str):
                install = f"pip install {PACKAGES[arm].replace('_', '-')}: " if arm in PACKAGES else ""
                table.append(Row("vllm drafts", arm, shape, missing=install + epochs))
                continue
            extra = "; ".join(f"{row['tokens_per_step']:.2f} tokens a step, {row['s']:.1f} s" for row in epochs)
            table.append(Row(
                "vllm drafts", arm, shape, "float32", median_s=sum(row["s"] for row in epochs), extra=extra,
                peak_bytes=int(epochs[-1]["peak_bytes"]),
            ))  # fmt: skip
        yield table


if __name__ == "__main__":
    print(json.dumps(generate(Path(sys.argv[1]), sys.argv[2])))
