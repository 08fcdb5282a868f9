"""What an engine may be asked for."""

from collections.abc import Sequence

from python_trainer.errors import UserError
from python_trainer.rollout.engine import Request, SamplingParams


def check_sampling(sampling: SamplingParams, *, has_tokenizer: bool) -> None:
    """Raises UserError for a setting that is out of range."""
    if not sampling.temperature >= 0:
        raise UserError(f"temperature must be >= 0, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, got {sampling.top_p}")
    if sampling.top_k < 0:
        raise UserError(f"top_k must be >= 0 (0: off), got {sampling.top_k}")
    if sampling.stop and not has_tokenizer:
        raise UserError(f"stop strings {sampling.stop!r} need a tokenizer: make the engine with tokenizer=...")
    if "" in sampling.stop:
        raise UserError(f"stop must not hold an empty string, got {sampling.stop!r}")


def check_requests(requests: Sequence[Request], *, max_positions: int, vocab_size: int, room: int) -> None:
    """Raises UserError for a request that is out of range; ``room`` is what the KV cache holds, in tokens."""
    for i, request in enumerate(requests):
        if request.num_samples < 0 or request.max_new_tokens < 0:
            raise UserError(
                f"request {i}: num_samples and max_new_tokens must be >= 0, got {request.num_samples} and "
                f"{request.max_new_tokens}"
            )
        context = [*request.prompt_ids, *request.prefix_ids]
        if not context:
            raise UserError(f"request {i}: the prompt is empty; give it at least a BOS token")
        if len(context) > max_positions:
            raise UserError(
                f"request {i}: prompt and prefix have {len(context)} tokens, more than the model's "
                f"limit of {max_positions} positions"
            )
        if min(context) < 0 or max(context) >= vocab_size:
            raise UserError(
                f"request {i}: token ids must be between 0 and {vocab_size - 1}, got {min(context)} .. {max(context)}"
            )
        longest = min(len(context) + request.max_new_tokens, max_positions)
        if longest > room:
            raise UserError(
                f"request {i}: {longest} tokens do not fit into a KV cache of {room} tokens; raise memory_bytes"
            )
