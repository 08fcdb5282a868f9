"""What an engine can take, and one clear error where a request asks for more."""

from collections.abc import Sequence
from dataclasses import dataclass

from python_trainer.errors import UserError
from python_trainer.rollout.types import Request, SamplingParams


@dataclass(frozen=True)
class Limits:
    """Of one engine."""

    positions: int  # most tokens of a sequence
    vocabulary: int  # token ids are below
    room: int  # tokens in the KV cache
    tokenizer: bool  # there is one, for stop strings


def check_requests(requests: Sequence[Request], sampling: SamplingParams, limits: Limits) -> None:
    """Raises UserError: a request or setting is out of range, e.g. a prompt longer than the model's limit."""
    if not sampling.temperature >= 0:
        raise UserError(f"temperature must be >= 0, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, got {sampling.top_p}")
    if sampling.top_k < 0:
        raise UserError(f"top_k must be >= 0 (0: off), got {sampling.top_k}")
    if sampling.stop and not limits.tokenizer:
        raise UserError(f"stop strings {sampling.stop!r} need a tokenizer: PagedEngine(model, tokenizer=...)")
    if "" in sampling.stop:
        raise UserError("stop must not hold an empty string")
    for i, request in enumerate(requests):
        if request.num_samples < 0 or request.max_new_tokens < 0:
            raise UserError(
                f"request {i}: num_samples and max_new_tokens must be >= 0, got {request.num_samples} and "
                f"{request.max_new_tokens}"
            )
        context = [*request.prompt_ids, *request.prefix_ids]
        if not context:
            raise UserError(f"request {i}: the prompt is empty; give it at least a BOS token")
        if len(context) > limits.positions:
            raise UserError(
                f"request {i}: prompt and prefix have {len(context)} tokens, more than the model's "
                f"limit of {limits.positions} positions"
            )
        if min(context) < 0 or max(context) >= limits.vocabulary:
            raise UserError(
                f"request {i}: token ids must be between 0 and {limits.vocabulary - 1}, got "
                f"{min(context)} .. {max(context)}"
            )
        longest = min(len(context) + request.max_new_tokens, limits.positions)
        if longest > limits.room:
            raise UserError(
                f"request {i}: {longest} tokens do not fit into a KV cache of {limits.room} tokens; raise memory_bytes"
            )
