"""Whether right answers are rare in a task: whether it pays to train on them more than once.

Where most groups have no right answer, the few that there are say more than a run makes of them at once. Where most
have one, those that have none do so by bad luck, and what was right by luck is nothing to learn. Of three tasks the one
with 0.63 of groups without a right answer gained, those with 0.48 and 0.24 did not (docs/curriculum.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from python_trainer.data import Rollout

FIRST = 128  # groups after which it is decided: so many tell a share to within 0.09, with 95 % certainty


class Rarity:
    """Counts the groups without a right answer, up to :data:`FIRST`.

    Args:
        least: share of the groups from which on right answers are rare; 0: they always are.
    """

    def __init__(self, least: float):
        self.least = least
        self.groups = self.failed = 0

    @property
    def known(self) -> bool:
        """Whether it is decided."""
        return not self.least or self.groups >= FIRST

    @property
    def rare(self) -> bool:
        """Whether right answers are rare, as far as that is known."""
        return self.known and self.failed >= self.least * self.groups

    def count(self, groups: Sequence[Sequence[Rollout]]) -> bool:
        """Groups of fresh answers that are right or wrong -> whether they decide it."""
        if self.known:
            return False
        self.groups += len(groups)
        self.failed += sum(all(answer.accuracy <= 0.5 for answer in group) for group in groups)
        return self.known

    def words(self) -> str:
        """For the one who trains."""
        found = f"{self.failed} of the first {self.groups} groups had no right answer"
        if self.rare:
            return f"{found}: right answers are rare here, and trained on again"
        return f"{found}, a share below {self.least:g}: right answers are not rare here, and not trained on again"

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self.groups, "failed": self.failed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.groups, self.failed = state["groups"], state["failed"]
