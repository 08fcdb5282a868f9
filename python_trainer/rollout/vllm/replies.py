"""Replies of a vLLM server: one schema for each, which also checks an answer against its request."""

import reprlib
from dataclasses import dataclass
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

ROUNDING = 1e-4  # how far above 0 rounding may lift a log-probability


@dataclass(frozen=True)
class Expected:
    """What a request for completions allows its reply to hold.

    Args:
        answers: how many there must be.
        max_tokens: most tokens of each.
        vocab_size: every id must be below.
        end_tokens: each of them ends an answer.
        stop_strings: whether a string may end one too.
    """

    answers: int
    max_tokens: int
    vocab_size: int
    end_tokens: frozenset[int]
    stop_strings: bool


class Reply(BaseModel):
    """Fields that vLLM sends beside these are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Version(Reply):
    version: str = Field(pattern=r"^[\w.+!-]{1,64}$")


class ServedModel(Reply):
    id: str = Field(min_length=1)


class Models(Reply):
    data: list[ServedModel] = Field(min_length=1)


class PolicySettings(Reply):
    """What ``PolicyWorker.policy_settings`` returns."""

    logprobs_mode: str
    max_model_len: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    model_type: str
    dtype: str = ""
    deltas: bool = False  # it takes them


class PolicyResults(Reply):
    """One for each worker."""

    results: list[PolicySettings] = Field(min_length=1)


class Loaded(Reply):
    """What ``PolicyWorker.load_policy`` returns."""

    loaded: bool = True


class LoadResults(Reply):
    """One for each worker."""

    results: list[Loaded | None] = Field(min_length=1)


class TokenLogprobs(Reply):
    token_logprobs: list[Annotated[float, Field(le=ROUNDING)]]


class Choice(Reply):
    index: int
    token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]
    logprobs: TokenLogprobs
    finish_reason: str

    def check(self, expected: Expected) -> None:
        """Raise ValueError if the answer is not one to the request."""
        ids, end_tokens = self.token_ids, expected.end_tokens
        if not ids:
            raise ValueError("token_ids must hold a token, got none")
        if len(self.logprobs.token_logprobs) != len(ids):
            raise ValueError(
                f"token_logprobs must be {len(ids)}, as token_ids, got {len(self.logprobs.token_logprobs)}"
            )
        if len(ids) > expected.max_tokens:
            raise ValueError(f"token_ids must be at most max_tokens {expected.max_tokens}, got {len(ids)}")
        if (largest := max(ids)) >= expected.vocab_size:
            raise ValueError(f"token_ids must be below vocab_size {expected.vocab_size}, got {largest}")
        if early := [token for token in ids[:-1] if token in end_tokens]:
            raise ValueError(f"token_ids must end at the first end token, got more behind {early[0]}")
        if self.finish_reason == "length" and len(ids) < expected.max_tokens:
            raise ValueError(f"finish_reason length needs max_tokens {expected.max_tokens} tokens, got {len(ids)}")
        if self.finish_reason == "stop" and not expected.stop_strings and ids[-1] not in end_tokens:
            raise ValueError(
                f"finish_reason stop needs one of the tokens {sorted(end_tokens)} at the end, got {ids[-1]}"
            )


class Completion(Reply):
    """The answers to one prompt, in the order of their indexes; validated with ``context=Expected(...)``."""

    choices: list[Choice]

    @property
    def interrupted(self) -> set[str]:
        """Return the reasons of answers that ended neither by themselves nor at their limit, such as "abort"."""
        return {choice.finish_reason for choice in self.choices} - {"stop", "length"}

    @model_validator(mode="after")
    def _answers_the_request(self, info: ValidationInfo) -> Self:
        expected: Expected = info.context  # type: ignore[assignment]
        self.choices.sort(key=lambda choice: choice.index)
        indexes = [choice.index for choice in self.choices]
        if self.interrupted:  # a part of an answer, which the caller refuses
            return self
        if indexes != list(range(expected.answers)):
            raise ValueError(f"choices must have the indexes 0 to {expected.answers - 1}, got {str(indexes)[:80]}")
        for choice in self.choices:
            try:
                choice.check(expected)
            except ValueError as error:
                raise ValueError(f"choice {choice.index}: {error}") from error
        return self


R = TypeVar("R", bound=Reply)


def read_reply(kind: type[R], text: str, expected: Expected | None = None) -> R:
    """Read the JSON of a reply.

    Raises:
        ValueError: names the field that is wrong, and its value.
    """
    try:
        return kind.model_validate_json(text, context=expected)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place, message = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
        value = f", got {reprlib.repr(problem['input'])}" if place else ""
        raise ValueError(f"{place}: {message}{value}" if place else message) from None
