"""Server processes: start, health, restart and end, with a stand-in for SGLang."""

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
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from mtrl_plugins.workers.line_channel import TOKEN_VARIABLE
from tests.trainer.sglang_stand_in import stand_in
from tests.waiting import PATIENCE_S, is_alive, wait_until
from trainer.engine.base import EngineError
from trainer.engine.sglang import server_process
from trainer.engine.sglang.server_process import LAUNCH, ServerOptions, ServerProcess

ROOT = Path(__file__).parents[2]
MODEL = Path("models/a")
TRAINER = """
import sys, anyio
from pathlib import Path
from trainer.engine.sglang.server_process import ServerProcess

async def main():
    async with ServerProcess(Path("models/a"), log=Path(sys.argv[1])):
        print("up", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes an interpreter that behaves so, and names it; returns where its log is to be."""

    def name(behaviour: str = "healthy") -> Path:
        monkeypatch.setenv(server_process.PYTHON_VARIABLE, str(stand_in(tmp_path, behaviour)))
        return tmp_path / "logs" / "server.log"

    return name


async def test_server_is_healthy_inside_the_block_and_gone_with_its_children_after(named: Named) -> None:
    log, heard = named(), []
    with anyio.fail_after(60):
        async with ServerProcess(MODEL, ServerOptions(context=512), log=log, notify=heard.append) as server:
            assert await answers(server.url)
            assert server.alive
            (started,) = starts(log)
            assert server.pid == started["pids"][0]
            assert all(is_alive(pid) for pid in started["pids"])
        assert not any(is_alive(pid) for pid in started["pids"])
    assert not server.alive
    assert server.url in heard[-1] and str(log) in heard[-1]


async def test_server_gets_sglangs_options_and_a_clean_environment(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    monkeypatch.setenv("VIRTUAL_ENV", "ours")
    options = ServerOptions(context=512, cache_tokens=4096, max_running=8, device="cpu", extra=("--random-seed", "3"))
    with anyio.fail_after(60):
        async with ServerProcess(MODEL, options, log=(log := named())) as server:
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


async def test_killed_restart_is_repeated(named: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[EngineError] = []

    async def start() -> None:
        if not failed:
            failed.append(server.error("did not start"))
            raise failed[0]
        await whole()

    with anyio.fail_after(60):
        async with ServerProcess(MODEL, log=named()) as server:
            whole = server._start
            monkeypatch.setattr(server, "_start", start)
            await server.restart()
            assert server.alive and failed


async def test_address_is_reserved_while_the_server_is_down(named: Named) -> None:
    with anyio.fail_after(60):
        async with ServerProcess(MODEL, log=named()) as server:
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await wait_until(lambda: not server.alive)
            port = int(server.url.rpartition(":")[2])
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))


async def test_server_that_dies_at_start_is_reported_with_its_log_tail(named: Named) -> None:
    log = named("dies")
    with anyio.fail_after(60), pytest.raises(EngineError, match="there is no memory left") as told:
        async with ServerProcess(MODEL, log=log):
            pass
    assert "exited with 1" in str(told.value) and str(log) in str(told.value)
    (started,) = starts(log)
    await wait_until(lambda: not any(is_alive(pid) for pid in started["pids"]))


async def test_server_that_does_not_answer_in_time_is_ended(named: Named) -> None:
    log = named("hangs")
    with anyio.fail_after(60), pytest.raises(EngineError, match="did not answer within 5 s"):
        async with ServerProcess(MODEL, ServerOptions(start_s=5), log=log):
            pass
    (started,) = starts(log)
    await wait_until(lambda: not any(is_alive(pid) for pid in started["pids"]))


async def test_killed_trainer_leaves_no_server(named: Named) -> None:
    log = named()
    trainer = await anyio.open_process([sys.executable, "-c", TRAINER, str(log)], stdin=None, stderr=None, cwd=ROOT)
    assert trainer.stdout is not None
    with anyio.fail_after(60):
        await BufferedByteReceiveStream(trainer.stdout).receive_until(b"up\n", 200)
        (started,) = starts(log)
        assert all(is_alive(pid) for pid in started["pids"])
        trainer.kill()
        await trainer.wait()
    await trainer.aclose()
    await wait_until(lambda: not any(is_alive(pid) for pid in started["pids"]))


def test_servers_do_not_get_the_token_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert "secret" not in server_process.server_environment().values()


Named = Callable[..., Path]


def starts(log: Path) -> list[dict[str, Any]]:
    """What each stand-in said when it was started."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]


def given(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


async def answers(url: str) -> bool:
    async with httpx2.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        return (await http.get(f"{url}/health")).is_success
