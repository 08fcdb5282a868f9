"""Attention on the trie of a training batch, forward and backward, against ways of other trainers to do the same.

Inputs of every arm lie as its model would hold them: padded rows repeat what sequences share, the trie holds it once.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import rlkernels
from bench import Case, Missing
from bench._runner import match
from rlkernels.prefix_cache import GroupedLayout, TreeLayout

HEADS = (6, 2, 64)  # of queries, of keys, elements of each
Sample = tuple[list[int], list[int]]  # prompt, answer


@dataclass
class Arm:
    """One way to hold the batch.

    Attributes:
        places: int64 [n] or [B, L], the place in the trie of each token that the arm holds; -1: padding.
        attend: query, key, value, [n, H, d] or [B, L, H, d] -> output.
    """

    places: torch.Tensor
    attend: Callable[..., torch.Tensor]

    def timed(self, tensors: Sequence[torch.Tensor], grad: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Return a function that computes output and gradients of query, key and value."""
        held = self.places.clamp(min=0)
        leaves = [t[held].contiguous().requires_grad_() for t in tensors]
        outer = grad[held] * self.firsts()[..., None, None]

        def run() -> list[torch.Tensor]:
            out = self.attend(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, outer)]

        return run

    def firsts(self) -> torch.Tensor:
        """Tell of each token whether it is the first of its copies: those count once."""
        flat = self.places.flatten()
        order = flat.argsort(stable=True)
        sorted_places = flat[order]
        first = torch.empty_like(flat, dtype=torch.bool)
        first[order] = torch.cat([sorted_places.new_ones(1), sorted_places.diff()]).bool() & (sorted_places >= 0)
        return first.view(self.places.shape)

    def in_the_trie(self, found: Sequence[torch.Tensor], tokens: int) -> list[torch.Tensor]:
        """Return output and gradients by place in the trie, the gradients of copies added up."""
        first, held = self.firsts().flatten(), (self.places >= 0).flatten()
        flat, (out, *grads) = self.places.flatten(), [t.flatten(0, -3) for t in found]
        whole = out.new_empty(tokens, *out.shape[1:]).index_copy(0, flat[first], out[first])
        return [whole, *(g.new_zeros(tokens, *g.shape[1:]).index_add(0, flat[held], g[held]) for g in grads)]


def padded(layout: TreeLayout, scale: float) -> Arm:
    places = torch.nn.utils.rnn.pad_sequence(layout.places, batch_first=True, padding_value=-1)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (t.transpose(1, 2) for t in tensors)
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True).transpose(
            1, 2
        )

    return Arm(places, attend)


def two_levels(samples: Sequence[Sample], layout: TreeLayout, scale: float) -> Arm:
    """Prompts that are equal, once; samples are in order of prompts."""
    prefixes, suffixes, starts, places = [], [], [0], []
    for _, group in itertools.groupby(zip(samples, layout.places), lambda pair: pair[0][0]):
        members = list(group)
        prompt = len(members[0][0][0])
        places += [members[0][1][:prompt], *(own[prompt:] for _, own in members)]
        prefixes.append(prompt)
        suffixes += [len(answer) for (_, answer), _ in members]
        starts.append(len(suffixes))
    packed = GroupedLayout(prefixes, suffixes, starts)
    return Arm(torch.cat(places), partial(rlkernels.grouped_attention, layout=packed, scale=scale))


def copied(layout: TreeLayout, scale: float) -> Arm:
    """The keys and values of the whole path copied for every node, as TRL's asynchronous trainer does."""
    place, parts = torch.arange(layout.num_tokens), []
    for (start, stop, _), path in zip(layout.nodes.tolist(), layout.paths()):
        index = torch.cat([place[rows] for rows in (*path, slice(start, stop))])
        parts.append((slice(start, stop), index, index <= place[start:stop, None]))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = []
        for rows, index, mask in parts:
            q, k, v = (t.transpose(0, 1)[None] for t in (query[rows], key[index], value[index]))
            found = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
            out.append(found[0].transpose(0, 1))
        return torch.cat(out)

    return Arm(place, attend)


