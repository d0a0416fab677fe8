"""Tests of the code interaction: scores, limits of the child process, and cleanup."""

from __future__ import annotations

from typing import Any

import anyio
import psutil
import pytest

from gateway.errors import SessionError
from gateway.feedback.code import CodeInteraction, ProgramLimits, last_code_block, run_python
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.types import Feedback, Task
from tests.feedback.interactions import make_chat
from tests.waiting import wait_until

DOUBLE = "print(2 * int(input()))"
CASES = [{"stdin": "2", "stdout": "4"}, {"stdin": "0", "stdout": "0\n"}, {"stdin": "5", "stdout": "10"}]


def code_block(source: str) -> str:
    return f"Here it is:\n```python\n{source}\n```\nThat is all."


async def judge(source: str, tests: list[Any], **config: Any) -> Feedback:
    with anyio.fail_after(60):
        async with (
            FeedbackToolset({"code": CodeInteraction(config)}) as toolset,
            toolset.open(Task(feedback="code", feedback_args={"tests": tests})) as session,
        ):
            return await session.feedback(make_chat(code_block(source)))


async def test_a_right_program_ends_the_rollout() -> None:
    feedback = await judge(DOUBLE, CASES)
    assert (feedback.score, feedback.done, dict(feedback.metadata)) == (1.0, True, {"passed": 3, "tests": 3})


async def test_a_wrong_program_scores_the_fraction_and_the_reply_has_the_first_failure() -> None:
    feedback = await judge("print(int(input()) ** 2)", CASES)
    assert feedback.score == pytest.approx(2 / 3)
    assert feedback.message == "2 of 3 tests passed. Test 3 failed: for the input '5' expected '10', got '25'."
    assert not feedback.done
    assert (await judge("print(int(input()) ** 2)", CASES, score="all")).score == 0.0


async def test_time_of_all_tests_is_limited_and_an_answer_without_code_is_told_the_form() -> None:
    feedback = await judge("import time; time.sleep(60)", CASES, wall_s=10.0, total_s=0.4)
    assert feedback.score == 0.0 and "the time for all tests was used up" in feedback.message
    interaction = CodeInteraction({"tests": ["assert True"]})
    async with FeedbackToolset({"code": interaction}) as toolset, toolset.open(Task()) as session:
        feedback = await session.feedback(make_chat("no code"))
    assert (feedback.done, feedback.score) == (False, 0.0) and "```" in feedback.message


@pytest.mark.parametrize(
    "source", ["import sys; sys.exit(0)", "import os; os._exit(0)", "'''", "if False:\n  pass\n\\"]
)
async def test_a_program_that_ends_before_the_assertion_fails_it(source: str) -> None:
    assert (await judge(source, ["assert False"])).score == 0.0


@pytest.mark.parametrize(
    ("source", "wall_s", "reason"),
    [
        ("import time; time.sleep(60)", 1.0, "stopped: it ran longer than 1 s"),
        ("while True: print('x' * 1000)", 20.0, "stopped: it printed more than 65536 bytes"),
        ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", 20.0, "stopped: it printed more than"),
        ("x = bytearray(2**30)", 20.0, "MemoryError"),
        ("open('f', 'wb').write(bytes(2**24))", 20.0, "File"),
        ("import numpy", 20.0, "ModuleNotFoundError"),
    ],
)
async def test_a_program_beyond_a_limit_fails_with_the_reason(source: str, wall_s: float, reason: str) -> None:
    feedback = await judge(source, CASES[:1], wall_s=wall_s)
    assert feedback.score == 0.0
    assert reason in feedback.message
    assert len(feedback.message) < 2000


def child_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def test_cancelling_kills_the_program() -> None:
    before = child_pids()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_python, "import time; time.sleep(60)", "", ProgramLimits(wall_s=60.0))
        await wait_until(lambda: bool(child_pids() - before))
        tasks.cancel_scope.cancel()
    await wait_until(lambda: not child_pids() - before)


@pytest.mark.parametrize(
    "tests", [None, [], [{"stdin": "1"}], [{"stdout": "1", "assertion": "assert 1"}], "assert 1", ["assert f(2) =="]]
)
async def test_a_session_without_usable_tests_is_refused(tests: Any) -> None:
    async with FeedbackToolset({"code": CodeInteraction({})}) as toolset:
        with pytest.raises(SessionError, match="could not start"):
            async with toolset.open(Task(feedback="code", feedback_args={"tests": tests})):
                pytest.fail("it opened")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("```\na\n```\nand\n```py\nb\nc\n```", "b\nc"),
        ("```py\r\na\r\n```", "a"),
        ("  ```\n  a\n  ```", "  a"),
        ("```py\na", None),
        ("`a`", None),
        ("```\n```", ""),
    ],
)
def test_the_last_closed_block_is_the_program(text: str, source: str | None) -> None:
    assert last_code_block(text) == source
