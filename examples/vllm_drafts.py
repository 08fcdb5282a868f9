"""Drafts from earlier answers inside vLLM, on a CPU. See docs/integrations.md for the environment it needs."""

import os
import random
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # delete this line if something fails
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import vllm

import python_trainer

MODEL = Path(python_trainer.__file__).parent / "tasks/policies/small"  # or your folder in Hugging Face format


def engine(**drafts):
    return vllm.LLM(
        str(MODEL),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,  # counts the drafts
        **drafts,
    )


def count(drafting, name):
    return sum(metric.value for metric in drafting.get_metrics() if metric.name == f"vllm:spec_decode_num_{name}")


if __name__ == "__main__":  # vLLM's processes, where it makes some, import this file
    rng = random.Random(0)
    prompts = ["+".join(str(rng.randint(10, 99)) for _ in range(rng.randint(2, 6))) + "=" for _ in range(16)]
    greedy = vllm.SamplingParams(temperature=0, max_tokens=128)

    llm = engine()  # stays: where its engine goes, vLLM 0.32 stops all others of the process
    plain = [out.outputs[0] for out in llm.generate(prompts, greedy, use_tqdm=False)]

    drafting = engine(
        speculative_config={
            "method": "custom_class",
            "model": "rlkernels.integrations.vllm.HistoryProposer",
            "num_speculative_tokens": 16,
        }
    )
    # an epoch of rollouts, from which the proposer learns
    drafting.generate(prompts, vllm.SamplingParams(n=4, max_tokens=128, seed=0), use_tqdm=False)
    before = [count(drafting, name) for name in ("accepted_tokens", "draft_tokens")]
    drafted = [out.outputs[0] for out in drafting.generate(prompts, greedy, use_tqdm=False)]
    after = [count(drafting, name) for name in ("accepted_tokens", "draft_tokens")]

    right, offered = (b - a for a, b in zip(before, after))
    tokens = sum(len(answer.token_ids) for answer in drafted)
    print(f"{tokens} tokens in {tokens - right} steps of a sequence: {right} of {offered} draft tokens accepted")
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    print("the answers are those without drafts, to the token; the first:", drafted[0].text.split())
