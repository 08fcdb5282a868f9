"""Rollouts of a small model: PagedEngine against ``model.generate`` with padding, on the same prompts.

All samples of a prompt have the same length here, because it is the prompt that decides how long an answer is; the
lengths are as uneven between prompts as those of short sums. ``generate`` is not asked for log-probabilities.
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

VOCAB, SAMPLES = 300, 8


@dataclass
class Workload:
    name: str
    prompts: list[list[int]]
    prefixes: list[list[int]]
    lengths: list[int]  # of the answers to each prompt, without the prefix

    @property
    def tokens(self) -> int:
        return SAMPLES * sum(self.lengths)


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
    """Ends every row at its own length."""

    def __init__(self, start: int, lengths: list[int]):
        self.lengths = torch.tensor(lengths) + start

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.lengths


def paged(engine: PagedEngine, work: Workload) -> int:
    engine.policy_updated()  # every call computes its prompts anew, as after an update
    requests = [
        Request(prompt, prefix, SAMPLES, length, SAMPLES * i)
        for i, (prompt, prefix, length) in enumerate(zip(work.prompts, work.prefixes, work.lengths))
    ]
    return sum(len(completion.ids) for completion in engine.generate(requests, SamplingParams(seed=1)))


def padded(policy: Any, work: Workload, batch: int) -> int:
    rows = [
        (prompt + prefix, length)
        for prompt, prefix, length in zip(work.prompts, work.prefixes, work.lengths)
        for _ in range(SAMPLES)
    ]
    count = 0
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        width = max(len(ids) for ids, _ in part)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in part])
        lengths = [length for _, length in part]
        out = policy.generate(
            ids, attention_mask=(ids != 0).long(), do_sample=True, top_k=0, max_new_tokens=max(lengths),
            stopping_criteria=StoppingCriteriaList([Lengths(width, lengths)]),
        )  # fmt: skip
        assert out.shape[1] == width + max(lengths)
        count += sum(lengths)
    return count


def drafted(engine: PagedEngine, drafter: Drafter | None, requests: list[Request]) -> list[list[int]]:
    engine.policy_updated()
    engine.drafter = drafter
    return [completion.ids for completion in engine.generate(requests, SamplingParams(seed=2))]


def drafts_case(quick: bool) -> Case:
    """The shipped policy answers sums for the second time; the drafter knows its first answers, of other noise."""
    config = load_config("configs/ppo.yaml")
    policy = load_policy(config.model)
    engine = PagedEngine(policy.model, eos_token_ids=policy.eos_token_ids)
    examples = config.task.load().train[: 8 if quick else 32]
    prompts = policy.encode([example.prompt for example in examples])
    requests = [Request(ids, (), SAMPLES, 128, SAMPLES * i) for i, ids in enumerate(prompts)]
    history = RolloutHistory()
    for i, completion in enumerate(engine.generate(requests, SamplingParams(seed=1))):
        history.add(prompts[i // SAMPLES], completion.ids)
    overhead = measure_overhead(engine)
    assert overhead is not None, "the cache has room for the measured passes"
    plain = drafted(engine, None, requests)
    return Case(
        op="rollout",
        shape=f"short sums, second visit: {len(prompts)} x {SAMPLES}",
        dtype="float32",
        providers={
            "PagedEngine": lambda: drafted(engine, None, requests),
            f"with drafts, pass overhead {overhead:.0f} tokens": lambda: drafted(
                engine, Drafter(history, pass_overhead=overhead), requests
            ),
            "with drafts that are off": lambda: drafted(engine, Drafter(history, pass_overhead=0), requests),
        },
        reference="PagedEngine",
        compare=lambda out, want: "same tokens" if out == want else "OTHER TOKENS",
        work=("tokens", sum(map(len, plain))),
    )


def cases(quick: bool) -> Iterator[Case]:
    policy = model()
    engine = PagedEngine(policy, eos_token_ids=())
    own_forward, read_by_each = (PagedEngine(policy, eos_token_ids=()) for _ in range(2))
    own_forward.fused, read_by_each.share_from = False, None
    prompts = 8 if quick else 32
    works = [workload("answers", prompts, 0, 15, 35, 100), workload("suffixes", prompts, 200, 5, 20, 60)]
    for work in [*works, workload("suffixes", prompts // 4, 800, 5, 20, 60)]:
        providers: dict[str, Any] = {
            "PagedEngine": partial(paged, engine, work),
            "PagedEngine, fused=False": partial(paged, own_forward, work),
            **({"PagedEngine, share_reads=False": partial(paged, read_by_each, work)} if work.prefixes[0] else {}),
            "transformers generate, batches of 128": partial(padded, policy, work, 128),
        }
        longest = max(work.lengths)
        yield Case(
            op="rollout",
            shape=f"{work.name}: {prompts} x {SAMPLES}, prefix {len(work.prefixes[0])}, mean "
            f"{work.tokens / SAMPLES / prompts:.0f}, max {longest}",
            dtype="float32",
            providers=providers,
            reference="PagedEngine",
            compare=lambda out, want: "same count" if out == want else f"{out} tokens, not {want}",
            work=("tokens", work.tokens),
        )
    yield drafts_case(quick)
