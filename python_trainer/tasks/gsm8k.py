"""Grade-school word problems (Cobbe et al. 2021) with the columns ``question`` and ``answer``."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from pydantic import field_validator

from python_trainer.data import Example, Messages
from python_trainer.errors import UserError
from python_trainer.tasks.base import RewardFunction, completion_text
from python_trainer.tasks.files import FileTaskSettings

# The final answer stands after the last "####" (gold answers) or at the start of the last line "A:" (model solutions).
MARKER = re.compile(r"####|^A:", re.MULTILINE)
NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")


def parse_number(text: str) -> Decimal | None:
    """Reads ``$1,234.50.`` as 1234.50; None if the text is not one number."""
    text = text.strip().removesuffix(".")
    sign, text = ("-", text[1:]) if text.startswith("-") else ("", text)
    text = sign + text.strip().removeprefix("$").strip()
    if not NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:  # a sign or nothing at all
        return None


def final_number(text: str) -> Decimal | None:
    """Reads the number after the last marker, on its line; None without a marker or a number."""
    markers = list(MARKER.finditer(text))
    if not markers:
        return None
    return parse_number(text[markers[-1].end() :].lstrip(" ").split("\n")[0])


def accuracy(
    prompts: Sequence,
    completions: Sequence[str | Messages],
    completion_ids: Sequence,
    answer: Sequence[str],
    **_: object,
) -> list[float | None]:
    """Returns 1 for every completion whose final number equals that of the gold ``answer``, else 0."""
    judged: list[float | None] = []
    for text, gold in zip(map(completion_text, completions), answer, strict=True):
        number = final_number(text)
        judged.append(float(number is not None and number == final_number(gold)))
    return judged


class GSM8KSettings(FileTaskSettings):
    """Settings of the task."""

    name: str = "gsm8k"
    prompt_template: str = "{question}\nReason step by step and end with a line '#### ' and the number.\n"
    """The prompt; the question replaces "{question}"."""

    @field_validator("prompt_template")
    @classmethod
    def _holds_the_question(cls, template: str) -> str:
        if "{question}" not in template:
            raise ValueError(f'must contain "{{question}}", got {template!r}')
        return template

    def examples(self, source: str, rows: Sequence[tuple[int, dict[str, Any]]]) -> tuple[list[Example], list[str]]:
        examples = []
        for number, row in rows:
            for column in ("question", "answer"):
                if not isinstance(row.get(column), str) or not row[column]:
                    has = ", ".join(map(repr, row)) or "no columns"
                    raise UserError(
                        f"{source}:{number}: column {column!r} is {row.get(column)!r:.80}; allowed: a string that is "
                        f"not empty; the line has {has}"
                    )
            if final_number(row["answer"]) is None:
                raise UserError(f"{source}:{number}: answer has no final number; allowed: a last line like '#### 18'")
            columns = {column: row[column] for column in ("question", "answer")}
            prompt = self.prompt_template.replace("{question}", row["question"])
            examples.append(Example(prompt, columns, f"{source}:{number}"))
        return examples, []

    def judges(self) -> tuple[dict[str, RewardFunction], dict[str, float]]:
        return {"accuracy": accuracy}, {}
