"""Rollouts of a small model: PagedEngine against ``model.generate`` with padding, on the same prompts.

All samples of a prompt have the same length, because the prompt decides how long an answer is; lengths of different
prompts are as uneven as those of short sums. ``generate`` returns no log-probabilities.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList

from bench import Case
from python_trainer.accelerators.drafts import measure_overhead
from python_trainer.config import load_config
from python_trainer.data import Request
from python_trainer.model.policy import load_policy
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.paged.engine import PagedEngine
from rlkernels import RolloutHistory

VOCAB = 300
NUM_GENERATIONS = 8


@dataclass
class Workload:
    name: str
    prompts: list[list[int]]
    prefixes: list[list[int]]
    lengths: list[int]  # of the answers to each prompt, without the prefix

    @property
    def tokens(self) -> int:
        return NUM_GENERATIONS * sum(self.lengths)


def workload(name: str, prompts: int, prefix: int, shortest: int, mean: float, longest: int) -> Workload:
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(1, VOCAB, (length,), generator=generator).tolist()

    extra = torch.empty(prompts).exponential_(1 / (mean - shortest), generator=generator)
    lengths = (shortest + extra).round().long().clamp(max=longest).tolist()
    sizes = torch.randint(10, 21, (prompts,), generator=generator).tolist()
    return Workload(name, [ids(size) for size in sizes], [ids(prefix) for _ in sizes], lengths)


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


class Lengths(StoppingCriteria):
    """End every row at its length."""

    def __init__(self, start: int, lengths: list[int]):
        self.lengths = torch.tensor(lengths) + start

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.lengths


def run_paged(engine: PagedEngine, work: Workload) -> int:
    engine.policy_updated()  # as after an update: no cached prompt
    requests = [
        Request(prompt, prefix, NUM_GENERATIONS, length, NUM_GENERATIONS * i)
        for i, (prompt, prefix, length) in enumerate(zip(work.prompts, work.prefixes, work.lengths))
    ]
    return sum(len(completion.ids) for completion in engine.generate(requests, SamplingParams(seed=1)))


def run_padded(policy: Any, work: Workload, batch: int) -> int:
    rows = [
        (prompt + prefix, length)
        for prompt, prefix, length in zip(work.prompts, work.prefixes, work.lengths)
        for _ in range(NUM_GENERATIONS)
    ]
    count = 0
    for start in range(0, len(rows), batch):
        batch_rows = rows[start : start + batch]
        width = max(len(ids) for ids, _ in batch_rows)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in batch_rows])
        lengths = [length for _, length in batch_rows]
        out = policy.generate(
            ids, attention_mask=(ids != 0).long(), do_sample=True, top_k=0, max_new_tokens=max(lengths),
            stopping_criteria=StoppingCriteriaList([Lengths(width, lengths)]),
        )  # fmt: skip
        assert out.shape[1] == width + max(lengths)
        count += sum(lengths)
    return count


def run_with_drafts(engine: PagedEngine, drafter: Drafter | None, requests: list[Request]) -> list[list[int]]:
    engine.policy_updated()
    engine.drafter = drafter
    return [completion.ids for completion in engine.generate(requests, SamplingParams(seed=2))]


def drafts_case(quick: bool) -> Case:
    """Make the case of the shipped policy's second answers to sums; the drafter has its first ones, of another seed."""
    config = load_config("configs/ppo.yaml")
    policy = load_policy(config.model)
    engine = PagedEngine(policy.model, eos_token_ids=policy.eos_token_ids)
    examples = config.task.load().train[: 8 if quick else 32]
    prompts = policy.encode([example.prompt for example in examples])
    requests = [Request(ids, (), NUM_GENERATIONS, 128, NUM_GENERATIONS * i) for i, ids in enumerate(prompts)]
    history = RolloutHistory()
    for i, completion in enumerate(engine.generate(requests, SamplingParams(seed=1))):
        history.add(prompts[i // NUM_GENERATIONS], completion.ids)
    overhead = measure_overhead(engine)
    assert overhead is not None, "the cache has room for the measured passes"
    plain = run_with_drafts(engine, None, requests)
    return Case(
        op="rollout",
        shape=f"short sums, second visit: {len(prompts)} x {NUM_GENERATIONS}",
        dtype="float32",
        providers={
            "PagedEngine": lambda: run_with_drafts(engine, None, requests),
            f"with drafts, pass overhead {overhead:.0f} tokens": lambda: run_with_drafts(
                engine, Drafter(history, pass_overhead=overhead), requests
            ),
            "with drafts that are off": lambda: run_with_drafts(engine, Drafter(history, pass_overhead=0), requests),
        },
        reference="PagedEngine",
        compare=lambda out, expected: "same tokens" if out == expected else "OTHER TOKENS",
        work=("tokens", sum(map(len, plain))),
    )


def cases(quick: bool) -> Iterator[Case]:
    policy = model()
    engine = PagedEngine(policy, eos_token_ids=())
    model_forward = PagedEngine(policy, eos_token_ids=())
    model_forward.fused = False
    unshared_reads = PagedEngine(policy, eos_token_ids=())
    unshared_reads.share_from = None
    prompts = 8 if quick else 32
    workloads = [workload("answers", prompts, 0, 15, 35, 100), workload("suffixes", prompts, 200, 5, 20, 60)]
    for work in [*workloads, workload("suffixes", prompts // 4, 800, 5, 20, 60)]:
        providers: dict[str, Any] = {
            "PagedEngine": partial(run_paged, engine, work),
            "PagedEngine, fused=False": partial(run_paged, model_forward, work),
            **(
                {"PagedEngine, share_reads=False": partial(run_paged, unshared_reads, work)} if work.prefixes[0] else {}
            ),
            "transformers generate, batches of 128": partial(run_padded, policy, work, 128),
        }
        longest = max(work.lengths)
        yield Case(
            op="rollout",
            shape=f"{work.name}: {prompts} x {NUM_GENERATIONS}, prefix {len(work.prefixes[0])}, mean "
            f"{work.tokens / NUM_GENERATIONS / prompts:.0f}, max {longest}",
            dtype="float32",
            providers=providers,
            reference="PagedEngine",
            compare=lambda out, expected: "same count" if out == expected else f"{out} tokens, not {expected}",
            work=("tokens", work.tokens),
        )
    yield drafts_case(quick)
