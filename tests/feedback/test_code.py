"""Programs are judged by their tests, run as children with limits, and leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import anyio
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.errors import SessionError
from gateway.feedback.code import CodeInteraction, last_block
from gateway.feedback.program import Bounds, run_python
from gateway.feedback.toolset import FeedbackToolset
from gateway.types import Feedback, Task
from tests.feedback.interactions import answers

DOUBLE = "print(2 * int(input()))"
CASES = [{"stdin": "2", "stdout": "4"}, {"stdin": "0", "stdout": "0\n"}, {"stdin": "5", "stdout": "10"}]


def block(source: str) -> str:
    return f"Here it is:\n```python\n{source}\n```\nThat is all."


async def judged(source: str, tests: list[Any], **config: Any) -> Feedback:
    with anyio.fail_after(50):
        async with (
            FeedbackToolset({"code": CodeInteraction(config)}) as toolset,
            toolset.open(Task(feedback="code", feedback_args={"tests": tests})) as session,
        ):
            return await session.feedback(answers(block(source)))


async def test_a_right_program_ends_the_rollout() -> None:
    heard = await judged(DOUBLE, CASES)
    assert (heard.score, heard.done, dict(heard.metadata)) == (1.0, True, {"passed": 3, "tests": 3})


async def test_a_wrong_program_earns_the_fraction_and_is_told_the_first_failing_case() -> None:
    heard = await judged("print(int(input()) ** 2)", CASES)
    assert heard.score == pytest.approx(2 / 3)
    assert heard.message == "2 of 3 tests passed. Test 3 failed: for the input '5' expected '10', got '25'."
    assert not heard.done


async def test_all_or_nothing_gives_nothing_for_a_part() -> None:
    assert (await judged("print(int(input()) ** 2)", CASES, score="all")).score == 0.0
    assert (await judged(DOUBLE, CASES, score="all")).score == 1.0


async def test_assertions_run_after_the_program() -> None:
    source = "def double(x):\n    return x * 2 if x else 1"
    heard = await judged(source, ["assert double(2) == 4", "assert double(0) == 0, 'zero'"])
    assert heard.score == 0.5
    assert "Test 2 failed: \"assert double(0) == 0, 'zero'\": the program ended with status 1" in heard.message
    assert "AssertionError: zero" in heard.message


@pytest.mark.parametrize(
    "source", ["import sys; sys.exit(0)", "import os; os._exit(0)", "'''", "if False:\n  pass\n\\"]
)
async def test_a_program_that_never_reaches_the_assertion_fails_it(source: str) -> None:
    assert (await judged(source, ["assert False"])).score == 0.0


@pytest.mark.parametrize(
    ("source", "wall_s", "reason"),
    [
        ("while True: pass", 1.0, "stopped: it "),
        ("import time; time.sleep(60)", 1.0, "stopped: it ran longer than 1 s"),
        ("while True: print('x' * 1000)", 20.0, "stopped: it printed more than 65536 bytes"),
        ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", 20.0, "stopped: it printed more than"),
        ("x = bytearray(2**30)", 20.0, "MemoryError"),
        ("open('f', 'wb').write(bytes(2**21))", 20.0, "File"),
        ("raise ValueError('no')", 20.0, "ended with status 1: ValueError: no"),
        ("print(", 20.0, "SyntaxError"),
        ("import numpy", 20.0, "ModuleNotFoundError"),
    ],
)
async def test_a_program_beyond_its_limits_fails_with_the_reason(source: str, wall_s: float, reason: str) -> None:
    heard = await judged(source, CASES[:1], wall_s=wall_s)
    assert heard.score == 0.0
    assert reason in heard.message
    assert len(heard.message) < 2000


async def test_cpu_time_is_limited_before_the_wall_clock() -> None:
    ran = await run_python("while True: pass", bounds=Bounds(wall_s=20.0, cpu_s=1))
    assert ran.status is None
    assert "1 s of CPU time" in ran.ended


async def test_the_time_of_all_tests_is_limited() -> None:
    heard = await judged("import time; time.sleep(60)", CASES, wall_s=10.0, total_s=0.4)
    assert heard.score == 0.0
    assert "ran longer" in heard.message


async def test_a_program_sees_no_environment_and_works_in_a_folder_that_is_removed() -> None:
    os.environ["MTRL_TEST_SECRET"] = "hidden"
    try:
        ran = await run_python("import os, sys; print(os.getcwd()); print('MTRL_TEST_SECRET' in os.environ, sys.flags)")
    finally:
        del os.environ["MTRL_TEST_SECRET"]
    folder, seen = ran.stdout.splitlines()
    assert seen.startswith("False") and "isolated=1" in seen and "no_site=1" in seen
    assert not await anyio.Path(folder).exists()


async def test_what_a_program_leaves_running_is_killed_with_it() -> None:
    source = "import os\nif os.fork() == 0:\n    import time; time.sleep(60)\nprint(os.getpid(), flush=True)"
    with anyio.fail_after(20):
        ran = await run_python(source, bounds=Bounds(wall_s=2.0))
    if ran.status != 0 and "BlockingIOError" in ran.stderr:
        return  # not root: it could not start one at all
    leader = int(ran.stdout)
    await eventually(lambda: not _group(leader))


async def test_a_descendant_that_leaves_the_group_cannot_hold_the_check_up() -> None:
    source = (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(15)\nprint('over', flush=True)"
    )
    with anyio.fail_after(12):
        ran = await run_python(source, bounds=Bounds(wall_s=2.0))
    assert ran.stdout == "over\n" or "BlockingIOError" in ran.stderr


async def eventually(true: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not true():  # noqa: ASYNC110 - other processes set no events
            await anyio.sleep(0.01)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def _group(leader: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and os.getpgid(process.pid) == leader:
                found.append(process.pid)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


async def test_a_cancelled_check_leaves_no_program_behind() -> None:
    before = _children()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_python, "import time; time.sleep(60)", "", Bounds(wall_s=60.0))
        await eventually(lambda: _children() > before)
        tasks.cancel_scope.cancel()
    await eventually(lambda: _children() <= before)


async def test_input_that_is_not_read_and_output_that_is_no_text_do_no_harm() -> None:
    ran = await run_python("import sys; sys.stdout.buffer.write(b'\\xff')", stdin="x" * 1_000_000)
    assert (ran.stdout, ran.status) == ("\ufffd", 0)


async def test_an_answer_without_a_block_is_told_how_to_give_one() -> None:
    interaction = CodeInteraction({"tests": ["assert True"]})
    instance_id = await interaction.start_interaction()
    done, text, score, _ = await interaction.generate_response(instance_id, answers("no code"))
    assert (done, score) == (False, 0.0)
    assert "```" in str(text)
    await interaction.finalize_interaction(instance_id)


@pytest.mark.parametrize("tests", [None, [], [{"stdin": "1"}], [{"stdout": "1", "assertion": "assert 1"}], "assert 1"])
async def test_a_session_without_usable_tests_is_refused(tests: Any) -> None:
    async with FeedbackToolset({"code": CodeInteraction({})}) as toolset:
        with pytest.raises(SessionError, match="could not start"):
            async with toolset.open(Task(feedback="code", feedback_args={"tests": tests})):
                pytest.fail("it opened")


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValidationError, match="network"):
        CodeInteraction({"network": True})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```\na\n```\nand\n```py\nb\nc\n```", "b\nc"),
        ("```py\r\na\r\n```", "a"),
        ("  ```\n  a\n  ```", "  a"),
        ("```py\na", None),
        ("`a`", None),
        ("```\n```", ""),
    ],
)
def test_the_last_closed_block_is_the_program(text: str, found: str | None) -> None:
    assert last_block(text) == found


@given(before=st.text(alphabet="ab `\n"), source=st.text(alphabet="xy=1 \n"))
def test_a_block_after_anything_closed_is_found(before: str, source: str) -> None:
    text = before if last_block(before + "\n```\nprobe\n```") == "probe" else ""
    assert last_block(f"{text}\n```python\n{source}\n```") == "\n".join(f"{source}\n".splitlines())
