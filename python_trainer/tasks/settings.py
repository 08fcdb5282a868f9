"""What to train on, as it stands in a configuration file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[int, Field(ge=1)]
COMMON_FIELDS = {"name", "seed", "train_size", "gate_size", "test_size"}
FILE_FIELDS = {"train_path", "test_path", "gate_path", "chat"}
TASK_FIELDS = {
    "arithmetic": {"variant"},
    "gsm8k": FILE_FIELDS | {"prompt_template"},
    "jsonl": FILE_FIELDS | {"prompt_column", "reward", "reward_weights", "accuracy", "reward_timeout"},
}


class TaskConfig(BaseModel):
    """The ``task`` section of a training configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["arithmetic", "gsm8k", "jsonl"] = "arithmetic"
    """arithmetic ships with the package; gsm8k and jsonl read the files below."""
    variant: Literal["short", "long", "longest"] = "short"
    """arithmetic: 2 to 10 terms, 20 to 24 with answers of 200 tokens and more, or 40 to 48 with about 500."""
    seed: int = 0
    """Draws arithmetic's prompts; for files, picks the gate examples when they come from the training file."""
    train_size: Size | None = None
    """Number of training examples. None: 512 for arithmetic, the whole file otherwise."""
    gate_size: Annotated[int, Field(ge=0)] | None = None
    """Held-out examples for decisions in training. None: 2,048 for arithmetic; for files, all of gate_path or none."""
    test_size: Size | None = None
    """Number of test examples. None: 8,192 for arithmetic, the whole file otherwise."""
    train_path: Path | None = None
    """gsm8k, jsonl: JSONL file with the training examples."""
    test_path: Path | None = None
    """gsm8k, jsonl: JSONL file with the test examples."""
    gate_path: Path | None = None
    """gsm8k, jsonl: JSONL file with the gate examples. None: gate_size examples are taken out of the training file."""
    prompt_column: str | None = None
    """jsonl: column with the prompt, a string or a list of chat messages. None: "prompt" or "messages"."""
    prompt_template: str = "{question}\nReason step by step and end with a line '#### ' and the number.\n"
    """gsm8k: what the model is given; "{question}" is filled in."""
    chat: bool = False
    """gsm8k, jsonl: give a prompt that is a string as one user message through the tokenizer's chat template."""
    reward: str | list[str] = []
    """jsonl: reward functions as "module:function"; the module may lie in the current folder. "math" compares the value
    of an answer with column answer by math-verify (pip install math-verify)."""
    reward_weights: list[float] | None = None
    """jsonl: one weight for each reward function. None: 1 each."""
    accuracy: str | None = None
    """jsonl: name of the reward function whose value above 0.5 counts as a right answer. None: the first one."""

    reward_timeout: Annotated[float, Field(gt=0)] | None = None
    """jsonl: seconds that one call of a reward function may take, for all answers of a step; null for no limit."""

    @property
    def rewards(self) -> list[str]:
        return [self.reward] if isinstance(self.reward, str) else self.reward

    @model_validator(mode="after")
    def _fields_fit_the_task(self) -> "TaskConfig":
        if "{question}" not in self.prompt_template:
            raise ValueError(f'prompt_template must contain "{{question}}", got {self.prompt_template!r}')
        files = [field for field in ("train_path", "test_path") if getattr(self, field) is None]
        if self.name != "arithmetic" and files:
            raise ValueError(f"task {self.name} needs {' and '.join(files)}: a JSONL file")
        if self.name == "jsonl" and not self.rewards:
            raise ValueError('task jsonl needs reward: "math", "module:function", or a list of them')
        for field in type(self).model_fields.keys() - COMMON_FIELDS - TASK_FIELDS[self.name]:
            if field in self.model_fields_set and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field} has no meaning for task {self.name}, got {getattr(self, field)!r}")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise ValueError(f"reward_weights needs {len(self.rewards)} numbers, got {self.reward_weights}")
        return self
