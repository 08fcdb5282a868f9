"""Randomness that is a function of its key, never of what ran before: nothing to save, nothing to restore."""

import hashlib
from collections.abc import Sequence

import torch


def keyed_seed(*key: int | str) -> int:
    """A 63-bit seed from a key such as (run seed, step)."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def prompt_order(seed: int, first: int, count: int, size: int) -> list[int]:
    """Entries ``first`` .. ``first + count - 1`` of an endless run through ``size`` prompts.

    Every epoch visits each prompt once, in an order of its own.
    """
    order: list[int] = []
    for epoch in range(first // size, (first + count - 1) // size + 1):
        generator = torch.Generator().manual_seed(keyed_seed(seed, "epoch", epoch))
        order += torch.randperm(size, generator=generator).tolist()
    start = first % size
    return order[start : start + count]


def keyed_choice(options: Sequence, *key: int | str):
    """One of the options, uniformly."""
    return options[keyed_seed(*key) % len(options)]


def keyed_unit(*key: int | str) -> float:
    """A number in [0, 1)."""
    return keyed_seed(*key) / 2.0**63
