"""Sandboxes over several machines: the least loaded starts one, and a machine that is lost is no policy's failure."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
import psutil
import pytest
from anyio import lowlevel, to_thread
from anyio.abc import ByteStream, SocketAttribute, SocketStream
from anyio.streams.tls import TLSListener
from pydantic import ValidationError

from gateway.build import build_plan
from gateway.config.models import Limits
from gateway.errors import ConfigError, Unavailable
from gateway.gateway import Gateway
from gateway.http import endpoint
from gateway.limits import LimitedToolset
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.process.reaper import Reaper
from gateway.sandbox.cgroups import PREFIX, find_parent
from gateway.sandbox.choose_provider import choose_provider, find_provider_problem
from gateway.sandbox.grade_settings import GradeSettings
from gateway.sandbox.grader import Grader
from gateway.sandbox.provider import Sandbox, SandboxProvider, opened
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_statistics import STATISTICS
from gateway.sandbox.sandbox_toolset import SandboxToolset
from gateway.tool_table import Source
from gateway.types import Outcome, Task, ToolCall
from mtrl_plugins.sandboxes import heartbeats, machines
from mtrl_plugins.sandboxes.machines import find_machines
from tests.mcp_client.test_http_access import Certificates, relay
from tests.plugins.sandboxes.conftest import TOKEN, Served
from tests.sandbox.roots import shell
from tests.trainer.policy_scripts import make_tasks, render_calls, script_by_task
from tests.trainer.rollout_harness import BlockingTool, RolloutHarness
from tests.waiting import PATIENCE_S, wait_until
from trainer.rollout.rollout import StopReason

StartServer = Callable[..., "ServerProcess"]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    started: list[ServerProcess] = []

    def start(*options: object, **more: Any) -> ServerProcess:
        started.append(ServerProcess(tmp_path, *options, **more))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that do not answer are given up soon, and asked again soon."""
    monkeypatch.setattr(machines, "LOOK_S", 0.1)
    monkeypatch.setattr(machines, "SILENT_S", 1.0)
    monkeypatch.setattr(machines, "RETRY_S", 0.2)
    monkeypatch.setattr(machines, "MAX_RETRY_S", 0.2)


async def start_all(provider: SandboxProvider, settings: SandboxSettings, count: int) -> list[Sandbox]:
    boxes: list[Sandbox] = []

    async def start() -> None:
        boxes.append(await provider.start(settings))

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(start)
    return boxes


async def stop_all(boxes: list[Sandbox]) -> None:
    for box in boxes:
        await box.stop()


def places(boxes: list[Sandbox]) -> Counter[str]:
    """How many of the sandboxes each machine has."""
    return Counter(box.machine.name for box in boxes)  # type: ignore[attr-defined]


