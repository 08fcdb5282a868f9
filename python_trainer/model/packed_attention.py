"""What the tokens of packed groups look at while a model trains: the prefix of their group, and their own sequence."""

import torch

import rlkernels.backend
from python_trainer.errors import UserError
from python_trainer.model.padded_rows import PaddedRows
from rlkernels import grouped_attention
from rlkernels.prefix_cache import GroupedLayout
from rlkernels.prefix_cache.layout import Lengths


class PackedLayout(GroupedLayout):
    """The ``attention`` of a forward pass on packed groups."""

    def __init__(self, prefix_lens: Lengths, suffix_lens: Lengths, group_starts: Lengths):
        super().__init__(prefix_lens, suffix_lens, group_starts)
        self._padded: dict[torch.device, PaddedRows] = {}

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
            if query.device not in self._padded:  # the same for all layers
                self._padded[query.device] = self._padded_rows(query.device)
            return self._padded[query.device].attend(query, key, value, scale)
        return grouped_attention(query, key, value, self, scale=scale)

    def _padded_rows(self, device: torch.device) -> PaddedRows:
        """A row for each prefix and each suffix, which also sees the keys of its prefix."""
        own_lens = torch.cat([self.prefix_lens, self.suffix_lens])
        own_starts = torch.cat([self.prefix_starts, self.suffix_starts])
        before_lens = torch.cat([torch.zeros_like(self.prefix_lens), self.prefix_lens[self.suffix_groups]])
        before_starts = torch.cat([self.prefix_starts, self.prefix_starts[self.suffix_groups]])
        q = torch.arange(int(own_lens.max()) if len(own_lens) else 0, device="cpu")
        k = torch.arange(int((before_lens + own_lens).max()) if len(own_lens) else 0, device="cpu")
        has_query = q < own_lens[:, None]  # [R, Q]
        has_key = k < (before_lens + own_lens)[:, None]  # [R, K]
        query_index = torch.where(has_query, own_starts[:, None] + q, 0)
        own_key = own_starts[:, None] + k - before_lens[:, None]
        key_index = torch.where(k < before_lens[:, None], before_starts[:, None] + k, own_key)
        visible = k <= (before_lens[:, None] + q)[..., None]  # [R, Q, K]
        row_of = torch.empty(self.num_tokens, dtype=torch.int64, device="cpu")
        row_of[query_index[has_query]] = torch.arange(has_query.numel(), device="cpu").view_as(has_query)[has_query]
        tables = query_index, torch.where(has_key, key_index, 0), torch.where(visible, 0.0, -torch.inf), row_of
        return PaddedRows(*(table.to(device) for table in tables))
