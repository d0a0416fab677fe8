"""An MCP server over stdio: a calculator. Expressions are parsed and evaluated as a syntax tree, never executed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

MAX_LENGTH = 500
MAX_DIGITS = 1000
"""Longer integers are refused, because a single power could exhaust the memory."""

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}

server = MCPServer("calculator", instructions="Calculates what is hard to calculate by heart.")


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True), structured_output=False)
def calculate(
    expression: Annotated[
        str,
        Field(description="numbers with + - * / // % ** and brackets, and sqrt, abs, round, floor: `2 * (3 + 4)`"),
    ],
) -> str:
    """Calculates an arithmetic expression."""
    try:
        return _format_number(_evaluate(_parse(expression)))
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ToolError(str(error)) from error


def _parse(expression: str) -> ast.expr:
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("this is not an arithmetic expression") from None


def _evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_evaluate(left), _evaluate(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _check_size(_BINARY[type(op)](_evaluate(left), _evaluate(right)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_evaluate(arg) for arg in args))
    raise ValueError(f"`{ast.unparse(node)}` is not arithmetic")


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and abs(base) > 1 and exponent * math.log10(abs(base)) > MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    if base < 0 and isinstance(exponent, float):
        raise ValueError("a root of a number below zero is no number")
    power: float = float(base) ** exponent if isinstance(exponent, float) or exponent < 0 else base**exponent
    return power


def _round(number: float, digits: int = 0) -> float:
    if abs(digits) > MAX_DIGITS:
        raise ValueError(f"no number has more than {MAX_DIGITS} digits")
    return round(number, digits)


def _check_size(number: float) -> float:
    if isinstance(number, int) and number.bit_length() > MAX_DIGITS * 4:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return number


_FUNCTIONS: dict[str, Callable[..., float]] = {"sqrt": math.sqrt, "round": _round, "abs": abs, "floor": math.floor}


def _format_number(number: float) -> str:
    """Formats integers without a decimal point, and other numbers without rounding noise in the last digits."""
    return str(number) if isinstance(number, int) else f"{number:.15g}"


if __name__ == "__main__":
    server.run("stdio")
