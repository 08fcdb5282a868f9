"""A task of your own: reach a target with all of three or four numbers and ``+ - *``, each number once.

From this folder, with a model that can do a little arithmetic:

    python -m python_trainer train --config sums --output-dir runs/countdown \\
      --set task.name=countdown:CountdownSettings model.path=MODEL
"""

import ast
import operator
import random
import re

from pydantic import Field

from python_trainer.data import Example
from python_trainer.tasks import Task, TaskSettings

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
FINAL_LINE = re.compile(r"(?:\A|\n)A:([0-9()+*-]{1,100})\Z")


def value_of(node):
    """Return the value of an expression; None if it holds anything but whole numbers and ``+ - *``."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) else None
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        return None
    left, right = value_of(node.left), value_of(node.right)
    return None if left is None or right is None else OPERATORS[type(node.op)](left, right)


def correct(numbers, target, text):
    """Tell whether the last line is ``A:`` and an expression that uses each number once and equals the target."""
    match = FINAL_LINE.search(text)
    if match is None or sorted(re.findall("[0-9]+", match[1])) != sorted(map(str, numbers)):
        return False
    try:
        return value_of(ast.parse(match[1], mode="eval").body) == target
    except SyntaxError:
        return False


def reward(prompts, completions, completion_ids, numbers, target, **columns):
    """Return 1 for each right completion, else 0: one value per completion, the columns of its example by name."""
    return [float(correct(*row)) for row in zip(numbers, target, completions, strict=True)]


def draw_example(rng):
    """Draw numbers and chain them by random operators, so that every target can be reached."""
    numbers = [rng.randint(1, 20) for _ in range(rng.choice([3, 4]))]
    target = numbers[0]
    for number in numbers[1:]:
        target = rng.choice(list(OPERATORS.values()))(target, number)
    rng.shuffle(numbers)
    prompt = f"Make {target} from {', '.join(map(str, numbers))} with + - *. Last line: A: and the expression.\n"
    return Example(prompt, {"numbers": numbers, "target": target})


class CountdownSettings(TaskSettings):
    """Settings of the task: those of all tasks, and its own."""

    name: str = "countdown:CountdownSettings"
    test_seed: int = Field(1, ge=1)
    """Draws the test prompts."""

    def load(self) -> Task:
        def draw(seed, count):
            rng = random.Random(seed)
            return [draw_example(rng) for _ in range(count)]

        train = draw("train/0", self.train_size or 512)
        seen = {example.prompt for example in train}
        test = [
            example for example in draw(f"test/{self.test_seed}", self.test_size or 256) if example.prompt not in seen
        ]
        return Task("countdown", train, test, {"accuracy": reward})
