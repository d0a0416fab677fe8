"""Assertions about a program run in a process of their own: all that tests do with a program's values works there."""

from __future__ import annotations

from textwrap import indent

import anyio
import pytest

from gateway.feedback.program_runner import ProgramLimits, ProgramResult, run_assertion
from gateway.sandbox.python_programs import find_confinement

LIMITS = ProgramLimits(wall_s=40.0, cpu_s=20)
PROGRAM = """
import asyncio, collections, enum, fractions, math

Point = collections.namedtuple("Point", "x y")

class Stack:
    kind = "stack"
    def __init__(self, *items):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def size(self):
        return len(self.items)
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
    def __eq__(self, other):
        return isinstance(other, Stack) and self.items == other.items
    def __hash__(self):
        return hash(tuple(self.items))
    def __add__(self, other):
        return Stack(*self.items, *other.items)
    def __mul__(self, count):
        return Stack(*self.items * count)
    def __lt__(self, other):
        return self.items < other.items
    def __getitem__(self, index):
        return self.items[index]
    def __str__(self):
        return f"Stack({self.items})"
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.items.clear()

class Empty(ValueError):
    def __init__(self, name):
        super().__init__(name)

class Color(enum.IntEnum):
    RED = 1

def double(x): return 2 * x
def sort(items): items.sort()
def fill(grid): grid[0][0] = 7
def fail(name): raise Empty(name)
def check(x):
    if x < 0: raise ValueError("negative")
    return math.sqrt(x)
def apply(function, items): return [function(item) for item in items]
def count(word): return collections.Counter(word)
def half(x): return fractions.Fraction(x, 2)
def numbers():
    yield from range(3)
def total(items): return sum(items)
async def later(x):
    await asyncio.sleep(0)
    return x
"""
HELD = [
    "assert double(2) == 4",
    "assert double('a') == 'aa' and double([1]) == [1, 1] and double((1,)) == (1, 1) and double(b'a') == b'aa'",
    "assert double(10**30) == 2 * 10**30 and double(0.5) == 1.0 and double(float('inf')) == math.inf",
    "import math\nassert math.isnan(double(float('nan'))) and abs(double(1.05) - 2.1) < 1e-9",
    "assert double(1j) == 2j and half(3) * 2 == 3 and str(half(3)) == '3/2'",
    "assert Stack().push(1).size() == 1 and len(Stack(1, 2)) == 2 and list(Stack(1, 2)) == [1, 2]",
    "s = Stack()\ns.push(3)\ns.kind = 'other'\nassert s.items == [3] and s.kind == 'other' and Stack.kind == 'stack'",
    "assert Stack(1) == Stack(1) and Stack(1) != Stack(2) and Stack(1) < Stack(2) and Stack() is not Stack()",
    "assert (Stack(1) + Stack(2)).items == [1, 2] and (Stack(1) * 2).items == [1, 1] and Stack(4)[0] == 4",
    "assert str(Stack(1)) == 'Stack([1])' and 1 in Stack(1) and 2 not in Stack(1) and not Stack()",
    "assert isinstance(Stack(), Stack) and not isinstance(3, Stack) and isinstance(double(2), int)",
    "assert len({Stack(1), Stack(1), Stack(2)}) == 2 and sorted([Stack(2), Stack(1)])[0].items == [1]",
    "with Stack(1) as stack:\n    assert stack.size() == 1\nassert stack.size() == 0",
    "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
    "row = [1]\ngrid = [row, [2]]\nfill(grid)\nassert grid == [[7], [2]] and row == [7]",
    "try:\n    fail('x')\nexcept Empty as error:\n    assert str(error) == 'x' and error.args == ('x',)",
    "try:\n    check(-1)\nexcept ValueError as error:\n    assert 'negative' in str(error)\nelse:\n    assert False",
    "import unittest\nwith unittest.TestCase().assertRaisesRegex(Empty, 'x'):\n    fail('x')",
    "with raises(ValueError, match='neg') as caught:\n    check(-1)\nassert caught.value.args == ('negative',)",
    "with raises((KeyError, Empty)):\n    fail('x')",
    "def check_all(candidate):\n    for n in range(3):\n        assert candidate(n) == 2 * n\ncheck_all(double)",
    "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(str, [1]) == ['1'] and apply(double, [1]) == [2]",
    "assert apply(len, ['ab']) == [2] and apply(math.sqrt, [4.0]) == [2.0]",
    "assert total(n for n in (1, 2)) == 3 and total(iter([])) == 0 and list(numbers()) == [0, 1, 2]",
    "assert count('aab') == {'a': 2, 'b': 1} and count('a')['z'] == 0 and count('aab').most_common(1) == [('a', 2)]",
    "assert Point(1, 2) == (1, 2) and Point(1, 2).x == 1 and [Point(1, 2)] == [(1, 2)] and sum(Point(1, 2)) == 3",
    "assert Color.RED == 1 and Color.RED + 1 == 2 and Color(1) is Color.RED and Color.RED.name == 'RED'",
    "import asyncio\nassert asyncio.run(later(3)) == 3",
    "import asyncio\nasync def main():\n    return await later(4)\nassert asyncio.run(main()) == 4",
    "assert check(4) == 2 == math.sqrt(4)",
    "def raise_it(x):\n    raise KeyError(x)\nwith raises(KeyError):\n    apply(raise_it, [1])",
]


async def judge(program: str, assertion: str) -> str | ProgramResult | None:
    with anyio.fail_after(60):
        return await run_assertion(program, assertion, "", LIMITS, find_confinement() or "none")


@pytest.mark.parametrize("start", range(0, len(HELD), 8))
async def test_assertions_that_hold_pass(start: int) -> None:
    blocks = [f"def block():\n{indent(assertion, '    ')}\nblock()" for assertion in HELD[start : start + 8]]
    assert await judge(PROGRAM, "\n".join(blocks)) is None


async def test_a_function_that_is_named_as_a_builtin_can_be_tested() -> None:
    assert await judge("def sum(a, b): return a + b if a + b < 20 else 20", "assert sum(10, 15) == 20") is None


async def test_a_program_reads_its_input_before_the_assertion() -> None:
    with anyio.fail_after(60):
        assert await run_assertion("x = input()", "assert x == 'seven'", "seven\n", LIMITS) is None


@pytest.mark.parametrize(
    ("program", "assertion", "problem"),
    [
        ("f = lambda x: 3", "assert f(2) == 4, 'four'", "AssertionError: four"),
        ("f = lambda x: 1 / 0", "assert f(2) == 4", "ZeroDivisionError: division by zero"),
        ("", "assert f(2) == 4", "NameError: name 'f' is not defined"),
        (
            "f = id",
            "class A: pass\nf(A())",
            "the program cannot be given a A: assertions pass plain data and functions",
        ),
        ("f = id", "assert f(2) ==", "SyntaxError: invalid syntax"),
    ],
)
async def test_what_an_assertion_raises_is_given(program: str, assertion: str, problem: str) -> None:
    result = await judge(program, assertion)
    assert isinstance(result, str) and problem in result


@pytest.mark.parametrize("program", ["import os; os._exit(3)", "def f(x): __import__('os')._exit(3)"])
async def test_a_program_that_ends_is_described_by_its_end(program: str) -> None:
    result = await judge(program, "try:\n    f(2)\nexcept Exception:\n    pass")
    assert isinstance(result, ProgramResult) and result.exit_status == 3
