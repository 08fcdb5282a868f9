"""Drafts inside vLLM: our history, its suffix decoding and its n-grams, over four epochs in which the weights change.

A run of the trainer on `sums` leaves its weights after each epoch. Every arm answers the same prompts with each of them
in turn, four answers a prompt, with the memory of its drafts kept: seconds and tokens per step of a sequence by epoch,
and the peak memory of its process. Needs vLLM in this environment, or in that of the Python that RLKERNELS_VLLM_PYTHON
names.
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
NEEDS = {"vLLM, suffix": "arctic_inference"}  # package of an arm
EPOCHS = 4
SAMPLES = 4


def train(folder: Path, steps: int) -> list[str]:
    """Leave the weights before training and after every ``steps`` steps in folders; return all prompts."""
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

        mend_sampler()  # on a CPU vLLM 0.32 accepts hardly any draft: all that draft get what our proposer gets

    def accepted() -> int:
        name = "vllm:spec_decode_num_accepted_tokens"
        return sum(getattr(metric, "value", 0) for metric in llm.get_metrics() if metric.name == name)

    prompts, rows = json.loads((folder / "prompts.json").read_text()), []
    for epoch in range(EPOCHS):
        llm.collective_rpc("load_policy", args=(str(folder / str(epoch)),))
        llm.reset_prefix_cache()
        before, start = accepted(), time.perf_counter()
        sampling = vllm.SamplingParams(n=SAMPLES, max_tokens=384, seed=epoch)
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        seconds, tokens = time.perf_counter() - start, sum(len(o.token_ids) for a in answers for o in a.outputs)
        rows.append({"s": seconds, "tokens": tokens, "tokens_per_step": tokens / (tokens - accepted() + before)})
    rows[-1]["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return rows


def run_arm(python: str, folder: Path, arm: str) -> list[dict[str, float]] | str:
    """Return what :func:`generate` does in a process of its own, or why it failed."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env = os.environ | own | {"PYTHONPATH": os.getcwd(), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [python, "-m", "bench.vllm_drafts", str(folder), arm]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip() or "no message").splitlines()[-1]
    return json.loads(done.stdout.splitlines()[-1])


def cases(quick: bool) -> Iterator[list[Row]]:
    python = sys.executable if find_spec("vllm") is not None else os.environ.get("RLKERNELS_VLLM_PYTHON")
    if python is None:
        why = "no vLLM; make test-vllm sets it up, and RLKERNELS_VLLM_PYTHON names its Python"
        yield [Row("vllm drafts", arm, "", missing=why) for arm in ARMS]
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        prompts = train(folder, 1 if quick else 12)[: 8 if quick else None]
        (folder / "prompts.json").write_text(json.dumps(prompts))
        table = []
        for arm in ARMS:
            found = run_arm(python, folder, arm)
            shape = f"{len(prompts)} prompts x {SAMPLES}, 4 epochs"
            if isinstance(found, str):
                need = f"pip install {NEEDS[arm].replace('_', '-')}: " if arm in NEEDS else ""
                table.append(Row("vllm drafts", arm, shape, missing=need + found))
                continue
            extra = "; ".join(f"{row['tokens_per_step']:.2f} tokens a step, {row['s']:.1f} s" for row in found)
            table.append(Row(
                "vllm drafts", arm, shape, "float32", median_s=sum(row["s"] for row in found), extra=extra,
                peak_bytes=int(found[-1]["peak_bytes"]),
            ))  # fmt: skip
        yield table


if __name__ == "__main__":
    print(json.dumps(generate(Path(sys.argv[1]), sys.argv[2])))
