"""Tests that a finished command exits even if a thread is still running."""

from __future__ import annotations

import subprocess
import sys

import pytest

LONG_THREAD = "threading.Thread(target=time.sleep, args=(600,)).start()"
SHORT_THREAD = "threading.Thread(target=time.sleep, args=(0.05,)).start()"


@pytest.mark.parametrize("thread", ["pass", SHORT_THREAD, LONG_THREAD])
@pytest.mark.parametrize(("says", "code"), [("3", 3), ("None", 0), ("'a reason'", 1)])
def test_command_exits_with_its_code_and_output_despite_running_threads(thread: str, says: str, code: int) -> None:
    script = (
        "import sys, threading, time\nfrom gateway.process_exit import exit_despite_threads\n"
        f"def command():\n    {thread}\n    print('said', end='')\n    sys.exit({says})\n"
        "with exit_despite_threads():\n    command()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "said")
