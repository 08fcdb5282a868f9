"""Drafts inside vLLM: tokens per step and seconds of three visits to the same prompts, with and without.

    VENV-vllm/bin/python -m bench.studies.vllm --output-dir runs/studies/vllm

For an environment with vLLM (``make test-vllm`` makes one). The policy `main` answers prompts of the arithmetic task
by sampling, the same prompts in every epoch; with drafts each epoch's answers enter the history that
``HistoryProposer`` drafts from. The weights do not change, so this is a bound on what a training run could gain. One
process per run; seconds are those of ``LLM.generate``, in CPU time of the process. Finished runs are kept.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from bench._markdown import table_lines

PROPOSER = "rlkernels.integrations.vllm.HistoryProposer"
EPOCHS, PROMPTS, SAMPLES, LONGEST = 3, 32, 8, 128
MODES = ("plain", "drafts")
COUNTERS = {"offered": "vllm:spec_decode_num_draft_tokens", "accepted": "vllm:spec_decode_num_accepted_tokens"}


def measure(mode: str, seed: int) -> dict[str, Any]:
    """One run, in this process -> a row for each epoch."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    import vllm
    from python_trainer.tasks.arithmetic import accuracy, arithmetic_task

    import rlkernels
    from python_trainer.model.loading import SHIPPED
    from rlkernels.integrations.vllm import share_history

    task = arithmetic_task("short", seed, train_size=PROMPTS, gate_size=1, test_size=1)
    history = rlkernels.RolloutHistory()
    share_history(history)
    drafts: dict[str, Any] = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 16}
    llm = vllm.LLM(
        model=str(SHIPPED / "main"), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=64,
        kv_cache_memory_bytes=256 << 20, seed=seed, disable_log_stats=False, enable_prefix_caching=True,
        **({"speculative_config": drafts} if mode == "drafts" else {}),
    )  # fmt: skip
    rows = []
    for epoch in range(EPOCHS):
        settings = vllm.SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=LONGEST)
        before, start = counters(llm), time.process_time()
        outputs = llm.generate([example.prompt for example in task.train], settings, use_tqdm=False)
        spent, after = time.process_time() - start, counters(llm)
        answers = [(out.prompt_token_ids, list(one.token_ids), one.text) for out in outputs for one in out.outputs]
        wanted = [example.columns["answer"] for example in task.train for _ in range(SAMPLES)]
        texts = [text for _, _, text in answers]
        right = [float(value or 0) for value in accuracy([], texts, [], answer=wanted)]
        for (prompt, ids, _), reward in zip(answers, right):
            history.add(prompt, ids, reward=reward, epoch=epoch)
        tokens = sum(len(ids) for _, ids, _ in answers)
        row = {name: after[name] - before[name] for name in COUNTERS}
        steps = tokens - row["accepted"]
        rows.append(row | {"cpu_s": spent, "tokens": tokens, "tokens_per_step": tokens / steps, "right": fmean(right)})
    return {"mode": mode, "seed": seed, "version": vllm.__version__, "epochs": rows}


def counters(llm: Any) -> dict[str, float]:
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {name: found.get(key, 0.0) for name, key in COUNTERS.items()}


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown, one line per seed and epoch."""
    head = ["seed", "epoch", "plain, CPU s", "drafts, CPU s", "tokens per step of a sample", "offered", "accepted",
            "right, plain", "right, drafts"]  # fmt: skip
    rows = []
    for seed in sorted({run["seed"] for run in runs}):
        both = {run["mode"]: run["epochs"] for run in runs if run["seed"] == seed}
        for epoch, (plain, ours) in enumerate(zip(*(both.get(mode, []) for mode in MODES))):
            accepted = ours["accepted"] / max(ours["offered"], 1)
            rows.append([
                *(seed, epoch + 1, f"{plain['cpu_s']:.1f}", f"{ours['cpu_s']:.1f}", f"{ours['tokens_per_step']:.2f}"),
                *(f"{ours['offered']:.0f}", f"{accepted:.0%}", f"{plain['right']:.3f}", f"{ours['right']:.3f}"),
            ])  # fmt: skip
    return "\n".join(table_lines(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.vllm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/vllm"), metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "SEED"), help="a single run, printed as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]))))
        return
    args.output_dir.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in range(args.seeds):
        for mode in MODES:
            path = args.output_dir / f"{mode}-{seed}.json"
            if not path.exists():
                command = [sys.executable, "-m", "bench.studies.vllm", "--one", mode, str(seed)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                path.write_text(done.stdout.splitlines()[-1] + "\n")
            runs.append(json.loads(path.read_text()))
    print(table(runs))


if __name__ == "__main__":
    main()
