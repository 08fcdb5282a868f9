"""Attention on the trie of a training batch, forward and backward, against the layouts of other trainers.

Each arm has inputs in its own layout: padded rows repeat the prefixes that sequences share, the trie has them once.
FlexAttention has no backward pass on a CPU: ``bench.gpu.session`` times it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import rlkernels
from bench import Case
from bench._case import Provider
from bench._copies import Copies
from bench._runner import match
from rlkernels.prefix_cache import GroupedLayout, TreeLayout

HEADS = (6, 2, 64)  # of queries, of keys, elements of each
SCALE = HEADS[2] ** -0.5
ON_HEADS = f"{HEADS[0]} on {HEADS[1]} heads of {HEADS[2]}"
Sample = tuple[list[int], list[int]]  # prompt, answer
Result = tuple[Copies, list[torch.Tensor]]  # a layout; output and gradients in it


@dataclass
class Arm:
    """One layout of the batch.

    Attributes:
        copies: where the tokens of the trie lie in it.
        attend: query, key, value, [n, H, d] or [B, L, H, d] -> output.
    """

    copies: Copies
    attend: Callable[..., torch.Tensor]

    def timed(self, tensors: Sequence[torch.Tensor], grad: torch.Tensor) -> Callable[[], Result]:
        """Return a function that computes output and gradients of query, key and value in this layout."""
        leaves = [t[self.copies.at].contiguous().requires_grad_() for t in tensors]
        grad_output = grad[self.copies.at] * self.copies.counts[..., None, None]  # copies count once

        def run() -> Result:
            out = self.attend(*leaves)
            return self.copies, [out.detach(), *torch.autograd.grad(out, leaves, grad_output)]

        return run


def padded(layout: TreeLayout) -> Arm:
    places = torch.nn.utils.rnn.pad_sequence(layout.places, batch_first=True, padding_value=-1)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (t.transpose(1, 2) for t in tensors)
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True).transpose(
            1, 2
        )

    return Arm(Copies(places, layout.num_tokens), attend)


def two_levels(samples: Sequence[Sample], layout: TreeLayout) -> Arm:
    """Make the layout that stores equal prompts once."""
    packed = GroupedLayout.from_sequences([p + a for p, a in samples], [len(p) for p, _ in samples])
    places = torch.empty(packed.num_tokens, dtype=torch.int64)
    for packed_places, trie_places in zip(packed.places, layout.places, strict=True):
        places[packed_places] = trie_places
    attend = partial(rlkernels.grouped_attention, layout=packed, scale=SCALE)
    return Arm(Copies(places, layout.num_tokens), attend)


def copied(layout: TreeLayout, scale: float) -> Arm:
    """Copy the keys and values of the full path for every node, as TRL's asynchronous trainer does."""
    place = torch.arange(layout.num_tokens)
    nodes = []
    for (start, stop, _), path in zip(layout.nodes.tolist(), layout.paths()):
        index = torch.cat([place[rows] for rows in (*path, slice(start, stop))])
        nodes.append((slice(start, stop), index, index <= place[start:stop, None]))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = []
        for rows, index, mask in nodes:
            q, k, v = (t.transpose(0, 1)[None] for t in (query[rows], key[index], value[index]))
            node_out = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
            out.append(node_out[0].transpose(0, 1))
        return torch.cat(out)

    return Arm(Copies(place, layout.num_tokens), attend)


def make_case(op: str, shape: str, layout: TreeLayout, arms: Mapping[str, Arm], reference: str) -> Case:
    tensors = [torch.randn(layout.num_tokens, heads, HEADS[2]) for heads in (HEADS[0], HEADS[1], HEADS[1])]
    grad = torch.randn_like(tensors[0])

    def compare(*pair: Result) -> str:
        return match(*(copies.outputs(results) for copies, results in pair))

    providers: dict[str, Provider] = {name: arm.timed(tensors, grad) for name, arm in arms.items()}
    return Case(op, shape, providers, reference=reference, compare=compare)


def tree_case(label: str, samples: Sequence[Sample]) -> Case:
    layout = TreeLayout.from_sequences([prompt + answer for prompt, answer in samples])
    ours: Any = partial(rlkernels.tree_attention, layout=layout, scale=SCALE)
    arms = {
        "rlkernels": Arm(Copies(torch.arange(layout.num_tokens), layout.num_tokens), ours),
        "rlkernels, two levels": two_levels(samples, layout),
        "torch SDPA, padded": padded(layout),
        "torch SDPA, paths copied": copied(layout, SCALE),
    }
    num_tokens = sum(len(prompt) + len(answer) for prompt, answer in samples)
    shape = f"{label}: {num_tokens} tokens, {layout.num_tokens} in the trie, {ON_HEADS}"
    return make_case("tree_attention", shape, layout, arms, "torch SDPA, padded")


def make_samples(
    numbers: Iterator[int], system: int, count: int, prompt: int, answers: int, answer: int
) -> list[Sample]:
    """Make samples of a system prompt, prompts after it, and answers to each."""
    system_ids = list(itertools.islice(numbers, system))
    prompt_ids = [[*system_ids, *itertools.islice(numbers, prompt)] for _ in range(count)]
    return [(ids, list(itertools.islice(numbers, answer))) for ids in prompt_ids for _ in range(answers)]


def make_turns(
    numbers: Iterator[int], rollouts: int, count: int, thought: int, answer: int, question: int
) -> list[Sample]:
    """Make a sample of each turn of a rollout; its thought is not in the history of the next."""
    samples = []
    system_ids = list(itertools.islice(numbers, 200))
    for _ in range(rollouts):
        history = system_ids
        for _ in range(count):
            turn_ids = list(itertools.islice(numbers, thought + answer))
            samples.append((history, turn_ids))
            history = [*history, *turn_ids[thought:], *itertools.islice(numbers, question)]
    return samples


def cases(quick: bool) -> Iterator[Case]:
    torch.manual_seed(0)
    numbers = itertools.count()
    yield tree_case("1 prompt of 1024, 8 answers of 96", make_samples(numbers, 0, 1, 1024, 8, 96))
    yield tree_case("1 prompt of 1024, 128 answers of 4", make_samples(numbers, 0, 1, 1024, 128, 4))
    yield tree_case("4 rollouts of 8 turns, thinking dropped", make_turns(numbers, 4, 8, 40, 20, 60))
    sizes = ((4, 4, 100),) if quick else ((16, 4, 100), (16, 4, 500), (4, 4, 2000))
    for count, answers, answer in sizes:
        label = f"system prompt of 1000, {count} prompts of 100 x {answers} answers of {answer}"
        yield tree_case(label, make_samples(numbers, 1000, count, 100, answers, answer))
