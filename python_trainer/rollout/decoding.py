"""One rollout in the making, as scheduler and drafter see it."""

from dataclasses import dataclass, field

from python_trainer.data import Rollout
from rlkernels.prefix_cache import Sequence


@dataclass(eq=False)
class Decoding:
    """A rollout that is being generated, with its place in the KV cache."""

    rollout: Rollout
    sample_id: int
    max_new_tokens: int
    sequence: Sequence = field(init=False)  # everything but the last drawn token is computed
    draft: list[int] = field(default_factory=list)  # guesses of what follows it

    @property
    def drawn(self) -> int:
        """How many tokens have been generated."""
        return len(self.rollout.logprobs)

    @property
    def length(self) -> int:
        """Prompt, prefix and all drawn tokens."""
        return len(self.rollout.prompt_ids) + len(self.rollout.response_ids)

    def tokens(self) -> list[int]:
        return [*self.rollout.prompt_ids, *self.rollout.response_ids]
