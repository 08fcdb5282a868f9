"""Token sequences packed into one row of tokens, with each common prefix once, and the predictions of the row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from rlkernels import backend
from rlkernels.prefix_cache.layout import GroupedLayout, TokenIds, TreeLayout, token_ids


@dataclass
class Packed:
    """T packed tokens and the R different predictions that N scored tokens need.

    Tokens that several sequences share are scored once; autograd sums their gradients.

    Attributes:
        ids: int64 [T], the packed tokens; of each sequence all but the last, which predicts nothing.
        layout: the tokens that each token attends to, and its position: pass it to the model as ``attention``.
        rows: int64 [R], the packed token that predicts.
        targets: int64 [R], the token to predict.
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

    def to(self, device: torch.device | str) -> Self:
        """Move all but the layout, which stays on the CPU."""
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
        sequences: token ids of each; in any order; they may be equal or empty.
        scored: for each token of each sequence whether it is scored; None: all but the first tokens.
        prefix_lens: for two levels, the length of each sequence's prefix; sequences with equal prefixes share them.
            None: a trie. See :func:`packs_tries`.

    Returns:
        The packed tokens and their predictions, on the CPU.

    Raises:
        TypeError, ValueError: a sequence that is no row of integers; flags or lengths that do not fit the sequences; a
            scored first token, which nothing predicts.
    """
    tokens = [token_ids(f"sequences[{i}]", sequence) for i, sequence in enumerate(sequences)]
    if scored is not None and len(scored) != len(tokens):
        raise ValueError(f"scored must have {len(tokens)} lists of flags, one for each sequence, got {len(scored)}")
    flags = [_flags(i, row, None if scored is None else scored[i]) for i, row in enumerate(tokens)]
    inputs = [row[:-1] for row in tokens]
    if prefix_lens is None:
        layout = TreeLayout.from_sequences(inputs)
    else:
        layout = GroupedLayout.from_sequences(inputs, prefix_lens)
    assert layout.ids is not None
    empty = np.empty(0, dtype=np.int64)
    predictors = np.concatenate([empty, *(place.numpy()[flag[1:]] for place, flag in zip(layout.places, flags))])
    targets = np.concatenate([empty, *(row[flag] for row, flag in zip(tokens, flags))])
    lowest = int(targets.min()) if len(targets) else 0
    span = int(np.ptp(targets)) + 1 if len(targets) else 1
    codes = predictors * span + (targets - lowest)  # one number for each pair of predictor and target
    unique_codes, pairs = np.unique(codes, return_inverse=True)
    rows = unique_codes // span
    unique_targets = unique_codes % span + lowest
    return Packed(layout.ids, layout, *(torch.from_numpy(array) for array in (rows, unique_targets, pairs)))


def packs_tries(device: torch.device) -> bool:
    """Return whether sequences are packed as tries on a device: on a GPU where a proof prefers our kernels for trees.

    Args:
        device: of the model.

    Returns:
        True: a trie. False: groups of two levels, by ``prefix_lens`` of :func:`pack`.
    """
    return device.type == "cpu" or backend.choose("tree_attention", device) != "torch"


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
