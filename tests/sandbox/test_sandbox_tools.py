"""The tools `python`, `shell` and `files` share a sandbox of the rollout, which ends with it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from secrets import randbelow
from typing import Any

import anyio
import pytest

from gateway.errors import Unavailable
from gateway.sandbox.cgroups import find_parent
from gateway.sandbox.grade_settings import GradeSettings
from gateway.sandbox.grader import Grader
from gateway.sandbox.sandbox_layout import STATE_PLACES
from gateway.toolset import Session
from gateway.types import Image, Outcome, ToolResult
from tests.conftest import Write
from tests.sandbox.conftest import SMALL, call, find_bubblewraps, kill_sandbox, open_session
from tests.sandbox.roots import make_root
from tests.waiting import wait_until


async def text(session: Session, name: str, **arguments: Any) -> str:
    result = await call(session, name, **arguments)
    assert result.outcome is Outcome.OK, result
    return result.text


async def test_variables_and_files_stay_for_the_next_call_of_any_tool() -> None:
    async with open_session() as session:
        assert await text(session, "python", code="x = 20\nopen('a.txt', 'w').write('one\\ntwo\\n')\nx + 1") == "21"
        assert await text(session, "python", code="print(x)") == "20"
        assert await text(session, "shell", command="cat a.txt; exit 3") == "one\ntwo\n[exit status 3]"
        assert await text(session, "files", action="read", path="a.txt", first_line=2) == "two"
        await text(session, "files", action="edit", path="a.txt", old="two", text="three")
        await text(session, "files", action="write", path="new/b.txt", text="thirty")
        assert await text(session, "files", action="search", path=".", pattern="^th") == (
            "./a.txt:2:three\n./new/b.txt:1:thirty"
        )
        assert await text(session, "shell", command="pwd") == "/rollout"


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout = None",
        "import sys; sys.displayhook = None",
        "import sys; sys.stdout.close()",
        "import os; os.close(1)",
        "import sys, io; sys.stdout = sys.__stdout__ = io.StringIO()",
    ],
)
async def test_streams_that_one_call_breaks_are_whole_in_the_next(code: str) -> None:
    async with open_session() as session:
        await call(session, "python", code=f"x = 1\n{code}")
        assert await text(session, "python", code="print(x)\n2") == "1\n2"


async def test_problems_with_files_are_told_and_the_sandbox_stays() -> None:
    async with open_session() as session:
        await text(session, "python", code="x = 20; _ = open('a', 'w').write('x x')")
        problems = [
            await call(session, "files", action="read", path="a\0b"),
            await call(session, "files", action="write", path="\ud800", text="x"),
            await call(session, "files", action="search", path=".", pattern="a\0"),
            await call(session, "shell", command="echo a\0b"),
            await call(session, "files", action="edit", path="a", old="x", text="y"),
            await call(session, "files", action="edit", path="a", text="y"),
            await call(session, "files", action="read", path="b"),
            await call(session, "files", action="read", path="/rollout"),
            await call(session, "files", action="search", path=".", pattern="("),
        ]
        assert await text(session, "python", code="x") == "20"
    wanted = ["embedded null byte", "surrogates not allowed", "", "", "occurs 2 times", "needs `old`"]
    wanted += ["No such file or directory: b", "Is a directory", "Unmatched ("]
    for problem, words in zip(problems, wanted, strict=True):
        assert problem.outcome is Outcome.ERROR and words in problem.text


async def test_plots_come_back_as_images() -> None:
    # Without control groups, all that libraries map counts.
    async with open_session(SMALL.model_copy(update={"memory_mb": 2048})) as session:
        code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.figure()\nNone"
        result = await call(session, "python", code=code)
        assert [type(part) for part in result.parts][1:] == [Image, Image], result
        assert all(part.data.startswith(b"\x89PNG") for part in result.parts if isinstance(part, Image))


async def test_loop_is_interrupted_before_the_calls_deadline_and_its_variables_stay() -> None:
    async with open_session() as session:
        await text(session, "python", code="x = 7")
        with anyio.fail_after(4):
            result = await call(session, "python", code="while True: pass")
        assert result.outcome is Outcome.ERROR and result.reason == "it reached the time limit"
        assert await text(session, "python", code="x") == "7"


async def test_deadline_ends_what_a_command_started() -> None:
    async with open_session() as session:
        with anyio.fail_after(5):
            result = await call(session, "shell", command="(setsid sleep 1000 &) ; sleep 1000")
        assert result.outcome is Outcome.ERROR, result
        assert await text(session, "shell", command="pgrep -c sleep") == "0\n[exit status 1]"


async def test_cancelled_call_ends_the_sandbox_and_the_next_one_gets_a_new_one() -> None:
    async with open_session() as session:
        await text(session, "python", code="x = 1")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: call(session, "python", code="import time; time.sleep(600)"))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        lost = await call(session, "python", code="x")
        assert lost.outcome is Outcome.ERROR and "NameError" in str(lost.reason)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.kill(os.getppid(), 9)", "its processes ended it"),
        ("import os\nfor n in range(3, 9):\n try: os.write(n, b'x' * 99)\n except OSError: pass", ""),
    ],
)
async def test_what_a_policy_breaks_is_its_own_error(code: str, reason: str) -> None:
    async with open_session() as session:
        result = await call(session, "python", code=code)
        assert result.outcome is Outcome.ERROR and reason in str(result.reason), result
        assert result.reward is None
        assert await text(session, "python", code="1 + 1") == "2"


@pytest.mark.parametrize("trick", ["kill -STOP $PPID; sleep 600", "mkfifo pipe"])
async def test_a_policy_cannot_make_its_call_time_out(trick: str) -> None:
    """Late calls are the infrastructure's failures, whose rollouts are not scored; here the policy is late."""
    async with open_session() as session:
        assert await text(session, "python", code="1") == "1"
        with anyio.fail_after(5):
            result = await call(session, "shell", command=trick)
            if result.outcome is Outcome.OK:
                result = await call(session, "files", action="write", path="pipe", text="x")
        assert result.outcome is Outcome.ERROR, result
        assert await text(session, "python", code="2") == "2"


