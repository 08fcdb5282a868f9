"""Random draws that depend on their key alone, never on earlier calls: there is no state to save."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def keyed_seed(*key: int | str) -> int:
    """Return a 63-bit seed from a key such as (run seed, step)."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def keyed_unit(*key: int | str) -> float:
    """Return a number in [0, 1)."""
    return keyed_seed(*key) / 2.0**63


def keyed_choice(options: Sequence[T], *key: int | str) -> T:
    """Return one of the options, uniformly."""
    return options[keyed_seed(*key) % len(options)]
