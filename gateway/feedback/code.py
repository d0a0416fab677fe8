"""`CodeInteraction`: runs the policy's Python code and scores it by tests.

Each program runs in a sandbox of its own (`program_runner.py`); where there can be none, the interaction refuses to be
built. The output that a test expects, and the literals that its assertion compares with, are in no sandbox
(`assertions.py`).
"""

from __future__ import annotations

import ast
import os
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

import anyio
from pydantic import Field, PositiveFloat, PositiveInt, TypeAdapter, model_validator

from gateway.config.base import FrozenModel
from gateway.feedback.assertions import ProgramAssertion
from gateway.feedback.base import BaseInteraction, Message, Turn, last_message_text
from gateway.feedback.program_runner import (
    TOO_LONG,
    ProgramLimits,
    ProgramResult,
    require_sandbox,
    run_python,
)
from gateway.policy_text import repeatable
from gateway.process.reaper import Reaper

EXCERPT_CHARS = 400
"""Longer inputs and outputs are shortened for the policy."""


class CodeTest(FrozenModel):
    """One test: an assertion, or an input and its expected output."""

    stdin: str = ""
    """The program's input."""
    stdout: str | None = None
    """The expected output; white space at the ends of lines and of the text is ignored."""
    assertion: str | None = None
    """Python statements about the program's names, which must not raise."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.stdout is None) == (self.assertion is None):
            raise ValueError("a test has either `stdout` or `assertion`")
        try:
            ast.parse(self.assertion or "")
        except SyntaxError as error:
            raise ValueError(f"the assertion {self.assertion!r} is not Python: {error}") from error
        return self


class CodeSettings(FrozenModel):
    """The configuration of `CodeInteraction`."""

    name: str = "code"
    tests: tuple[CodeTest | str, ...] = ()
    """The tests of dataset rows that have none; a text is an assertion."""
    score: Literal["fraction", "all"] = "fraction"
    """`fraction`: the part of the tests that passed; `all`: 1 or 0."""
    wall_s: PositiveFloat = 5.0
    """Deadline of one test."""
    total_s: PositiveFloat = 30.0
    """Deadline of all tests of one turn, without the wait for a free slot; tests not run by then have failed."""
    cpu_s: PositiveInt = 5
    """CPU time of one test."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Memory of one test."""
    output_bytes: PositiveInt = 64 * 1024
    """Limit on the output of one test."""
    at_once: PositiveInt = os.cpu_count() or 1
    """Programs that run at the same time, over all rollouts."""


_TESTS = TypeAdapter(tuple[CodeTest | str, ...])


class CodeInteraction(BaseInteraction):
    """Runs the last code block of the policy's last turn against the dataset row's `tests`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.settings = CodeSettings.model_validate(config)
        self._tests: dict[str, tuple[CodeTest, ...]] = {}
        self._slots = anyio.CapacityLimiter(self.settings.at_once)
        require_sandbox()
        self.reaper: Reaper | None = None
        """Removes what sandboxes held if the gateway is killed."""

    async def start_interaction(self, instance_id: str | None = None, tests: Any = None, **kwargs: Any) -> str:
        tests = self.settings.tests if tests is None else _TESTS.validate_python(tests)
        if not tests:
            raise ValueError("the code checker needs `tests`, in its config or in the session's feedback arguments")
        instance_id = instance_id or str(uuid4())
        self._tests[instance_id] = tuple(CodeTest(assertion=test) if isinstance(test, str) else test for test in tests)
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        tests = self._tests[instance_id]
        source = last_code_block(last_message_text(messages) or "")
        if source is None:
            return False, "Your response has no code block. Write the program between ``` lines.", 0.0, {"passed": 0}
        async with self._slots:
            passed, failed = await self._run_tests(source, tests)
        metadata = {"passed": passed, "tests": len(tests)}
        if failed is None:
            return True, f"All {len(tests)} tests passed.", 1.0, metadata
        number, problem = failed
        score = passed / len(tests) if self.settings.score == "fraction" else 0.0
        text = f"{passed} of {len(tests)} tests passed. Test {number} failed: {problem}"
        return False, text, score, metadata | {"first_failure": number}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._tests.pop(instance_id, None)

    async def _run_tests(self, source: str, tests: tuple[CodeTest, ...]) -> tuple[int, tuple[int, str] | None]:
        """How many tests passed, and the number and problem of the first that failed."""
        passed, first_failed = 0, None
        deadline = anyio.current_time() + self.settings.total_s
        for number, test in enumerate(tests, start=1):
            left_s = deadline - anyio.current_time()
            problem = await self._run_test(source, test, left_s) if left_s > 0 else _TIME_USED_UP
            passed += problem is None
            if problem is not None:
                first_failed = first_failed or (number, problem)
                if left_s <= 0 or self.settings.score == "all":
                    break
        return passed, first_failed

    async def _run_test(self, source: str, test: CodeTest, left_s: float) -> str | None:
        """Why the program fails a test, as text for the policy; None if it passes."""
        settings = self.settings
        limits = ProgramLimits(
            min(settings.wall_s, left_s),
            settings.cpu_s,
            settings.memory_mb * 2**20,
            output_bytes=settings.output_bytes,
        )
        assertion = None if test.assertion is None else ProgramAssertion(test.assertion)
        program = source if assertion is None else assertion.add_to(source)
        ended = await run_python(program, test.stdin, limits, self.reaper)
        # How much was left of the time for all tests differs from run to run, and so would a text with the seconds.
        if limits.wall_s < settings.wall_s and ended.stop_reason.startswith(TOO_LONG):
            return _TIME_USED_UP
        return _output_problem(test, ended) if assertion is None else _assertion_problem(test, assertion, ended)


_TIME_USED_UP = "the time for all tests was used up"


def last_code_block(text: str) -> str | None:
    """The last closed code block of a text. Read line by line: hostile text could make a regex slow."""
    last: str | None = None
    block: list[str] | None = None
    for line in text.splitlines():
        is_fence = line.strip().startswith("```")
        if block is None:
            block = [] if is_fence else None
        elif line.strip() == "```":
            last, block = "\n".join(block), None
        else:
            block.append(line)
    return last


def _output_problem(test: CodeTest, result: ProgramResult) -> str | None:
    prefix = f"for the input {_quote(test.stdin)} " if test.stdin else ""
    if result.stop_reason or result.exit_status:
        return f"{prefix}{_describe_end(result)}"
    expected = test.stdout or ""
    if _stripped_lines(result.stdout) == _stripped_lines(expected):
        return None
    return f"{prefix}expected {_quote(expected)}, got {_quote(result.stdout)}."


def _assertion_problem(test: CodeTest, assertion: ProgramAssertion, result: ProgramResult) -> str | None:
    problem = assertion.find_problem(result.stdout)
    if problem is None:
        return None
    return f"{_quote(test.assertion or '')}: {f'{_excerpt(problem)}.' if problem else _describe_end(result)}"


def _describe_end(result: ProgramResult) -> str:
    if result.stop_reason:
        return f"the program was stopped: {result.stop_reason}."
    last_line = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "")
    return f"the program ended with status {result.exit_status}" + (
        f": {_excerpt(repeatable(last_line))}" if last_line else "."
    )


def _stripped_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _quote(text: str) -> str:
    return repr(_excerpt(text.rstrip()))


def _excerpt(text: str) -> str:
    if len(text) <= EXCERPT_CHARS:
        return text
    return f"{text[:EXCERPT_CHARS]} [{len(text) - EXCERPT_CHARS} more characters]"
