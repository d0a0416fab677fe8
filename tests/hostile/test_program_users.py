"""Programs of two gateways of root on one machine can neither signal nor trace each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.errors import Unavailable
from gateway.sandbox import program_users
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give programs users of their own")

GATEWAY = """
import subprocess, sys
from gateway.sandbox.python_programs import confine, program_folder
with program_folder() as folder:
    command = confine("user", folder, (20, 2**30, 2**20), ("/bin/sh", "-c", *sys.argv[1:]))
    subprocess.run(command, cwd=folder.path, env={"A": "b"}, timeout=300)
"""
"""A process that runs one program as a gateway does. It is no Python program: our interpreter may be root's alone."""
TELLS_USER = 'while read key user rest; do [ "$key" = Uid: ] && echo "$user $$"; done < /proc/$$/status'
WAITS = f"{TELLS_USER}; read line"
ATTACKS = f"""
{TELLS_USER}
kill -0 $0 2> /dev/null && echo signalled
read -r first < /proc/$0/environ && echo traced
"""
"""Its environment may be read by whoever may trace a process."""


@contextmanager
def gateway(*program: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", GATEWAY, *program]
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root) as process:
        try:
            yield process
        finally:
            process.kill()


def test_program_of_one_gateway_cannot_touch_that_of_another() -> None:
    with gateway(WAITS) as first:
        assert first.stdout is not None
        user, pid = first.stdout.readline().split()
        with gateway(ATTACKS, pid) as second:
            other, _, *done = second.communicate(timeout=PATIENCE_S)[0].split()
        assert int(other) in program_users.UNUSED_USERS and other != user and done == []


def test_user_is_free_again_when_its_gateway_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway(WAITS) as first:
        assert first.stdout is not None
        user = int(first.stdout.readline().split()[0])
        monkeypatch.setattr(program_users, "usable_users", lambda: (user,))
        problem = "no user is left that a program could run as: 1 programs of gateways run"
        with pytest.raises(Unavailable, match=problem), program_users.unused_user():
            pass
        first.kill()
        first.wait(PATIENCE_S)
        with program_users.unused_user() as again:
            assert again == user


def test_folder_of_somebody_else_is_not_used_for_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, link, ours = tmp_path / "theirs", tmp_path / "link", tmp_path / "ours"
    theirs.mkdir()
    os.chown(theirs, 1234, 0)
    link.symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(program_users, "LOCK_FOLDERS", (str(theirs), str(link), str(ours)))
    assert program_users._lock_folder.__wrapped__() == ours
    assert ours.stat().st_mode & 0o777 == 0o700
