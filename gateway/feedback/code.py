"""A program is right when its tests pass; the tests run in a child with limits, never here.

Cases of standard input and output are judged from outside the program. Assertions run in the program's own process,
where a program written to deceive them could: prefer cases. `program.py` says what the limits cover.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

import anyio
from pydantic import Field, PositiveFloat, PositiveInt, TypeAdapter, model_validator

from gateway.config.models import Frozen
from gateway.feedback.base import BaseInteraction, Message, Turn, said
from gateway.feedback.program import Bounds, Ran, run_python

SHOWN_CHARS = 400
"""More of an input or output than this is not repeated to the policy."""


class Case(Frozen):
    """One test: an assertion, or an input and what must be printed for it."""

    stdin: str = ""
    """Given to the program."""
    stdout: str | None = None
    """What it must print; white space at the ends of lines and of the text aside."""
    assertion: str | None = None
    """Python statements run after the program's own, which must not raise."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.stdout is None) == (self.assertion is None):
            raise ValueError("a test has either `stdout` or `assertion`")
        return self


class Checker(Frozen):
    name: str = "code"
    tests: tuple[Case | str, ...] = ()
    """Used where a dataset row brings none; a text is an assertion."""
    score: Literal["fraction", "all"] = "fraction"
    """`fraction`: the part of the tests that passed; `all`: 1 or 0."""
    wall_s: PositiveFloat = 5.0
    """Of one test."""
    total_s: PositiveFloat = 30.0
    """Of all tests of one turn, the wait for a place aside; those left by then have failed."""
    cpu_s: PositiveInt = 5
    """CPU time of one test."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Memory of one test."""
    output_bytes: PositiveInt = 64 * 1024
    """What one test may print."""
    at_once: PositiveInt = os.cpu_count() or 1
    """Programs that may run at the same time, of all rollouts."""


@dataclass(frozen=True, slots=True)
class Failure:
    place: int
    text: str


_TESTS = TypeAdapter(tuple[Case | str, ...])


class CodeInteraction(BaseInteraction):
    """Takes the last code block of the policy's last turn; the dataset row's `tests` are what it must pass."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.rules = Checker.model_validate(config)
        self._tests: dict[str, tuple[Case, ...]] = {}
        self._places = anyio.CapacityLimiter(self.rules.at_once)

    async def start_interaction(self, instance_id: str | None = None, tests: Any = None, **kwargs: Any) -> str:
        given = self.rules.tests if tests is None else _TESTS.validate_python(tests)
        if not given:
            raise ValueError("the code checker needs `tests`, in its config or in the session's feedback arguments")
        instance_id = instance_id or str(uuid4())
        self._tests[instance_id] = tuple(Case(assertion=one) if isinstance(one, str) else one for one in given)
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        tests = self._tests[instance_id]
        source = last_block(said(messages) or "")
        if source is None:
            return False, "Your response has no code block. Write the program between ``` lines.", 0.0, {"passed": 0}
        async with self._places:
            passed, failure = await self._check(source, tests)
        report = {"passed": passed, "tests": len(tests)}
        if failure is None:
            return True, f"All {len(tests)} tests passed.", 1.0, report
        score = passed / len(tests) if self.rules.score == "fraction" else 0.0
        text = f"{passed} of {len(tests)} tests passed. Test {failure.place} failed: {failure.text}"
        return False, text, score, report | {"first_failure": failure.place}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._tests.pop(instance_id, None)

    async def _check(self, source: str, tests: tuple[Case, ...]) -> tuple[int, Failure | None]:
        """How many tests passed, and the first that did not."""
        passed, first = 0, None
        end = anyio.current_time() + self.rules.total_s
        for place, case in enumerate(tests, start=1):
            left = end - anyio.current_time()
            problem = await self._problem(source, case, left) if left > 0 else "the time for all tests was used up"
            passed += problem is None
            if problem is not None:
                first = first or Failure(place, problem)
                if left <= 0 or self.rules.score == "all":
                    break
        return passed, first

    async def _problem(self, source: str, case: Case, left_s: float) -> str | None:
        """Why the program fails a case, in words for the policy."""
        rules = self.rules
        bounds = Bounds(
            min(rules.wall_s, left_s), rules.cpu_s, rules.memory_mb * 2**20, output_bytes=rules.output_bytes
        )
        if case.assertion is None:
            return _of_output(case, await run_python(source, case.stdin, bounds))
        # Only a program that came to the end of the assertion prints this.
        token = secrets.token_hex(16)
        tested = f"{source}\n\n{case.assertion}\nprint({token!r})\n"
        return _of_assertion(case.assertion, token, await run_python(tested, case.stdin, bounds))


def last_block(text: str) -> str | None:
    """The last closed code block of a text. Read line by line: a pattern would be slow on text made to be so."""
    last: str | None = None
    inside: list[str] | None = None
    for line in text.splitlines():
        fence = line.strip().startswith("```")
        if inside is None:
            inside = [] if fence else None
        elif line.strip() == "```":
            last, inside = "\n".join(inside), None
        else:
            inside.append(line)
    return last


def _of_output(case: Case, ran: Ran) -> str | None:
    given = f"for the input {_shown(case.stdin)} " if case.stdin else ""
    if ran.ended or ran.status:
        return f"{given}{_crash(ran)}"
    expected = case.stdout or ""
    if _lines(ran.stdout) == _lines(expected):
        return None
    return f"{given}expected {_shown(expected)}, got {_shown(ran.stdout)}."


def _of_assertion(assertion: str, token: str, ran: Ran) -> str | None:
    if not ran.ended and ran.status == 0 and ran.stdout.endswith(f"{token}\n"):
        return None
    return f"{_shown(assertion)}: {_crash(ran)}"


def _crash(ran: Ran) -> str:
    if ran.ended:
        return f"the program was stopped: {ran.ended}."
    last = next((line for line in reversed(ran.stderr.splitlines()) if line.strip()), "")
    return f"the program ended with status {ran.status}" + (f": {_cut(last)}" if last else ".")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _shown(text: str) -> str:
    return repr(_cut(text.rstrip()))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} [{len(text) - SHOWN_CHARS} more characters]"
