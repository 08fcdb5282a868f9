"""Random numbers that depend on their key alone, never on earlier calls: there is no state to save."""

import hashlib
from collections.abc import Sequence

import torch


def keyed_seed(*key: int | str) -> int:
    """Return a 63-bit seed from a key such as (run seed, step)."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def prompt_order(seed: int, first: int, count: int, size: int) -> list[int]:
    """Return entries ``first`` .. ``first + count - 1`` of an endless sequence of prompt numbers.

    Every epoch visits each of ``size`` prompts once, in an order of its own.
    """
    order: list[int] = []
    for epoch in range(first // size, (first + count - 1) // size + 1):
        generator = torch.Generator().manual_seed(keyed_seed(seed, "epoch", epoch))
        order += torch.randperm(size, generator=generator).tolist()
    start = first % size
    return order[start : start + count]


def keyed_choice(options: Sequence, *key: int | str):
    """Return one of the options, uniformly."""
    return options[keyed_seed(*key) % len(options)]


def keyed_unit(*key: int | str) -> float:
    """Return a number in [0, 1)."""
    return keyed_seed(*key) / 2.0**63
