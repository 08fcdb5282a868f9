"""Checks prompts and their columns, wherever they are from."""

from collections.abc import Mapping
from typing import Any

from python_trainer.errors import UserError

PROMPT = 'a string that is not empty, or a list of messages {"role": "user", "content": "..."}'
OF_THE_TRAINER = {"prompts", "completions", "completion_ids", "environment_reward"}  # what reward functions get


def is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) for m in value)
        and all(isinstance(m.get(key), str) for m in value for key in ("role", "content"))
    )


def check_text(place: str, column: str, text: str) -> None:
    r"""Raises UserError for what no tokenizer takes: half of a character, as JSON's \ud83d by itself."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: {column} has the lone surrogate {text[error.start]!r} at character {error.start}, which is half "
            "of a character and no text; allowed: Unicode text. Write the whole character, or take it out"
        ) from error


def check_prompt(place: str, column: str, prompt: Any) -> None:
    """Raises UserError for what is neither text nor messages."""
    if not (is_chat(prompt) or (isinstance(prompt, str) and prompt)):
        raise UserError(f"{place}: {column} is {prompt!r:.80}; allowed: {PROMPT}")
    for text in [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]:
        check_text(place, column, text)


def check_names(place: str, columns: Mapping[str, Any]) -> None:
    """Raises UserError for a column that would hide what reward functions get from the trainer."""
    if reserved := OF_THE_TRAINER & columns.keys():
        raise UserError(f"{place}: column {min(reserved)!r} has a name that reward functions get from the trainer")