OUTSIDE = [("bubblewrap", ""), ("the first process", ""), ("the first process", "with a root")]


@pytest.mark.parametrize(("target", "root"), OUTSIDE)
async def test_sandbox_that_is_ended_from_outside_is_no_error_of_the_policy(
    target: str, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SMALL.model_copy(update={"root": make_root(tmp_path, monkeypatch)}) if root else SMALL
    async with open_session(settings) as session:
        seconds, results = 10**6 + randbelow(10**6), list[ToolResult]()

        async def wait_inside() -> None:
            results.append(await call(session, "shell", command=f"sleep {seconds}"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_inside)
            await wait_until(lambda: _processes(f"sleep\0{seconds}"))
            kill_sandbox(target)
        assert results[0].outcome is Outcome.UNKNOWN and "from outside" in str(results[0].reason)
        after = await call(session, "python", code="1")
        assert after.outcome is Outcome.UNAVAILABLE and "lost with its files" in str(after.reason)


@pytest.mark.parametrize("target", ["bubblewrap", "the first process"])
async def test_what_a_sandbox_that_is_ended_from_outside_between_calls_left_is_not_graded(target: str) -> None:
    grade = GradeSettings(command=("/bin/sh", "-c", "echo 1 > /rollout/reward.txt"), reward="/rollout")
    async with open_session() as session:
        toolset = session._toolset
        toolset.grader = Grader(grade, SMALL, toolset.provider)
        assert await text(session, "shell", command="sleep 600 & echo works on") == "works on"
        kill_sandbox(target)
        await wait_until(lambda: session._sandbox.has_ended)
        with pytest.raises(Unavailable, match="nothing is left to grade: the sandbox was ended from outside, by sig"):
            await session.finish()


GATEWAY = """
import anyio, json, sys
from gateway import Gateway, Task, ToolCall
async def main():
    async with Gateway.load(sys.argv[1], None) as gateway, gateway.open(Task()) as session:
        call = ToolCall("1", "shell", json.dumps({"command": f"exec -a {sys.argv[2]} sleep 600 & echo started"}))
        print((await session.calls([call]))[0].text, flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def test_nothing_is_left_of_a_gateway_that_is_killed(write: Write, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    entry = f"{{sandbox_tools: [shell], state: '{tmp_path / 'state'}', warm: 1}}"
    file, marker = write("tools.yaml", f"tools: [{entry}]"), f"m{tmp_path.name}{os.getpid()}"
    command = [sys.executable, "-c", GATEWAY, str(file), marker]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as gateway:
        assert gateway.stdout is not None and gateway.stdout.readline() == "started\n"
        assert _processes(marker) and find_bubblewraps(gateway.pid) and not _state_mounts()
        gateway.kill()
    anyio.run(wait_until, lambda: not (_processes(marker) or _groups(gateway.pid)))
    assert not _state_mounts()


async def test_loopback_reaches_the_sandbox_itself_and_nothing_of_the_machine() -> None:
    code = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname()).close(); print('own')\n"
        "socket.create_connection(('127.0.0.1', {port}), 5)"
    )
    with socket.create_server(("127.0.0.1", 0)) as outside:
        async with open_session(SMALL.model_copy(update={"network": "loopback"})) as session:
            result = await call(session, "python", code=code.format(port=outside.getsockname()[1]))
    assert result.text.startswith("own\n") and "ConnectionRefusedError" in str(result.reason), result


def _state_mounts() -> list[str]:
    """What is mounted, for the machine to see, where sandboxes mount their states."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in mounts if line.split()[1] in STATE_PLACES]


def _processes(marker: str) -> list[int]:
    """Processes that have a name."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes().startswith(marker.encode()):
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def _groups(gateway: int) -> list[Path]:
    """The control groups of a gateway's sandboxes."""
    return [*parent.glob(f"mtrl-sandbox-{gateway}-*")] if (parent := find_parent()) else []
