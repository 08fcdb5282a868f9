"""How much memory a computation takes, found by running it on tensors without numbers."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlkernels.logprobs import linear


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors made within it that are alive; those on ``meta`` as if they held numbers.

    What autograd keeps for a backward pass is alive, so that a pass on a model on ``meta`` tells what it takes. Memory
    that an operation takes inside and gives back is not seen, except that of ``linear_token_logprobs``, whose blocks
    of logits count.

    Args:
        known: tensors that are there already and do not count, nor do views of them.
        gpu_memory: of the GPU that is meant, which decides about the size of those blocks; None: a CPU.

    Attributes:
        now, most: bytes.
    """

    def __init__(self, known: Iterable[torch.Tensor], gpu_memory: int | None = None):
        super().__init__()
        self.now = self.most = 0
        self.gpu_memory = gpu_memory
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._blockwise(func, args) if func in BLOCKWISE else func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _gone(self, size: int) -> None:
        self.now -= size

    def _blockwise(self, func: Any, args: Sequence[Any]) -> Any:
        """The op's own lines, so that what they make counts."""
        plain, chunk = BLOCKWISE[func]
        changed, (rows, _), vocab = list(args), args[0].shape, len(args[1])
        changed[chunk] = min(linear.block_columns(rows, self.gpu_memory), vocab)
        with self:
            return plain(*changed)


# op -> the function behind it, and which argument is the size of a block
BLOCKWISE: dict[Any, tuple[Callable[..., Any], int]] = {
    torch.ops.rlkernels.linear_token_logprobs.default: (linear.plain_forward, 6),
    torch.ops.rlkernels.linear_token_logprobs_backward.default: (linear.plain_backward, 9),
}
