"""Programs of the policy see nothing of the machine, and how they end is read right."""

from __future__ import annotations

import anyio
import anyio.abc
import psutil
import pytest

from gateway.errors import ConfigError, Unavailable
from gateway.feedback import program_runner
from gateway.feedback.code import CodeInteraction, CodeTest, ProgramLimits, run_python
from gateway.sandbox.bubblewrap import find_problem
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(find_problem() is not None, reason="no sandbox can be started here")


@pytest.mark.parametrize("status", [1, 125, 126, 127])
async def test_no_exit_status_of_a_program_passes_for_a_sandbox_that_did_not_start(status: int) -> None:
    result = await run_python(f"import os; os._exit({status})")
    assert result.exit_status == status and not result.stop_reason


CONFINED = """
import os, socket
open("f", "w").write(input())
print(open("f").read(), sorted({*os.environ} - {"LC_CTYPE", "PWD"}), *map(os.path.exists, %r))
socket.create_connection(("127.0.0.1", %d))
"""


async def test_a_confined_program_has_its_input_and_folder_and_nothing_of_the_machine() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        result = await run_python(CONFINED % (["/etc/passwd", __file__], port), stdin="seven")
    assert result.stdout == "seven [] False False\n" and result.exit_status == 1 and "Error" in result.stderr


async def test_limit_on_processor_time_holds() -> None:
    result = await run_python("while True: pass", limits=ProgramLimits(20.0, 1))
    assert "1 s of CPU time" in result.stop_reason


def test_where_nothing_confines_the_checker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_runner, "find_problem", lambda: "no bwrap")
    with pytest.raises(ConfigError, match=r"cannot be confined here: no bwrap[^\0]*install bubblewrap"):
        CodeInteraction({})


FINDS = """
import os, sys
def find():
    mark, found = b"m4rk" + b"3d", []
    files = [f"{folder}/{name}" for folder, _, names in os.walk("/proc") for name in names if name in SMALL]
    for top in ("/rollout", "/tmp", "/dev/shm"):
        files += [f"{folder}/{name}" for folder, _, names in os.walk(top) for name in names]
    for file in [*files, *(name.path for name in os.scandir("/") if name.is_file())]:
        try:
            if mark in open(file, "rb").read(2**20):
                found.append(file)
        except OSError:
            pass
    return found
SMALL = ("cmdline", "environ", "comm")
print(find())
"""


async def test_no_expected_value_is_in_the_sandbox_of_a_program() -> None:
    interaction = CodeInteraction({"wall_s": 20})
    with anyio.fail_after(PATIENCE_S):
        assertion = CodeTest(assertion="assert find() == []\nassert str(find()) == 'm4rk3d', 'm4rk3d'")
        assert "AssertionError: m4rk3d" in str(await interaction._run_test(FINDS, assertion, 20.0))
        problem = await interaction._run_test(FINDS, CodeTest(stdout="m4rk3d"), 20.0)
    assert problem == "expected 'm4rk3d', got '[]'."


async def test_sandbox_of_a_program_that_is_ended_from_outside_is_no_failure_of_the_program() -> None:
    before = set(psutil.Process().children())

    async def end_it() -> None:
        await wait_until(lambda: bool(set(psutil.Process().children()) - before))
        for process in set(psutil.Process().children()) - before:
            process.kill()

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end_it)
            with pytest.raises(Unavailable, match="ended from outside, by signal 9"):
                await run_python("import time; time.sleep(600)", limits=ProgramLimits(60.0))
