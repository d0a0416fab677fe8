"""A command that is over leaves, whatever still holds a thread."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HELD = "threading.Thread(target=time.sleep, args=(60,)).start()"
BRIEF = "threading.Thread(target=time.sleep, args=(0.05,)).start()"


@pytest.mark.parametrize("thread", ["pass", BRIEF, HELD])
@pytest.mark.parametrize(("says", "code"), [("3", 3), ("None", 0), ("'a reason'", 1)])
def test_a_command_leaves_with_its_code_and_its_words_however_long_a_thread_goes_on(
    thread: str, says: str, code: int
) -> None:
    script = (
        "import sys, threading, time\nfrom gateway.leave import leaving\n"
        f"def command():\n    {thread}\n    print('said', end='')\n    sys.exit({says})\nleaving(command)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (code, "said") and time.monotonic() - began < 40
