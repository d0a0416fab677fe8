"""Assertions about a program: literals are compared outside of its process, and all else that tests do works in it."""

from __future__ import annotations

from textwrap import indent

import anyio
import pytest

from gateway.feedback.assertion_process import digest
from gateway.feedback.assertions import ProgramAssertion
from gateway.feedback.code import CodeInteraction, CodeTest

PROGRAM = """
import collections, enum, fractions, math
Point = collections.namedtuple("Point", "x y")
class Empty(ValueError): pass
class Color(enum.IntEnum):
    RED = 1
def double(x): return 2 * x
def sort(items): items.sort()
def fail(name): raise Empty(name)
def check(x):
    if x < 0: raise ValueError("negative")
    return math.sqrt(x)
def apply(function, items): return [function(item) for item in items]
def count(word): return collections.Counter(word)
def half(x): return fractions.Fraction(x, 2)
"""
HELD = [
    "assert double(2) == 4 and 4 == double(2)",
    "assert double('a') == 'aa' and double([1]) == [1, 1] and double((1,)) == (1, 1) and double(b'a') == b'aa'",
    "assert double(10**30) == 2 * 10**30 and double(0.5) == 1.0 and double(float('inf')) == math.inf",
    "import math\nassert math.isnan(double(float('nan'))) and abs(double(1.05) - 2.1) < 1e-9",
    "assert double(1j) == 2j and half(3) * 2 == 3 and str(half(3)) == '3/2'",
    "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
    "try:\n    fail('x')\nexcept Empty as error:\n    assert str(error) == 'x' and error.args == ('x',)",
    "try:\n    check(-1)\nexcept ValueError as error:\n    assert 'negative' in str(error)\nelse:\n    assert False",
    "with raises(ValueError, match='neg') as caught:\n    check(-1)\nassert caught.value.args == ('negative',)",
    "with raises((KeyError, Empty)):\n    fail('x')",
    "def check_all(candidate):\n    for n in range(3):\n        assert candidate(n) == 2 * n\ncheck_all(double)",
    "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(len, ['ab']) == [2]",
    "assert count('aab') == {'a': 2, 'b': 1} and Point(1, 2) == (1, 2) and [Point(1, 2)] == [(1, 2)]",
    "assert Color.RED == 1 and Color.RED + 1 == 2 and Color.RED.name == 'RED'",
    "assert check(4) == 2 == math.sqrt(4)",
    "def raise_it(x):\n    raise KeyError(x)\nwith raises(KeyError):\n    apply(raise_it, [1])",
]


async def judge(program: str, assertion: str, stdin: str = "") -> str | None:
    with anyio.fail_after(60):
        test = CodeTest(assertion=assertion, stdin=stdin)
        return await CodeInteraction({"wall_s": 40, "cpu_s": 20})._run_test(program, test, 60)


async def test_assertions_that_hold_pass() -> None:
    blocks = [f"def block():\n{indent(assertion, '    ')}\nblock()" for assertion in HELD]
    assert await judge(PROGRAM, "\n".join(blocks)) is None
    assert await judge("x = input()", "assert x == 'seven'", "seven\n") is None


@pytest.mark.parametrize(
    ("program", "assertion", "problem"),
    [
        ("f = lambda x: 3", "assert f(2) == 4, 'four'", "AssertionError: four"),
        ("f = lambda x: 3", "assert f(2) > 4, 'more'", "status 1: AssertionError: more"),
        ("f = lambda x: 3", "assert f(2) == 3 and f(3) == 4", "AssertionError"),
        ("f = lambda x: 3", "for x in (1, 2):\n    assert f(x) == 3\nassert f(4) != 3", "status 1: AssertionError"),
        ("f = lambda x: 1 / 0", "assert f(2) == 4", "status 1: ZeroDivisionError: division by zero"),
        ("", "assert f(2) == 4", "status 1: NameError: name 'f' is not defined"),
        ("import os; os._exit(3)", "assert f(2) == 4", "status 3"),
        ("def f(x): __import__('os')._exit(3)", "try:\n    f(2)\nexcept Exception:\n    pass", "status 3"),
        ("f = lambda x: 3", "def check():\n    assert f(2) == 3", "status 0"),
    ],
)
async def test_what_an_assertion_raises_and_how_a_program_ends_is_given(
    program: str, assertion: str, problem: str
) -> None:
    assert problem in str(await judge(program, assertion))


EQUAL = [
    ("4", "4.0"), ("True", "1"), ("(4+0j)", "4"), ("1e300", "1e300"), ("0.1", "0.1"), ("10**30", str(10**30)),
    ("'a'", "'a'"), ("b'a'", "b'a'"), ("bytearray(b'a')", "b'a'"), ("None", "None"), ("{1, 2.0}", "{2, 1}"),
    ("frozenset({1})", "{1}"), ("{'b': [1], 'a': (2,)}", "{'a': (2,), 'b': [1.0]}"), ("[]", "[]"), ("set()", "set()"),
]  # fmt: skip
UNEQUAL = [
    ("4", "'4'"), ("4", "5"), ("[1]", "(1,)"), ("'a'", "b'a'"), ("0.30000000000000004", "0.3"), ("None", "0"),
    ("[1, 2]", "[2, 1]"), ("{}", "set()"), ("{1: 2}", "{1: 3}"), ("range(2)", "[0, 1]"), ("float('nan')", "0"),
    ("10**30", str(10**30 + 1)), ("['a,b']", "['a', 'b']"), ("object()", "1"),
]  # fmt: skip


async def test_values_are_equal_to_literals_as_in_python() -> None:
    program = f"values = [{', '.join(value for value, _ in EQUAL)}]"
    assertion = "\n".join(f"assert values[{number}] == {literal}" for number, (_, literal) in enumerate(EQUAL))
    assert await judge(program, assertion) is None
    for value, literal in UNEQUAL:
        assert ProgramAssertion(f"assert x == {literal}")._expected[0].digest != digest(eval(value)), value


def test_literals_of_comparisons_are_not_in_the_program() -> None:
    text = "def check(f):\n    for x in (1, 2):\n        assert f(x) == 'l1t' and f(-x) == ['l2t']\n"
    program = ProgramAssertion(f"{text}assert 'l3t' == f(3)\ncheck(f)").add_to("def f(x): return x")
    assert "check(f)" in program and not any(literal in program for literal in ("l1t", "l2t", "l3t"))
