"""What the tokens of packed groups look at while a model trains: the prefix of their group, and their own sequence."""

import torch

import rlkernels.backend
from python_trainer.errors import UserError
from python_trainer.model.varlen import VarlenRows, varlen_rows
from rlkernels import grouped_attention
from rlkernels.prefix_cache import GroupedLayout
from rlkernels.prefix_cache.layout import Lengths


class PackedLayout(GroupedLayout):
    """The ``attention`` of a forward pass on packed groups."""

    def __init__(self, prefix_lens: Lengths, suffix_lens: Lengths, group_starts: Lengths):
        super().__init__(prefix_lens, suffix_lens, group_starts)
        self._rows: dict[torch.device, VarlenRows] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [T, Hq, d], key and value [T, Hk, d] -> [T, Hq, d].

        Raises:
            UserError: sequences beyond a sliding window.
        """
        if window is not None and (longest := int(self.position_ids.max()) + 1) > window:
            raise UserError(
                f"prompt and answer must be within the model's sliding window of {window} tokens, got {longest}: "
                "rollout.max_completion_length must be lower"
            )
        if rlkernels.backend.choose("grouped_attention", query.device) == "torch":
            if query.device not in self._rows:  # the same for all layers
                self._rows[query.device] = varlen_rows(self, query.device)
            return self._rows[query.device].attend(query, key, value, scale)
        return grouped_attention(query, key, value, self, scale=scale)
