"""Hostile scripts can do nothing: they write and read no file, reach no network, and leave no process."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.errors import ConfigError
from tests.plugins.scripts.conftest import ReadScript

LAUNCH = "python3 -m verl.trainer.main_ppo"
DEADLINE_S = 1.0
HANG_S = 1.0
"""Of scripts that never end by themselves."""
MAX_WAIT_S = 3 * (HANG_S + 5)
"""For the three runs of a script."""

WRITERS = {
    "into the home folder": 'echo bad > "$HOME/.bashrc"; echo bad >> "$HOME/victim"',
    "by exec": "exec 3>VICTIM; echo bad >&3",
    "by python": '/usr/bin/python3 -c \'open("VICTIM", "w")\'; python3 -c \'open("VICTIM", "w")\'',
    "by another bash": "bash -c 'echo bad > VICTIM'; env -i bash -c 'echo bad > VICTIM'",
    "by sed and awk": "sed -i d VICTIM; awk 'BEGIN { print 1 > \"VICTIM\" }'; sed '1e rm VICTIM' /dev/null",
    "in the background": "(while :; do echo bad > VICTIM; done) & disown",
    "through the old root": "cd ..; cd ../../../..; echo bad > VICTIM; echo bad > /proc/1/root/VICTIM",
    "into its own text": 'echo bad >> "$0"; echo bad > run.sh; mv run.sh VICTIM',
    "by loading a builtin": "enable -f /usr/lib/bash/rm rm; enable -f /lib/x86_64-linux-gnu/libc.so.6 x; rm VICTIM",
}


@pytest.mark.parametrize("way", WRITERS)
def test_script_writes_no_file(
    way: str, read_script: ReadScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "victim").write_text("safe")
    monkeypatch.setenv("HOME", str(home))
    text = f"{WRITERS[way].replace('VICTIM', str(home / 'victim'))}\n{LAUNCH} a=1\n"
    with suppress(ConfigError):
        read_script(text, DEADLINE_S)
    assert (home / "victim").read_text() == "safe"
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["home", "run.sh", "victim"]
    assert (tmp_path / "run.sh").read_text() == text


READERS = {
    "a file": 'read -r x < PRIVATE; PYTHON a="$x"',
    "cat": 'PYTHON a="$(cat PRIVATE)"',
    "source": 'source PRIVATE; PYTHON a="$hidden"',
    "the environment": 'PYTHON a="$(env)"',
    "a secret variable": 'PYTHON a="$MY_API_KEY" b=$AWS_SECRET_ACCESS_KEY c="${MY_API_KEY:-}"',
    "a variable that is not named": 'x=UNNAMED_VARI; x+=ABLE; PYTHON a="${!x}" b="${!UN*}"',
    "a parent's environment": 'PYTHON a="$(cat /proc/1/environ /proc/$PPID/environ | tr "\\0" " ")"',
    "the folder": 'PYTHON a="$(echo FOLDER/* /root/.* /home/*/.* ~/.ssh/*)"',
}


@pytest.mark.parametrize("way", READERS)
def test_script_reads_no_secret(
    way: str, read_script: ReadScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "private-file").write_text("hidden=private-text\n")
    for name in ("MY_API_KEY", "AWS_SECRET_ACCESS_KEY", "UNNAMED_VARIABLE"):
        monkeypatch.setenv(name, "private-text")
    text = READERS[way].replace("PRIVATE", str(tmp_path / "private-file")).replace("FOLDER", str(tmp_path))
    text = text.replace("PYTHON", LAUNCH)
    seen = ""
    with suppress(ConfigError):
        seen = repr(read_script(f"set +e\n{text}\n"))
    assert "private-text" not in seen and "private-file" not in seen.replace(str(tmp_path / "private-file"), "")


def test_script_reaches_no_network(read_script: ReadScript) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with suppress(ConfigError):
            read_script(
                f"exec 3<>/dev/tcp/127.0.0.1/{port}\necho x > /dev/tcp/127.0.0.1/{port}\n"
                f"curl http://127.0.0.1:{port}\n/usr/bin/curl http://127.0.0.1:{port}\n{LAUNCH} a=1\n"
            )
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


HANGING = {
    "a trapped signal": "trap '' TERM INT HUP QUIT; while :; do :; done",
    "a fork bomb": "b() { b | b & }; b; while :; do :; done",
    "background children": "(trap '' TERM; while :; do :; done) & disown; exit",
    "endless output": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done",
    "endless records": "while :; do printf 'x%.0s' {1..1000} >&200; done",
    "a full disk": "for i in {1..100000}; do printf 'x%.0s' {1..100000} > file$i; done; while :; do :; done",
    "much memory": "x=x; while :; do x=$x$x; done",
    "endless recursion": "f() { f; }; f",
}


@pytest.mark.parametrize("way", HANGING)
def test_script_that_never_ends_is_killed_with_its_children(way: str, read_script: ReadScript) -> None:
    before, begin = _processes(), time.monotonic()
    with suppress(ConfigError):
        assert read_script(f"{HANGING[way]}\n", HANG_S) == []
    assert time.monotonic() - begin < MAX_WAIT_S
    remaining = _processes() - before  # Including those of tests in other processes, which end in time too.
    while remaining and time.monotonic() - begin < 2 * MAX_WAIT_S:
        remaining &= _processes()
        time.sleep(0.05)
    assert not remaining


def test_hostile_records_are_only_text(read_script: ReadScript) -> None:
    forged = r"printf '1 run x\0 1 word \0 1 end \0 2 missing x:\0 3 line 999999999999999\0\0\0\xff' >&200"
    with suppress(ConfigError):
        read_script(f"{forged}\n{LAUNCH} a=1\n")


@pytest.mark.parametrize("line", ["\x1b]0;title\x07", "/x/\x1b[2J", "source $'\\e[2J'", ": ${A?\x1b[31m}", "x" * 999])
def test_errors_have_no_characters_that_a_terminal_acts_on(line: str, read_script: ReadScript) -> None:
    with pytest.raises(ConfigError) as caught:
        read_script(f"{line}\n{LAUNCH} a=1\n")
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 600


def _processes() -> set[str]:
    """The processes that run bash, or what confines it."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if b"/bin/bash\0-p" in words or b"bwrap\0" in words or b"run.sh" in words:
                found.add(process.name)
    return found - {str(os.getpid())}
