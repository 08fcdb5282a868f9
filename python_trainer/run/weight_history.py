"""The path of a run: its first model, and the weights after every step as lossless deltas, in RUN/weights."""

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from python_trainer.distributed import RankGroup
from python_trainer.model.policy import Policy
from python_trainer.model.weights import checkpoint_weights
from rlkernels._files import replace_file
from rlkernels.weights.checkpoints import BASE, History, step_file, step_files
from rlkernels.weights.delta import Delta, encode


def follows(delta: bytes, earlier: bytes) -> bool:
    """Return, by their checksums, whether the old weights of a delta are the new ones of an earlier delta."""
    old = {name: [piece.before for piece in entry.pieces] for name, entry in Delta(delta).entries.items()}
    new = {name: [piece.after for piece in entry.pieces] for name, entry in Delta(earlier).entries.items()}
    return old == new


class WeightHistory:
    """Records the weights after every step, exact to the bit, as ``rlkernels.weights.History`` reads them.

    It holds a copy of the weights on the host. Recording ends with one note, and the run goes on, if the deltas exceed
    the limit or cannot be written. It never begins again: a gap would break the chain of deltas.

    Args:
        folder: RUN/weights, of rank 0.
        limit: bytes of all deltas.
        note: shows a warning.

    Attributes:
        records: whether it records the next step; known to all ranks.
    """

    def __init__(self, policy: Policy, folder: Path, limit: int, ranks: RankGroup, note: Callable[[str], None]):
        self.policy = policy
        self.folder = folder
        self.limit = limit
        self.ranks = ranks
        self.note = note
        self._last: dict[str, torch.Tensor] = {}  # on rank 0: weights after the last step
        self._bytes = 0  # of all deltas
        self.records = False

    def begin(self, step: int) -> None:
        """Record from a step of the run on; 0: the first model, which is there already. All ranks call together.

        Remove the deltas of later steps, which a resumed run takes again.
        """
        self.policy.sync_inference_model()  # a checkpoint may have been loaded since
        weights = self._weights()
        if self.ranks.rank == 0:
            self.records = self._begin(step, {name: weight.to("cpu", copy=True) for name, weight in weights})
        self._conclude(weights)

    def add(self, step: int) -> None:
        """Record the weights after a step. All ranks call together."""
        if not self.records:
            return
        self.policy.sync_inference_model()
        weights = self._weights()
        if self.ranks.rank == 0:
            self.records = self._add(step, {name: weight.cpu() for name, weight in weights})
        self._conclude(weights)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.policy.streams_weights:
            return self.policy.stream_checkpoint()
        return checkpoint_weights(self.policy.inference_model)

    def _conclude(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        deque(weights, 0)  # every rank must iterate: gathering is collective
        self.records = self.ranks.broadcast(self.records)
        if not self.records:
            self._last = {}  # free the copy

    def _begin(self, step: int, weights: dict[str, torch.Tensor]) -> bool:
        """Check that the history reaches the step with these weights; return whether it does."""
        try:
            for number, file in step_files(self.folder).items():
                if number > step:
                    file.unlink()
            for draft in self.folder.glob(".*.tmp"):  # a kill may have left it
                shutil.rmtree(draft)
            if not (self.folder / BASE).exists():
                raise ValueError("the run began without a weight history")
            history = History(self.folder)
            if history.steps < step:
                raise ValueError(f"recording ended at step {history.steps}")
            files = step_files(self.folder)
            # a delta of the weights to themselves carries their checksums
            if files and not follows(encode(weights, weights), files[step].read_bytes()):
                raise ValueError(f"it has other weights after step {step}")
        except (OSError, ValueError) as error:
            self.note(f"save.weight_history: {self.folder} cannot go on after step {step}: {error}")
            return False
        self._last = weights
        self._bytes = sum(file.stat().st_size for file in files.values())
        return True

    def _add(self, step: int, weights: dict[str, torch.Tensor]) -> bool:
        """Write the delta of a step; return whether recording goes on."""
        delta = encode(weights, self._last)
        self._bytes += len(delta)
        if self._bytes > self.limit:
            self.note(f"save.weight_history: {self.folder} ends at step {step - 1}: {self.limit} bytes are used up")
            return False
        try:
            replace_file(step_file(self.folder, step), delta)
        except OSError as error:
            self.note(f"save.weight_history: {self.folder} ends at step {step - 1}: {error}")
            return False
        for name, weight in weights.items():
            self._last[name].copy_(weight)
        return True
