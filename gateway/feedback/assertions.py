"""Assertions about a program of the policy: what they compare with a literal is judged here, outside of its process.

Of `assert f(2) == 4`, the program's process gets `f(2)` and prints a digest of its value; the 4 never leaves this one.
Everything else of an assertion runs there, and so do blocks of `if`, `while`, `try`, `with` and `match`.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from secrets import token_hex

from gateway.feedback import assertion_process
from gateway.feedback.assertion_process import END, REPORT, digest


@dataclass(frozen=True, slots=True)
class ExpectedValue:
    """The digest of a literal, and what the assertion raises where a value is another."""

    digest: str
    problem: str


class ProgramAssertion:
    """A test's statements about a program. Raises SyntaxError if they are none."""

    def __init__(self, text: str) -> None:
        splitter = _Splitter()
        self._code = ast.unparse(ast.fix_missing_locations(splitter.visit(ast.parse(text))))
        self._expected = splitter.expected
        self._mark = token_hex(4)

    def add_to(self, program: str) -> str:
        """A program that runs the policy's, then the assertion."""
        return f"{inspect.getsource(assertion_process)}\n\nrun({program!r}, {self._code!r}, {self._mark!r})\n"

    def find_problem(self, output: str) -> str | None:
        """Why it does not hold, by what the program printed; None if it does, and empty if its end was not reached."""
        lines = (line.split() for line in output.splitlines())
        reports = {tuple(words[1:]) for words in lines if words[:1] == [self._mark]}
        right = {(str(number), expected.digest) for number, expected in enumerate(self._expected)}
        for number, expected in enumerate(self._expected):
            if any(report[:1] == (str(number),) and report not in right for report in reports):
                return expected.problem
        return None if right | {(END, digest(None))} <= reports else ""


class _Splitter(ast.NodeTransformer):
    """Replaces comparisons with literals by reports of what is compared."""

    def __init__(self) -> None:
        self.expected: list[ExpectedValue] = []

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        match node.test:
            case ast.BoolOp(ast.And(), parts):
                return [self._split(part, node.msg) for part in parts]
        return [self._split(node.test, node.msg)]

    def _split(self, test: ast.expr, message: ast.expr | None) -> ast.stmt:
        match test:
            case ast.Compare(value, [ast.Eq()], [literal]) if _is_literal(literal) and not _is_literal(value):
                pass
            case ast.Compare(literal, [ast.Eq()], [value]) if _is_literal(literal) and not _is_literal(value):
                pass
            case _:
                return ast.Assert(test, message)
        note = f": {message.value!s}" if isinstance(message, ast.Constant) else ""
        self.expected.append(ExpectedValue(digest(ast.literal_eval(literal)), f"AssertionError{note}"))
        number = ast.Constant(len(self.expected) - 1)
        return ast.Expr(ast.Call(ast.Name(REPORT, ast.Load()), [number, value], []))

    def _keep(self, node: ast.stmt) -> ast.stmt:
        """A block that may not be evaluated to its end."""
        return node

    visit_If = visit_While = visit_Match = visit_Try = visit_TryStar = visit_With = visit_AsyncWith = _keep


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True