async def test_starts_are_dealt_by_load_and_wait_for_room_until_a_deadline(
    start_server: StartServer, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = start_server("--most", 2), start_server("--most", 4)
    settings = settings_of(small, large)
    provider, other = choose_provider(settings, reaper), choose_provider(settings, reaper)
    boxes = await start_all(provider, settings, 3)
    assert places(boxes) == {small.name: 1, large.name: 2}
    boxes += await start_all(other, settings, 3)  # Another gateway, which asks how full the machines are.
    assert places(boxes) == {small.name: 2, large.name: 4}
    assert STATISTICS.machines == places(boxes)
    monkeypatch.setattr(machines, "TURN_S", 0.5)  # Both may wait for the same machine.
    waiting: list[Sandbox] = []

    async def wait() -> None:
        waiting.extend(await start_all(provider, settings, 2))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        freed = places(boxes[:1]) + places(boxes[3:4])
        await stop_all([boxes.pop(3), boxes.pop(0)])
    assert places(waiting) == freed
    monkeypatch.setattr(machines, "QUEUE_S", 0.3)
    with pytest.raises(Unavailable, match=r"all 6 sandboxes of 2 machines are in use.*--most"):
        await provider.start(settings)
    await stop_all(boxes + waiting)
    assert not STATISTICS.machines


@asynccontextmanager
async def slow_machine(answers: Callable[[int], Awaitable[None]]) -> AsyncIterator[SandboxSettings]:
    """A machine that starts sandboxes at once, but awaits something before it says for the nth time how full it is."""
    asked = itertools.count(1)

    async def serve(stream: SocketStream) -> None:
        async with stream:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while request := await stream.receive():
                    if request.startswith(b"GET"):
                        await answers(next(asked))
                    body = b'{"running": 0, "most": 400, "id": "a", "lease_s": 600, "python": ["python3"]}'
                    await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield settings_of(f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}")
        tasks.cancel_scope.cancel()


async def test_starts_do_not_wait_for_another_that_asks_how_full_machines_are(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "LOOK_S", 0.0)
    monkeypatch.setattr(machines, "LOOK_WITHIN_S", 2 * PATIENCE_S)
    asks, may_answer = anyio.Event(), anyio.Event()

    async def answers(number: int) -> None:
        if number > 1:
            asks.set()
            await may_answer.wait()

    async with slow_machine(answers) as settings:
        provider = choose_provider(settings, reaper)
        boxes = await start_all(provider, settings, 1)

        async def start_one() -> None:
            boxes.extend(await start_all(provider, settings, 1))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start_one)
            with anyio.fail_after(PATIENCE_S):
                await asks.wait()
            boxes += await start_all(provider, settings, 3)
            may_answer.set()
        await stop_all(boxes)


async def test_starts_wait_once_for_a_machine_that_is_late_and_not_each_of_them(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "LOOK_S", 0.0)
    monkeypatch.setattr(machines, "LOOK_WITHIN_S", 0.5)
    asked: list[int] = []

    async def answers(number: int) -> None:
        asked.append(number)
        await anyio.sleep_forever()

    async with slow_machine(answers) as settings:
        provider = choose_provider(settings, reaper)
        boxes = await start_all(provider, settings, 1)
        boxes += await start_all(provider, settings, 8)
        assert len(asked) == 2
        await stop_all(boxes)


