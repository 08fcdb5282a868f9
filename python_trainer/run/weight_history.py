"""The path of a run: its first model, and the weights after every step as lossless deltas, in RUN/weights."""

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.model.policy import Policy
from python_trainer.model.weights import checkpoint_weights
from rlkernels._files import replace_file
from rlkernels.weights.checkpoints import History, step_file, step_files
from rlkernels.weights.delta import Delta, encode, has_zstandard


def check_weight_history(limit: int | None) -> None:
    """Raise UserError if the setting needs what is not installed."""
    if limit is not None and not has_zstandard():
        raise UserError("save.weight_history needs zstandard: pip install 'rlkernels[weights]', or leave it null")


def follows(delta: bytes, earlier: bytes) -> bool:
    """Return, by their checksums, whether the old weights of a delta are the new ones of an earlier delta."""
    old = {name: [piece.before for piece in entry.pieces] for name, entry in Delta(delta).entries.items()}
    new = {name: [piece.after for piece in entry.pieces] for name, entry in Delta(earlier).entries.items()}
    return old == new


class WeightHistory:
    """Records the weights after every step, exact to the bit, as ``rlkernels.weights.History`` reads them.

    It holds a copy of the weights on the host. If the deltas exceed the limit, or cannot be written, it ends with one
    warning, and the run goes on.

    Args:
        folder: RUN/weights, of rank 0.
        limit: bytes of all deltas.
        note: shows a warning.

    Attributes:
        keeps: whether it records the next step; known to all ranks.
    """

    def __init__(self, policy: Policy, folder: Path, limit: int, ranks: RankGroup, note: Callable[[str], None]):
        self.policy = policy
        self.folder = folder
        self.limit = limit
        self.ranks = ranks
        self.note = note
        self._last: dict[str, torch.Tensor] | None = None  # on rank 0: weights after the last step; None: it has ended
        self._bytes = 0  # of all deltas
        self.keeps = False

    def begin(self, step: int) -> None:
        """Go on after a step of the run; 0: the first model, which is there already. All ranks call together.

        Deltas of later steps go: a resumed run takes these steps again.
        """
        weights = self._weights()
        if self.ranks.rank == 0:
            self._begin(step, {name: weight.to("cpu", copy=True) for name, weight in weights})
        self._agree(weights)

    def add(self, step: int) -> None:
        """Record the weights after a step. All ranks call together."""
        if not self.keeps:
            return
        self.policy.sync_inference_model()
        weights = self._weights()
        if self.ranks.rank == 0:
            self._add(step, {name: weight.cpu() for name, weight in weights})
        self._agree(weights)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.policy.streams_weights:
            return self.policy.stream_checkpoint()
        return checkpoint_weights(self.policy.inference_model)

    def _agree(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        deque(weights, 0)  # on the other ranks: all gather them
        self.keeps = self.ranks.broadcast(self._last is not None)

    def _begin(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        try:
            for number, file in step_files(self.folder).items():
                if number > step:
                    file.unlink()
            for draft in self.folder.glob(".*.tmp"):  # a kill may have left it
                shutil.rmtree(draft)
            history = History(self.folder)
            if history.steps < step:
                raise ValueError(f"it ends at step {history.steps}")
            files = step_files(self.folder)
            if files and not follows(encode(weights, weights), files[step].read_bytes()):
                raise ValueError(f"it has other weights after step {step}")
        except (OSError, ValueError) as error:
            self.note(f"save.weight_history: {self.folder} cannot go on after step {step}: {error}")
            return
        self._last = weights
        self._bytes = sum(file.stat().st_size for file in files.values())

    def _add(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        assert self._last is not None
        last, self._last = self._last, None
        delta = encode(weights, last)
        self._bytes += len(delta)
        if self._bytes > self.limit:
            self.note(f"save.weight_history: {self.folder} ends at step {step - 1}: {self.limit} bytes are used up")
            return
        try:
            replace_file(step_file(self.folder, step), delta)
        except OSError as error:
            self.note(f"save.weight_history: {self.folder} ends at step {step - 1}: {error}")
            return
        for name, weight in weights.items():
            last[name].copy_(weight)
        self._last = last
