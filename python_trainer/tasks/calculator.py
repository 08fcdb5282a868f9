"""The environment ``calculator``: a turn that ends in ``<calc>12*(3+4)</calc>`` is answered with the number."""

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
    """The value of numbers, brackets and ``+ - * /``.

    Raises:
        SyntaxError, ValueError, ArithmeticError: anything else, or no number.
    """
    return _value(ast.parse(expression.replace(",", "").strip(), mode="eval").body)


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("only numbers, brackets and + - * / are calculated")


class Calculator(Environment):
    """Answers calls until a turn has none, which is the last."""

    def step(self, text: str) -> tuple[str, float, bool]:
        call = CALL.search(text)
        if call is None:
            return "", 0.0, True
        try:
            return f"={calculate(call[1]):.10g}\n", 0.0, False
        except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
            return f"=error: {type(error).__name__}\n", 0.0, False
