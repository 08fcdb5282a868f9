"""An environment in which the policy calls a calculator: ``<calc>12*(3+4)</calc>`` is answered with ``=84``.

From this folder, with your own model and problems whose gold answers are numbers:

    python -m python_trainer train --config jsonl --output-dir runs/calculator \\
      --set task.train_path=train.jsonl task.test_path=test.jsonl task.reward=calculator:right_number \\
      task.environment=calculator:Calculator model.path=MODEL
"""

import ast
import operator
import re
from collections.abc import Callable

from python_trainer.environment import Environment

CALL = re.compile(r"<calc>([^<>]{1,200})</calc>\s*\Z")
OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> float:
    """Return the value of numbers, brackets and ``+ - * /``.

    Raises:
        SyntaxError, ValueError, ArithmeticError: the expression holds anything else, or has no value.
    """
    return value_of(ast.parse(expression.replace(",", "").strip(), mode="eval").body)


def value_of(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(operand))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(left), value_of(right))
    raise ValueError("only numbers, brackets and + - * / are calculated")


class Calculator(Environment):
    """Answers calls until a turn has none, which is the last turn."""

    def step(self, text: str) -> tuple[str, float, bool]:
        call = CALL.search(text)
        if call is None:
            return "", 0.0, True
        try:
            return f"={calculate(call[1]):.10g}\n", 0.0, False
        except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
            return f"=error: {type(error).__name__}\n", 0.0, False


def right_number(prompts, completions, completion_ids, answer, **columns):
    """Return 1 for each completion whose last number is the gold answer, else 0."""
    found = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in completions]
    return [float(bool(numbers) and float(numbers[-1]) == float(gold)) for numbers, gold in zip(found, answer)]