def flex(layout: TreeLayout, scale: float) -> Arm | Missing:
    """FlexAttention with the mask of the trie, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    end, tokens = layout.end, layout.num_tokens
    mask = create_block_mask(lambda b, h, i, j: (j <= i) & (i < end[j]), None, None, tokens, tokens, device="cpu")
    torch._dynamo.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (t.transpose(0, 1)[None] for t in tensors)
        return compiled(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)

    try:
        leaves = [torch.zeros(tokens, heads, HEADS[2], requires_grad=True) for heads in (HEADS[0], HEADS[1], HEADS[1])]
        attend(*leaves).sum().backward()
    except Exception as error:  # whatever the compiler raises on this machine is the reason
        return Missing(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    return Arm(torch.arange(tokens), attend)


def trained(label: str, samples: Sequence[Sample], with_flex: bool = False) -> Case:
    layout, scale = TreeLayout.from_sequences([prompt + answer for prompt, answer in samples]), HEADS[2] ** -0.5
    tensors = [torch.randn(layout.num_tokens, heads, HEADS[2]) for heads in (HEADS[0], HEADS[1], HEADS[1])]
    grad = torch.randn_like(tensors[0])
    ours: Any = partial(rlkernels.tree_attention, layout=layout, scale=scale)
    arms: dict[str, Arm | Missing] = {
        "rlkernels": Arm(torch.arange(layout.num_tokens), ours),
        "rlkernels, two levels": two_levels(samples, layout, scale),
        "torch SDPA, padded": padded(layout, scale),
        "torch SDPA, paths copied": copied(layout, scale),
    }
    if with_flex:
        arms["FlexAttention"] = flex(layout, scale)

    def provider(name: str, arm: Arm | Missing) -> Any:
        if isinstance(arm, Missing):
            return arm
        run = arm.timed(tensors, grad)
        return lambda: (name, run())

    def compare(found: tuple[str, list[torch.Tensor]], wanted: tuple[str, list[torch.Tensor]]) -> str:
        by_place = []
        for name, results in (found, wanted):
            arm = arms[name]
            assert isinstance(arm, Arm)
            by_place.append(arm.in_the_trie(results, layout.num_tokens))
        return match(*by_place)

    given = sum(len(prompt) + len(answer) for prompt, answer in samples)
    return Case(
        op="tree_attention",
        shape=f"{label}: {given} tokens, {layout.num_tokens} in the trie, {HEADS[0]} on {HEADS[1]} heads of {HEADS[2]}",
        providers={name: provider(name, arm) for name, arm in arms.items()},
        reference="torch SDPA, padded",
        compare=compare,
    )


def prompts(numbers: Iterator[int], system: int, count: int, prompt: int, answers: int, answer: int) -> list[Sample]:
    """A system prompt, prompts after it, and answers to each."""
    first = list(itertools.islice(numbers, system))
    given = [[*first, *itertools.islice(numbers, prompt)] for _ in range(count)]
    return [(one, list(itertools.islice(numbers, answer))) for one in given for _ in range(answers)]


def turns(numbers: Iterator[int], rollouts: int, count: int, thought: int, said: int, asked: int) -> list[Sample]:
    """Each turn of a rollout as a sample; its thought is dropped from the history of the next."""
    samples, first = [], list(itertools.islice(numbers, 200))
    for _ in range(rollouts):
        history = first
        for _ in range(count):
            answer = list(itertools.islice(numbers, thought + said))
            samples.append((history, answer))
            history = [*history, *answer[thought:], *itertools.islice(numbers, asked)]
    return samples


def cases(quick: bool) -> Iterator[Case]:
    torch.manual_seed(0)
    numbers = itertools.count()
    yield trained("1 prompt of 1024, 8 answers of 96", prompts(numbers, 0, 1, 1024, 8, 96), with_flex=True)
    yield trained("1 prompt of 1024, 128 answers of 4", prompts(numbers, 0, 1, 1024, 128, 4))
    yield trained("4 rollouts of 8 turns, thinking dropped", turns(numbers, 4, 8, 40, 20, 60))
    sizes = ((4, 4, 100),) if quick else ((16, 4, 100), (16, 4, 500), (4, 4, 2000))
    for count, answers, answer in sizes:
        label = f"system prompt of 1000, {count} prompts of 100 x {answers} answers of {answer}"
        yield trained(label, prompts(numbers, 1000, count, 100, answers, answer))
