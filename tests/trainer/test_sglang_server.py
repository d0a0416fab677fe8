"""Servers are started, watched and ended by the same code, whatever stands behind the interpreter that is named."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import psutil
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from tests.trainer.sglang_stand_in import stand_in
from trainer.engine.base import EngineError
from trainer.engine.sglang import environment
from trainer.engine.sglang.server import LAUNCH, Options, Server

ROOT = Path(__file__).parents[2]
MODEL = Path("models/a")
TRAINER = """
import sys, anyio
from pathlib import Path
from trainer.engine.sglang.server import Server

async def main():
    async with Server(Path("models/a"), log=Path(sys.argv[1])):
        print("up", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes an interpreter that behaves so, and names it; returns where its log is to be."""

    def name(behaviour: str = "healthy") -> Path:
        monkeypatch.setenv(environment.NAMED, str(stand_in(tmp_path, behaviour)))
        monkeypatch.setattr("trainer.engine.sglang.server._END_S", 0.5)  # its child never goes by itself
        return tmp_path / "logs" / "server.log"

    return name


async def test_a_server_is_entered_when_it_is_healthy_and_gone_with_its_children_when_left(named: Named) -> None:
    log, heard = named(), []
    with anyio.fail_after(60):
        async with Server(MODEL, Options(context=512), log=log, told=heard.append) as server:
            assert await answers(server.url)
            assert server.alive
            (started,) = starts(log)
            assert server.pid == started["pids"][0]
            assert all(alive(pid) for pid in started["pids"])
        assert not any(alive(pid) for pid in started["pids"])
    assert not server.alive
    assert server.url in heard[-1] and str(log) in heard[-1]


async def test_it_gets_the_options_of_sglang_and_nothing_that_leads_to_our_packages(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    monkeypatch.setenv("VIRTUAL_ENV", "ours")
    options = Options(context=512, tokens=4096, running=8, device="cpu", more=("--random-seed", "3"))
    with anyio.fail_after(60):
        async with Server(MODEL, options, log=(log := named())) as server:
            (started,) = starts(log)
    words = started["words"]
    assert words[:2] == ["-P", str(LAUNCH)]
    assert given(words, "--model-path") == str(MODEL)
    assert f"http://{given(words, '--host')}:{given(words, '--port')}" == server.url
    expected = {"--context-length": "512", "--max-total-tokens": "4096", "--max-running-requests": "8"}
    assert {name: given(words, name) for name in expected} == expected
    assert (given(words, "--device"), given(words, "--random-seed")) == ("cpu", "3")
    assert "--skip-tokenizer-init" in words
    assert started["leading"] == {}


def test_what_is_not_given_is_left_to_sglang() -> None:
    assert Options().words() == ["--skip-tokenizer-init"]
    assert Options(tokenizer=True).words() == []


async def test_a_restart_that_is_killed_before_it_is_there_is_made_again(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[EngineError] = []

    async def start() -> None:
        if not failed:
            failed.append(server.fault("did not start"))
            raise failed[0]
        await whole()

    with anyio.fail_after(60):
        async with Server(MODEL, log=named()) as server:
            whole = server._start
            monkeypatch.setattr(server, "_start", start)
            await server.restart()
            assert server.alive and failed


async def test_a_restarted_server_is_another_process_at_the_same_address(named: Named) -> None:
    with anyio.fail_after(60):
        async with Server(MODEL, log=(log := named())) as server:
            url, pid = server.url, server.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: not server.alive)
            assert "ended by signal 9" in str(server.fault("is gone"))
            await server.restart()
            assert server.alive and server.pid != pid
            assert server.url == url and await answers(url)
            first, second = starts(log)
            assert not any(alive(pid) for pid in first["pids"])
        assert not any(alive(pid) for pid in second["pids"])


async def test_nobody_else_is_given_the_address_while_the_server_is_down(named: Named) -> None:
    with anyio.fail_after(60):
        async with Server(MODEL, log=named()) as server:
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await eventually(lambda: not server.alive)
            port = int(server.url.rpartition(":")[2])
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))


async def test_a_server_that_dies_at_its_start_is_told_with_its_last_words_and_its_log(named: Named) -> None:
    log = named("dies")
    with anyio.fail_after(60), pytest.raises(EngineError, match="there is no memory left") as told:
        async with Server(MODEL, log=log):
            pass
    assert "exited with 1" in str(told.value) and str(log) in str(told.value)
    (started,) = starts(log)
    await eventually(lambda: not any(alive(pid) for pid in started["pids"]))


@pytest.mark.parametrize("how", ["hangs", "sleeps"])
async def test_a_server_that_does_not_answer_in_time_is_ended(named: Named, how: str) -> None:
    log = named(how)
    with anyio.fail_after(60), pytest.raises(EngineError, match="did not answer within 10 s"):
        async with Server(MODEL, Options(start_s=10), log=log):
            pass
    (started,) = starts(log)
    await eventually(lambda: not any(alive(pid) for pid in started["pids"]))


async def test_whoever_waits_for_a_start_hears_of_it(named: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.engine.sglang.server.NOTE_S", 0.5)
    heard: list[str] = []
    with anyio.fail_after(60), pytest.raises(EngineError):
        async with Server(MODEL, Options(start_s=3), log=named("sleeps"), told=heard.append):
            pass
    assert len(heard) >= 2 and all("is starting" in line for line in heard)


async def test_a_killed_trainer_leaves_no_server_behind(named: Named) -> None:
    log = named()
    trainer = await anyio.open_process([sys.executable, "-c", TRAINER, str(log)], stdin=None, stderr=None, cwd=ROOT)
    assert trainer.stdout is not None
    with anyio.fail_after(60):
        await BufferedByteReceiveStream(trainer.stdout).receive_until(b"up\n", 200)
        (started,) = starts(log)
        assert all(alive(pid) for pid in started["pids"])
        trainer.kill()
        await trainer.wait()
    await trainer.aclose()
    await eventually(lambda: not any(alive(pid) for pid in started["pids"]))


async def test_a_log_that_is_gone_hides_no_failure(named: Named) -> None:
    with anyio.fail_after(60):
        async with Server(MODEL, log=(log := named())) as server:
            log.unlink()
            assert "is slow" in str(server.fault("is slow")) and "cannot be read" in str(server.fault("is slow"))


def test_a_python_that_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.NAMED, "/nowhere/python")
    with pytest.raises(EngineError, match=r"MTRL_SGLANG_PYTHON is '/nowhere/python', which cannot be run"):
        environment.python()


def test_what_that_python_is_to_find_is_named_apart_from_what_ours_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    assert "PYTHONPATH" not in environment.environment()
    monkeypatch.setenv(environment.PATH, "/theirs")
    assert environment.environment()["PYTHONPATH"] == "/theirs"


def test_the_environment_that_make_made_is_found_from_where_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(environment.NAMED, raising=False)
    monkeypatch.chdir(tmp_path)
    made = tmp_path / environment.MADE
    made.parent.mkdir(parents=True)
    stand_in(made.parent)
    assert environment.python() == made


def test_without_any_environment_one_is_told_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.NAMED, raising=False)
    monkeypatch.setattr(environment, "MADE", "nowhere/python")
    monkeypatch.setattr(environment, "find_spec", lambda _: None)
    with pytest.raises(EngineError, match=r"run `make sglang`, or set MTRL_SGLANG_PYTHON"):
        environment.python()


def test_sglang_beside_the_trainer_is_taken_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.NAMED, raising=False)
    monkeypatch.setattr(environment, "MADE", "nowhere/python")
    monkeypatch.setattr(environment, "find_spec", lambda name: name == "sglang")
    assert environment.python() == Path(sys.executable)


Named = Callable[..., Path]


def starts(log: Path) -> list[dict[str, Any]]:
    """What each stand-in said when it was started."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]


def given(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


async def answers(url: str) -> bool:
    async with httpx2.AsyncClient(trust_env=False) as http:
        return (await http.get(f"{url}/health")).is_success


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def eventually(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not holds():  # noqa: ASYNC110 (another process has no event)
            await anyio.sleep(0.02)


def test_of_what_a_server_ended_is_told_though_pages_came_after_it(tmp_path: Path) -> None:
    server = Server(MODEL, log=tmp_path / "server.log")
    trace = (
        'Traceback (most recent call last):\n  File "model.py", line 1, in run\nRuntimeError: all is lost: 12 bytes\n'
    )
    count = "nanobind: leaked 64 types!\n" + ' - leaked type "ATOMIC_OP"\n' * 30 + " - ... skipped remainder\n"
    server.log.write_text(trace + "the other process ends\n" * 3 + count + "killed\n" * 30)
    told = str(server.fault("is lost"))
    _, error, gap, *_ = told.splitlines()
    assert error == "RuntimeError: all is lost: 12 bytes" and gap == "..."
    assert "leaked" not in told and "skipped" not in told and told.endswith("killed") and len(told.splitlines()) <= 21
    server.log.write_text(trace + "killed")
    assert str(server.fault("is lost")).count("all is lost") == 1