async def test_job_without_an_address_has_that_of_its_variables_and_waits_for_a_machine(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SandboxSettings.model_validate({"remote": {}})
    assert "MTRL_SANDBOXES is not set" in str(find_provider_problem(settings))
    server = start_server()
    server.kill()
    monkeypatch.setenv("MTRL_SANDBOXES", f"http://127.0.0.1:9,{server.url}")
    monkeypatch.setenv("MTRL_SANDBOX_TOKEN", TOKEN)
    assert settings.remote is not None
    with pytest.raises(ConfigError, match=r"none can be used(.|\n)*cannot be reached"):
        await to_thread.run_sync(machines.wait_for_machine, settings.remote, 0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(to_thread.run_sync, machines.wait_for_machine, settings.remote, PATIENCE_S)
        await to_thread.run_sync(server.start)
    given = settings_of("http://127.0.0.1:9").remote
    assert given is not None and given.model_copy(update={"token": None}).sent_token == "", "not for other machines"
    monkeypatch.setenv("MTRL_SANDBOXES", "boxes")
    with pytest.raises(ValidationError, match="'boxes' is no address"):
        SandboxSettings.model_validate({"remote": {}})


async def test_starts_of_all_gateways_wait_in_one_queue(
    start_server: StartServer, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "TURN_S", PATIENCE_S)
    server = start_server("--most", 1)
    settings = settings_of(server)
    gateways = {name: choose_provider(settings, reaper) for name in "ab"}
    order: list[str] = []

    async def start(name: str) -> None:
        box = await gateways[name].start(settings)
        order.append(name)
        await box.stop()

    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http:
        with anyio.fail_after(2 * PATIENCE_S):
            held = await gateways["a"].start(settings)
            async with anyio.create_task_group() as tasks:
                for number, name in enumerate("aabaa", 2):
                    tasks.start_soon(start, name)
                    while (await http.get(f"{server.url}/v1/sandboxes")).json()["running"] < number:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                await held.stop()
    assert order == [*"aabaa"]


async def test_starts_of_clients_that_go_away_hold_no_place(
    start_server: StartServer, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "QUEUE_S", 2 * PATIENCE_S)
    monkeypatch.setattr(machines, "TURN_S", 2 * PATIENCE_S)
    server = start_server("--most", 1)
    settings = settings_of(server)
    provider = choose_provider(settings, reaper)
    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http:

        async def wait_for(count: int) -> None:
            with anyio.fail_after(PATIENCE_S):
                while (await http.get(f"{server.url}/v1/sandboxes")).json()["running"] != count:  # noqa: ASYNC110
                    await anyio.sleep(0.01)

        async with opened(provider, settings):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(provider.start, settings)
                await wait_for(4)
                tasks.cancel_scope.cancel()
            await wait_for(1)
        await wait_for(0)


async def test_start_that_is_done_before_its_client_is_seen_to_be_gone_holds_no_place(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, running = server
    monkeypatch.setattr(endpoint, "GRACE_S", 2 * PATIENCE_S)  # Nobody looks meanwhile.
    running.lease_s, is_gone, ended = 10 * PATIENCE_S, threading.Event(), threading.Event()

    class Box:
        """Starts at once when its client is gone."""

        async def stop(self) -> None:
            ended.set()

    async def start(*_: object, **__: object) -> Box:
        await to_thread.run_sync(is_gone.wait)
        for _ in range(20):
            await lowlevel.checkpoint()
        return Box()

    monkeypatch.setattr(running.provider, "start", start)
    assert settings.remote is not None and settings.remote.url is not None
    host, _, port = settings.remote.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        lines = ("POST /v1/sandboxes HTTP/1.1", f"host: {host}", f"authorization: Bearer {TOKEN}",
                 "content-type: application/json", "content-length: 2", "", "{}")  # fmt: skip
        client.sendall("\r\n".join(lines).encode())
        await wait_until(lambda: running._starting == 1)
    is_gone.set()
    await wait_until(ended.is_set)
    assert not running.leases and running._count_running() == 0


async def test_machine_is_reached_over_tls_by_a_private_authority_and_keeps_its_sandboxes(
    start_server: StartServer, reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server-key.pem")
    server = start_server("--lease", 1)

    async def forward(stream: ByteStream) -> None:
        await relay(stream, await anyio.connect_tcp("127.0.0.1", server.port))

    plain = await anyio.create_tcp_listener(local_host="127.0.0.1")
    secure, port = TLSListener(plain, context, standard_compatible=False), plain.extra(SocketAttribute.local_port)
    heartbeats.make_tls.cache_clear()
    try:
        async with secure, anyio.create_task_group() as tasks:
            tasks.start_soon(secure.serve, forward)
            settings = settings_of(f"https://127.0.0.1:{port}")
            problem = await to_thread.run_sync(find_provider_problem, settings)
            assert "certificate" in str(problem).lower(), problem
            heartbeats.make_tls.cache_clear()
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
            assert await to_thread.run_sync(find_provider_problem, settings) is None
            async with opened(choose_provider(settings, reaper), settings) as box:
                assert await shell(box, "echo here > a; cat a") == "here"
                began = anyio.current_time()
                await wait_until(lambda: anyio.current_time() > began + 3)  # Without signs of life its lease is over.
                assert await shell(box, "cat a") == "here"
            tasks.cancel_scope.cancel()
    finally:
        heartbeats.make_tls.cache_clear()


async def test_start_takes_no_more_than_half_of_its_calls_time_to_wait(
    start_server: StartServer, reaper: Reaper
) -> None:
    settings = settings_of(start_server("--most", 1))
    provider = choose_provider(settings, reaper)
    async with opened(provider, settings):
        began = anyio.current_time()
        with pytest.raises(Unavailable, match="none became free within 2 s"), anyio.fail_after(4):
            await provider.start(settings)
        assert anyio.current_time() - began < 4


SHELL = {"sandbox_tools": ["shell"], "timeout_s": 40}


def make_gateway(folder: Path, settings: SandboxSettings, tool: BlockingTool) -> Gateway:
    """A gateway with the tools `shell` and `block`, with the retries that tools have by default."""
    assert settings.remote is not None
    remote = {"url": settings.remote.url, "token": settings.remote.token.get_secret_value()}
    (folder / "box.yaml").write_text(json.dumps({"tools": [SHELL | {"sandbox": {"remote": remote}}]}))
    plan = build_plan([folder / "box.yaml"], None)
    blocking = LimitedToolset(NativeToolset([FunctionTool(tool.block)]), Limits(timeout_s=PATIENCE_S))
    return Gateway([*plan.sources, Source("blocking", blocking)], services=plan.services)


async def test_rollouts_of_a_machine_that_hangs_are_played_again_on_others_and_it_is_used_again_once_it_goes_on(
    start_server: StartServer, tmp_path: Path, quick: None
) -> None:
    lost, other, tool = start_server(), start_server(), BlockingTool()
    turns = (
        render_calls(("shell", {"command": "echo mine > f"})),
        render_calls(("block", {"name": "loss"})),
        render_calls(("shell", {"command": "cat f"})),
        "done",
    )
    async with make_gateway(tmp_path, settings_of(lost, other), tool) as gateway:
        harness = RolloutHarness(script_by_task({"*": turns}), gateway)
        with anyio.fail_after(3 * PATIENCE_S):
            async with harness.make_scheduler(3).submit(make_tasks("a", "b")) as groups:
                await wait_until(lambda: tool.waiting["loss"] == 6)
                assert STATISTICS.machines[lost.name] == STATISTICS.machines[other.name] == 3
                lost.send(signal.SIGSTOP)
                tool.event("loss").set()
                finished = [group async for group in groups]
        assert STATISTICS.machines[lost.name] == STATISTICS.machines[other.name] == 0
        lost.send(signal.SIGCONT)
        with anyio.fail_after(PATIENCE_S):
            async with AsyncExitStack() as sessions:
                while not STATISTICS.machines[lost.name]:
                    session = await sessions.enter_async_context(gateway.open(Task()))
                    await session.call(ToolCall("1", "shell", '{"command": "echo"}'))
    assert [len(group.rollouts) for group in finished] == [3, 3]
    failed = [rollout for group in finished for rollout in group.failed]
    assert [rollout.stop for rollout in failed] == [StopReason.TOOL_FAILED] * 3
    assert all(rollout.reward is None for rollout in failed)
    for rollout in (rollout for group in finished for rollout in group.rollouts):
        answers = [message["content"] for message in rollout.ledger.messages if message["role"] == "tool"]
        assert answers == ["[no output]", "released", "mine"]


async def test_call_of_a_machine_that_was_lost_is_not_repeated_in_an_empty_sandbox(
    start_server: StartServer, tmp_path: Path, quick: None
) -> None:
    lost = start_server()
    async with make_gateway(tmp_path, settings_of(lost), BlockingTool()) as gateway, gateway.open(Task()) as session:

        async def call(command: str) -> Any:
            return await session.call(ToolCall("1", "shell", json.dumps({"command": command})))

        assert (await call("echo mine > f; cat f")).text == "mine"
        lost.kill()
        lost.start()
        for _ in range(2):
            result = await call("ls")
            assert result.outcome is Outcome.UNAVAILABLE and "lost with its files" in str(result.reason)
    async with make_gateway(tmp_path, settings_of(lost), BlockingTool()) as gateway, gateway.open(Task()) as session:
        assert (await call("ls")).text == "[no output]", "a machine that comes back is used again"


async def test_machines_with_a_wrong_token_or_other_settings_are_told_and_others_are_used(
    start_server: StartServer, reaper: Reaper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    strange, narrow, wide = start_server(), start_server("--most", 8), start_server("--allow-host", "pypi.org")
    strange.kill()
    strange.token_file.write_text("another-token-of-the-tests")
    strange.start()
    settings = settings_of(strange, narrow, wide, network=["pypi.org"])
    assert find_provider_problem(settings) is None, "one lost machine of many stops no run"
    assert f"of 3: {strange.url}: HTTP 401" in caplog.text
    problem = str(find_provider_problem(settings_of(strange, "http://127.0.0.1:9")))
    assert strange.name in problem and "(1 more machines fail)" in problem and "correct `token`" in problem
    provider = choose_provider(settings, reaper)
    boxes = await start_all(provider, settings, 4)
    assert places(boxes) == {wide.name: 4}, "the other one does not allow the host"
    assert f"{strange.name} gets no new sandboxes: HTTP 401" in caplog.text
    with pytest.raises(Unavailable, match=f"{narrow.name}: HTTP 422.*does not allow hosts"):
        await choose_provider(settings_of(narrow), reaper).start(settings_of(narrow, network=["pypi.org"]))
    await stop_all(boxes)


async def test_files_stay_on_their_machine_and_are_graded_there(start_server: StartServer, reaper: Reaper) -> None:
    one, two = start_server("--most", 1), start_server("--most", 1)
    settings = settings_of(one, two)
    provider = choose_provider(settings, reaper)
    grade = GradeSettings.model_validate(
        {"command": ["sh", "-c", "mkdir -p /rollout/v; cat /rollout/answer > /rollout/v/reward.txt"],
         "artifacts": ["/rollout/answer"], "reward": "/rollout/v", "timeout_s": 20}
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        box = await provider.start(settings, keeps_files=True)
        await shell(box, "echo 0.5 > answer")
        home = box.machine.name  # type: ignore[attr-defined]
        kept = await box.freeze()
        stack.push_async_callback(kept.close)
        assert (await Grader(grade, settings, provider).grade(kept)).reward == 0.5
        again = await provider.start(settings, files_of=kept)
        assert places([again]) == {home: 1} and await shell(again, "cat answer") == "0.5"
        await again.stop()
        (one if home == one.name else two).kill()
        with pytest.raises(Unavailable, match="cannot be graded"):
            await Grader(grade, settings, provider).grade(kept)
        async with opened(provider, settings):
            pass


async def test_rollout_whose_machine_is_lost_is_not_graded_as_one_that_did_nothing(
    start_server: StartServer, reaper: Reaper
) -> None:
    lost, other = start_server(), start_server()
    settings = settings_of(lost, other)
    toolset = SandboxToolset(("shell",), settings, choose_provider(settings, reaper))
    command = ["sh", "-c", "mkdir -p /rollout/v; echo 0 > /rollout/v/reward.txt"]
    grade = GradeSettings.model_validate({"command": command, "reward": "/rollout/v"})
    toolset.grader = Grader(grade, settings, toolset.provider)
    async with toolset.open(Task()) as first, toolset.open(Task()) as second:
        for session in (first, second):
            await session.call(ToolCall("1", "shell", '{"command": "echo 1 > answer"}'))
        assert STATISTICS.machines == {lost.name: 1, other.name: 1}
        lost.kill()
        graded = []
        for session in (first, second):
            for _ in range(2):
                try:
                    graded.append(await session.finish())  # type: ignore[attr-defined]
                except Unavailable as error:
                    assert "nothing is left to grade" in str(error)
    assert [grade["grade"] for grade in graded] == [0.0, 0.0], "that of the other machine, which answers twice"


async def test_name_with_several_addresses_is_as_many_machines_which_stay_while_it_cannot_be_resolved(
    start_server: StartServer, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start_server("--most", 2, host="127.0.0.2")
    second = start_server("--most", 2, host="127.0.0.3", port=first.port)
    resolve, shown, fails = socket.getaddrinfo, ["127.0.0.2"], False

    def getaddrinfo(host: Any, port: Any, *words: Any, **more: Any) -> Any:
        if host == "sandboxes.internal" and fails:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        names = shown if host == "sandboxes.internal" else [host]
        return [found for name in names for found in resolve(name, port, *words, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(machines, "RESOLVE_S", 0.0)
    settings = settings_of(f"http://sandboxes.internal:{first.port}")
    provider = choose_provider(settings, reaper)
    boxes = await start_all(provider, settings, 1)
    shown[:] = ["127.0.0.3", "127.0.0.2"]
    boxes += await start_all(provider, settings, 1)
    assert places(boxes) == {first.name: 1, second.name: 1}
    assert [await shell(box, "echo ok") for box in boxes] == ["ok", "ok"], "each stays where it began"
    fails = True
    boxes += await start_all(provider, settings, 2)
    assert places(boxes) == {first.name: 2, second.name: 2}
    await stop_all(boxes)
    fails = False
    for url, addresses, expected in (
        ("https://sandboxes.internal/a/", shown, ["https://sandboxes.internal/a/v1/sandboxes"]),
        ("http://sandboxes.internal", ["127.0.0.1", "::1"], ["http://sandboxes.internal/v1/sandboxes"]),
        ("http://sandboxes.internal", ["::1"], ["http://[::1]:80/v1/sandboxes"]),
        ("http://sandboxes.internal", [], ["http://sandboxes.internal/v1/sandboxes"]),
    ):
        shown[:] = addresses
        remote = settings_of(url).remote
        assert remote is not None and [machine.url for machine in find_machines(remote)] == expected


def count_of(processes: list[psutil.Process], folder: Path) -> dict[str, int]:
    """What the gateway and servers of sandboxes hold: nothing of it may grow."""
    groups = [group for one in processes for group in (find_parent() or folder).glob(f"{PREFIX}{one.pid}-*")]
    return {
        "descriptors": sum(one.num_fds() for one in processes),
        "children": sum(len(one.children(recursive=True)) for one in processes),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "groups": len(groups),
        "files": len([*folder.iterdir()]),
    }


async def test_starts_leave_nothing(
    start_server: StartServer, reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    servers = [start_server(), start_server()]
    settings = settings_of(*servers)
    provider = choose_provider(settings, reaper)
    processes = [psutil.Process(), *(psutil.Process(server.process.pid) for server in servers)]
    counts = []
    for count in (8, 8, 20, 20, 20):
        boxes = await start_all(provider, settings, count)
        await stop_all(boxes)
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http:
            for server in servers:
                assert (await http.get(f"{server.url}/v1/sandboxes")).json()["running"] == 0
        counts.append(count_of(processes, folder))
    assert all(counts[-1][name] <= counts[1][name] + (4 if name == "descriptors" else 0) for name in counts[0]), counts


ROOT = Path(__file__).parents[3]


class ServerProcess:
    """`mtrl-gateway sandboxes`, at an address that stays."""

    def __init__(self, folder: Path, *options: object, host: str = "127.0.0.1", port: int = 0) -> None:
        self.token_file = folder / "token.txt"
        self.token_file.write_text(TOKEN)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = port or probe.getsockname()[1]
        self.name = f"{host}:{self.port}"
        self.url = f"http://{self.name}"
        command = (sys.executable, "-m", "gateway.cli", "sandboxes", "--host", host, "--port", self.port)
        self._command = list(map(str, (*command, "--token-file", self.token_file, *options)))
        self.start()

    def start(self) -> None:
        """Starts it, again if it was killed."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("sandboxes at")

    def send(self, number: int) -> None:
        """Sends a signal; waits for the end of one that it ends."""
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.communicate(timeout=60)

    def kill(self) -> None:
        """Kills it, and what it started: its machine is gone."""
        for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.communicate(timeout=60)

    def close(self) -> None:
        """Ends it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.send(signal.SIGTERM)


def settings_of(*servers: ServerProcess | str, **more: object) -> SandboxSettings:
    """Settings that lead to these machines."""
    urls = ",".join(server if isinstance(server, str) else server.url for server in servers)
    return SandboxSettings.model_validate({"remote": {"url": urls, "token": TOKEN}, **more})
