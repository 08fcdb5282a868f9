"""Token sequences as one row of tokens, in which what several of them begin with is once, and what it predicts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlkernels.prefix_cache.layout import GroupedLayout, TokenIds, TreeLayout, token_ids


@dataclass
class Packed:
    """T packed tokens and the R different predictions that N scored tokens need.

    Tokens that several sequences share are scored once, and their gradients add up by themselves.

    Attributes:
        ids: int64 [T], the packed tokens; of each sequence all but the last, which predicts nothing.
        layout: what each token sees, and its position: pass it to the model as ``attention``.
        rows: int64 [R], the packed token that predicts.
        targets: int64 [R], the token that it should predict.
        pairs: int64 [N], the prediction of each scored token; sequences one after the other.
    """

    ids: torch.Tensor
    layout: TreeLayout
    rows: torch.Tensor
    targets: torch.Tensor
    pairs: torch.Tensor

    @property
    def position_ids(self) -> torch.Tensor:
        """Return int64 [T], the place of each token in its sequence, on the device of ``ids``."""
        return self.layout.position_ids.to(self.ids.device)

    def to(self, device: torch.device | str) -> "Packed":
        """Move all but the layout, which lies on the CPU."""
        names = "ids", "rows", "targets", "pairs"
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def pack(
    sequences: Iterable[TokenIds],
    scored: Sequence[Sequence[bool]] | None = None,
    *,
    prefix_lens: Sequence[int] | None = None,
) -> Packed:
    """Pack sequences as a trie, or as groups of two levels.

    Args:
        sequences: token ids of each; in any order, equal ones and empty ones too.
        scored: for each token of each sequence whether it is scored; None: all but the first tokens.
        prefix_lens: two levels: sequences share their first so many tokens if all of these are equal, and nothing else.
            None: a trie. See :func:`packs_tries`.

    Returns:
        The packed tokens and their predictions, on the CPU.

    Raises:
        TypeError, ValueError: something that is no row of integers; flags or lengths that do not fit the sequences; a
            first token that is scored, which nothing predicts.
    """
    tokens = [token_ids(f"sequences[{i}]", sequence) for i, sequence in enumerate(sequences)]
    flags = [_flags(i, row, None if scored is None else scored[i]) for i, row in enumerate(tokens)]
    seen = [row[:-1] for row in tokens]
    layout = TreeLayout.from_sequences(seen) if prefix_lens is None else GroupedLayout.from_sequences(seen, prefix_lens)
    assert layout.ids is not None
    empty = np.empty(0, dtype=np.int64)
    predictors = np.concatenate([empty, *(place.numpy()[flag[1:]] for place, flag in zip(layout.places, flags))])
    targets = np.concatenate([empty, *(row[flag] for row, flag in zip(tokens, flags))])
    least, span = int(targets.min()) if len(targets) else 0, int(np.ptp(targets)) + 1 if len(targets) else 1
    numbers, pairs = np.unique(predictors * span + (targets - least), return_inverse=True)  # one number for each pair
    rows, predicted = numbers // span, numbers % span + least
    return Packed(layout.ids, layout, *(torch.from_numpy(array) for array in (rows, predicted, pairs)))


def packs_tries(device: torch.device) -> bool:
    """Tell how sequences are packed for a device: on a GPU two levels, whose kernels are proved, until tries are.

    Args:
        device: that the model runs on.

    Returns:
        True: a trie. False: groups of two levels, by ``prefix_lens`` of :func:`pack`.
    """
    return device.type == "cpu"


def _flags(i: int, tokens: np.ndarray, scored: Sequence[bool] | None) -> np.ndarray:
    if scored is None:
        flags = np.ones(len(tokens), dtype=bool)
        flags[:1] = False
        return flags
    flags = np.asarray(scored, dtype=bool)
    if flags.shape != tokens.shape:
        raise ValueError(f"scored[{i}] must have {len(tokens)} flags, one for each token, got {flags.shape}")
    if flags[:1].any():
        raise ValueError(f"scored[{i}] must be False for the first token, which nothing predicts")
    return flags
