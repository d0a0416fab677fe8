"""Programs of the policy can neither end the gateway, nor read its secrets, nor write outside their folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

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
TRICKS = {
    "kills the gateway": "os.kill({pid}, 9)",
    "kills its parent": "os.getppid() and os.kill(os.getppid(), 9) or sys.exit(3)",
    "kills the gateway's group": "os.killpg({group}, 9)",
    "reads the environment of the gateway": "print(open('/proc/{pid}/environ').read())",
    "reads the environment of its parent": "print(open(f'/proc/{{os.getppid()}}/environ').read())",
    "reads the memory of the gateway": "print(open('/proc/{pid}/mem', 'rb').read(1))",
    "writes outside its folder": "open({outside!r}, 'w').write('x')",
    "removes a file outside its folder": "os.unlink({outside!r})",
    "traces the gateway": "import ctypes; sys.exit(3 if ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) else 0)",
}
"""Each must fail; what the program prints must not have the secret."""


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    """A secret in this process's environment, which stands for the gateway's."""
    value = secrets.token_hex(8)
    monkeypatch.setenv("MTRL_TEST_SECRET", value)
    return value


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "outside"
    file.write_text("kept")
    yield file
    assert file.read_text() == "kept"


@pytest.mark.parametrize("trick", TRICKS)
async def test_tricks_of_programs_fail(trick: str, secret: str, outside: Path) -> None:
    line = TRICKS[trick].format(pid=os.getpid(), group=os.getpgrp(), outside=str(outside))
    with anyio.fail_after(60):
        result = await run_python(f"import os, sys\n{line}")
    assert result.exit_status != 0 or result.stop_reason, result.stdout
    assert secret not in result.stdout + result.stderr


@pytest.mark.parametrize("status", [1, 125, 126, 127])
async def test_no_exit_status_of_a_program_passes_for_a_sandbox_that_did_not_start(status: int) -> None:
    result = await run_python(f"import os; os._exit({status})")
    assert result.exit_status == status and not result.stop_reason


async def test_a_confined_program_reads_its_input_writes_to_its_folder_and_has_no_environment() -> None:
    source = (
        "import os\nopen('f', 'w').write(input())\nprint(open('f').read(), sorted({*os.environ} - {'LC_CTYPE', 'PWD'}))"
    )
    result = await run_python(source, stdin="seven")
    assert (result.stdout, result.stderr) == ("seven []\n", "")


async def test_a_confined_program_has_no_network() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        result = await run_python(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
    assert result.exit_status == 1 and "Error" in result.stderr


@pytest.mark.parametrize("file", ["/etc/passwd", __file__, "{outside}"])
async def test_a_confined_program_reads_no_file_of_the_machine(file: str, outside: Path) -> None:
    path = file.format(outside=outside)
    result = await run_python(f"print(open({path!r}).read())")
    assert result.exit_status == 1 and "FileNotFoundError" in result.stderr


async def test_limits_hold() -> None:
    result = await run_python("while True: pass", limits=ProgramLimits(20.0, 1))
    assert "1 s of CPU time" in result.stop_reason
    result = await run_python("import time; time.sleep(60)", limits=ProgramLimits(1.0))
    assert "longer than 1 s" in result.stop_reason


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
