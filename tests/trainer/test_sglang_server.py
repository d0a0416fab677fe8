"""The launcher of SGLang without CUDA, the options of its servers, and their processes with a stand-in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
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
from trainer import engines
from trainer.engine.base import EngineError
from trainer.engine.sglang import launch, server_process
from trainer.engine.sglang.server_process import LAUNCH, ServerOptions, ServerProcess
from trainer.engine.sglang.weight_sync.verify import NO_REFERENCE
from trainer.rollout.settings import BaseRolloutSettings, ServingSettings

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


SERVER = '''
import json, multiprocessing, os, sys

def seen():
    """What a process of SGLang's finds."""
    import sgl_kernel, torch
    from sgl_kernel import assign_req_to_token_pool_cpu

    try:
        assign_req_to_token_pool_cpu(1, of=2)
    except NotImplementedError as error:
        seen = str(error)
    names = ("SGLANG_USE_CPU_ENGINE", "SGLANG_ROPE_CACHE_FP32", "OMP_NUM_THREADS")
    pinned = torch.cuda.cudart().cudaHostRegister(0, 1, 0)
    return seen, str(torch.ops.torchvision.nms), [os.environ.get(name) for name in names], pinned

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with multiprocessing.Pool(1) as pool:
        from sglang.launch_server import seen
        print(json.dumps({"words": sys.argv, "first": seen(), "spawned": pool.apply(seen)}))
'''


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An SGLang that only looks around, for `launch.py` to start."""
    seen = tmp_path / f"sglang-{launch.TESTED[0]}.dist-info" / "METADATA"
    seen.parent.mkdir()
    seen.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {launch.TESTED[0]}\n", encoding="utf-8")
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER, encoding="utf-8")
    return tmp_path


def test_sglang_processes_find_the_kernel_stand_in_and_user_options_come_last(installed: Path) -> None:
    seen = launched(installed, "--device", "cpu", "--dtype", "bfloat16")
    words = seen["words"]
    assert words[-4:] == ["--device", "cpu", "--dtype", "bfloat16"]
    assert words.index("float32") < words.index("bfloat16")
    assert words[words.index("--attention-backend") + 1] == "torch_native"
    assert seen["first"] == seen["spawned"]
    refused, operator, environment, pinned = seen["first"]
    assert "assign_req_to_token_pool_cpu" in refused
    assert operator == "torchvision.nms"
    assert environment == ["1", "1", "1"] and pinned == 0


def test_untested_release_is_refused_without_cuda() -> None:
    with pytest.raises(SystemExit, match=r"SGLang 0.5.22 was not tested without CUDA; tested: 0.5.23"):
        launch.check("0.5.22")
    for version in launch.TESTED:
        launch.check(version)


def test_requested_device_is_used() -> None:
    for words, expected in ("--device cpu", True), ("--model-path m --device=cpu", True), ("--device=cuda -p 1", False):
        assert launch.on_cpu(words.split()) is expected


def test_options_of_an_offline_bundle_come_before_those_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "launch_options.txt").write_text("--attention-backend triton")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(launch.runpy, "run_module", lambda *_, **__: None)
    launch.main(["--device", "cuda", "--attention-backend", "fa3"])
    assert sys.argv[1:] == ["--attention-backend", "triton", "--device", "cuda", "--attention-backend", "fa3"]


@pytest.mark.parametrize(
    ("words", "cores", "bound"),
    [
        (["--tp", "2"], {0, 1, 2, 3}, "0,1|2,3"),
        (["--tensor-parallel-size=2", "--pp", "2"], {4, 6}, "4|6|4|6"),
        (["--tp", "1"], {0, 1}, None),
        (["--model-path", "m"], {0, 1}, None),
    ],
)
def test_processes_of_a_server_on_the_cpu_share_its_cores(
    words: list[str], cores: set[int], bound: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    assert launch.bind_cores(words).get("SGLANG_CPU_OMP_THREADS_BIND") == bound


def served(model: Path, *options: str, replicas: int = 2, trainer_gpus: int = 0) -> list[tuple[str, ...]]:
    """The GPU flags of each server that would be started."""
    serving = engines.leave_gpus(ServingSettings(replicas=replicas, options=options), trainer_gpus)
    settings = BaseRolloutSettings(engine="sglang", serving=serving)
    engine: Any = engines._make_sglang_engine(settings, model, Path("logs"), NO_REFERENCE, print)
    return [server.options.extra[len(serving.options) :] for server in engine._servers]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ((), ["0", "1"]),
        (("--tp", "2"), ["0", "2"]),
        (("--tp-size=2", "--pp-size", "2"), ["0", "4"]),
        (("--base-gpu-id", "4", "--tensor-parallel-size", "2"), ["4", "6"]),
    ],
)
def test_each_server_gets_its_own_gpus(
    options: tuple[str, ...], first: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert served(tmp_path, *options) == [("--base-gpu-id", gpu) for gpu in first]
    assert served(tmp_path, *options, replicas=1) == [()]
    assert served(tmp_path, "--device", "cpu", *options) == [(), ()]


def launched(packages: Path, *words: str, **variables: str) -> dict[str, Any]:
    """As a server starts it, in another Python than ours but for its torch."""
    names = {*launch.ENVIRONMENT, "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-P", launch.__file__, *words],
        env=environment | {"PYTHONPATH": str(packages)} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
