"""Arithmetic for a policy: its expressions are read as a tree of numbers and operators, and never run."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

MOST_DIGITS = 1000
"""Longer whole numbers are refused, because one power can fill the memory."""

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., float]] = {"sqrt": math.sqrt, "round": round, "abs": abs, "floor": math.floor}


async def add(a: float, b: float) -> float:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


async def calculate(expression: str) -> float:
    """Calculates an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and brackets, and sqrt, abs, round, floor; for example `2 * (3 + 4)`
    """
    if len(expression) > 500:
        raise ValueError("the expression is longer than 500 characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("this is not an arithmetic expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(arg) for arg in args))
    raise ValueError(f"`{ast.unparse(node)}` is not arithmetic")


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and abs(base) > 1 and exponent * math.log10(abs(base)) > MOST_DIGITS:
        raise ValueError(f"the result has more than {MOST_DIGITS} digits")
    return float(base) ** exponent if isinstance(exponent, float) or exponent < 0 else base**exponent


def _bounded(number: float) -> float:
    if isinstance(number, int) and number.bit_length() > MOST_DIGITS * 4:
        raise ValueError(f"the result has more than {MOST_DIGITS} digits")
    return number
