"""Tests that a finished command exits even if a thread is still running."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
