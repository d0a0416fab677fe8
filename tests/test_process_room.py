"""Tests of how processes end: those that the gateway starts, frames and ends, and its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gateway.process.child_entry import HEADER, MAX_BODY_BYTES
from gateway.process.pipe_process import PipeProcess, ProcessEnded
from gateway.process.request_process import RequestProcess, RequestRefused
from gateway.process.spawn import CommandError, run_command
from gateway.process.supervised_process import SupervisedProcess
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[1]
SLEEPER = "sleep 600 & echo $! > started; exec sleep 600"
CHILD = """
import json
from gateway.process.child_entry import Wire

def serve(word):
    wire, held = Wire.claim(), []
    print("printed, not sent")
    while (message := wire.receive()) is not None:
        held.append((message[0], json.loads(message[1])))
        if len(held) == 2:
            for number, value in reversed(held):
                wire.send_problem(number, "no", "say yes") if value == "bad" else wire.send_value(number, [word, value])
            held.clear()
"""
KEEPER = """
import sys, time
from gateway.process.supervised_process import SupervisedProcess
code = "import sys; sys.stdin.read(); open('closed', 'w').close()"
process = SupervisedProcess([sys.executable, "-c", code], stdin=-1, alone_s=float(sys.argv[1]))
process.read_start()
print(process.pid, process.supervisor.pid, flush=True)
time.sleep(600)
"""


def test_command_that_is_late_is_killed_with_what_it_started(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"did not end within 0\.5 s"):
        run_command(["sh", "-c", SLEEPER], 0.5, cwd=tmp_path)
    started = int((tmp_path / "started").read_text())
    psutil.wait_procs([psutil.Process(started)] if psutil.pid_exists(started) else [], timeout=PATIENCE_S)
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE


def test_command_that_prints_too_much_is_ended() -> None:
    with pytest.raises(CommandError, match="printed more than 1000 bytes"):
        run_command(["yes"], PATIENCE_S, max_bytes=1000)
    done = run_command(["sh", "-c", "echo out; echo err >&2; exit 3"], PATIENCE_S)
    assert (done.status, done.text, done.error_text) == (3, "out\n", "err")


def test_command_that_cannot_be_started_is_an_error_of_the_system() -> None:
    process = SupervisedProcess(["no-such-program"])
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        process.read_start()
    process.end(0.0)


def test_program_that_ignores_sigterm_ends_with_daemons_that_left_its_session(tmp_path: Path) -> None:
    code = "trap '' TERM; setsid sh -c 'echo $$ > daemon; exec sleep 600' & echo up; while true; do sleep 600; done"
    process = SupervisedProcess(["bash", "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    process.read_start()
    assert process.supervisor.stdout is not None and process.supervisor.stdout.read(3) == b"up\n"
    deadline = time.monotonic() + PATIENCE_S
    while not (text := (tmp_path / "daemon").read_text() if (tmp_path / "daemon").exists() else ""):
        assert time.monotonic() < deadline
    process.end(0.1, first_s=0.0)
    process.supervisor.stdout.close()
    assert process.exit_code == -signal.SIGKILL and not psutil.pid_exists(int(text))


@pytest.mark.parametrize(("alone_s", "closes"), [(PATIENCE_S, True), (0.0, None)])
async def test_program_of_a_killed_process_ends(alone_s: float, closes: bool | None, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEEPER, str(alone_s)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, env=environment) as keeper:  # noqa: ASYNC220
        assert keeper.stdout is not None
        pids = [int(word) for word in keeper.stdout.readline().split()]
        keeper.kill()
    await wait_until(lambda: not any(map(psutil.pid_exists, pids)), PATIENCE_S)
    assert closes is None or (tmp_path / "closed").exists(), "it had the time to close what it uses"


def test_answers_find_their_requests_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    entry = [sys.executable, str(ROOT / "gateway/process/child_entry.py")]
    process = RequestProcess([*entry, f"{tmp_path}/child.py:serve", "a word"])
    first, second, third, fourth = map(process.send, ("one", "two", "bad", "four"))
    assert first.result(PATIENCE_S) == ["a word", "one"] and second.result(PATIENCE_S) == ["a word", "two"]
    with pytest.raises(RequestRefused, match="no") as refused:
        third.result(PATIENCE_S)
    assert refused.value.remedy == "say yes" and fourth.result(PATIENCE_S) == ["a word", "four"]
    lost = process.send("five")
    process.stop(PATIENCE_S)
    with pytest.raises(ProcessEnded, match=r"exit code 0.*printed, not sent"):
        lost.result(PATIENCE_S)
    with pytest.raises(ProcessEnded):
        process.send("six")


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (HEADER.pack(1, MAX_BODY_BYTES + 1), "is too long"),
        (HEADER.pack(7, 0), "answered request 7, not 1"),
        (b"text", "closed its output"),
    ],
)
async def test_what_is_no_answer_ends_the_exchange(header: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "answer").write_bytes(header)
    process = PipeProcess.start(["sh", "-c", f"head -c {HEADER.size} > {tmp_path}/asked; cat {tmp_path}/answer"])
    with pytest.raises(ProcessEnded, match=problem):
        await process.ask(b"")
    await process.kill()
    assert (tmp_path / "asked").read_bytes() == HEADER.pack(1, 0)


LONG_THREAD = "threading.Thread(target=time.sleep, args=(600,)).start()"
SHORT_THREAD = "threading.Thread(target=time.sleep, args=(0.05,)).start()"


@pytest.mark.parametrize(
    ("thread", "says", "code"), [("pass", "'a reason'", 1), (SHORT_THREAD, "None", 0), (LONG_THREAD, "3", 3)]
)
def test_command_exits_with_its_code_and_output_despite_running_threads(thread: str, says: str, code: int) -> None:
    script = (
        "import sys, threading, time\nfrom gateway.process_exit import exit_despite_threads\n"
        f"def command():\n    {thread}\n    print('said', end='')\n    sys.exit({says})\n"
        "with exit_despite_threads():\n    command()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "said")


@pytest.mark.parametrize(
    ("ending", "code"), [("faulthandler._sigsegv()", -11), ("os._exit(7)", 7), ("os.fork() or os._exit(3)", 0)]
)
def test_user_code_that_ends_the_process_is_told_by_its_stack(ending: str, code: int) -> None:
    script = (
        "import faulthandler, os\nfrom gateway.process_exit import exit_despite_threads\n"
        f"def reward():\n    {ending}\nwith exit_despite_threads():\n    reward()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code and ("in reward" in done.stderr) == (code != 0)


def test_user_code_ends_the_process_where_nothing_can_be_told() -> None:
    script = (
        "import os, sys\nfrom gateway.process_exit import exit_despite_threads\n"
        "sys.stderr = None\nwith exit_despite_threads():\n    os._exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 7


@pytest.mark.parametrize("hides", [True, False])
def test_children_of_the_same_user_read_the_environment_only_if_it_is_not_hidden(hides: bool) -> None:
    script = (
        "import ctypes, os, subprocess\nfrom gateway.process_exit import hide_environment\n"
        "if os.geteuid() == 0:\n    os.setgid(65534)\n    os.setuid(65534)\n"  # root reads everything
        "    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)\n"  # which becoming another user had hidden
        f"if {hides}:\n    hide_environment()\n"
        "subprocess.run(['cat', f'/proc/{os.getpid()}/environ'])\n"
    )
    env = os.environ | {"SECRET": "hunter2"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=env, timeout=120, check=False)
    assert (b"hunter2" in done.stdout) is not hides, done.stderr
