"""Workers that ask SGLang servers themselves: the engine decides as before, and no token passes through it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute

from mtrl_plugins.workers import line_channel
from mtrl_plugins.workers.line_channel import LineChannel
from mtrl_plugins.workers.messages import Blobs
from mtrl_plugins.workers.remote_engine import Direct, EventBuffer, RemoteEngine
from mtrl_plugins.workers.worker_job import make_worker_job
from mtrl_plugins.workers.worker_link import Assignment, WorkerLink, WorkerLostError
from tests.plugins.workers.pools import make_runner, make_settings, tasks, write_tools
from tests.trainer.engine_sglang.engine_harness import opened
from tests.trainer.engine_sglang.fake_sglang import IDS, Fake, reads, weights
from tests.waiting import PATIENCE_S, wait_until
from trainer.engine.base import Generation, Sampling
from trainer.engine.sglang.direct_requests import DirectClient, is_loopback
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.setup import load_template

GREEDY = Sampling(max_tokens=6, temperature=0)
pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tools(tmp_path_factory.mktemp("direct") / "job")


@dataclass
class Joined:
    """An engine of the training process, and the same as one rollout of a worker sees it."""

    engine: SGLangEngine
    remote: RemoteEngine
    messages: list[dict[str, Any]] = field(default_factory=list)
    """All that the worker received."""

    @property
    def is_direct(self) -> bool:
        return self.remote.direct is not None and self.remote.direct.is_used

    async def generate(self, sampling: Sampling = GREEDY) -> Generation:
        return await self.remote.generate(IDS, sampling)

    async def read_messages(self, channel: LineChannel) -> None:
        while True:
            message = await channel.receive(PATIENCE_S)
            if message["t"] != "beat":
                self.messages.append(message)
            if message["t"] in ("generated", "send", "unsend"):
                self.remote.receive(message)


@asynccontextmanager
async def joined(folder: Path, *fakes: Fake, is_local: bool = True) -> AsyncIterator[Joined]:
    """A worker's engine at the other end of a connection, for one rollout."""
    settings, model = make_settings(folder), folder / "model"
    template = load_template(model, settings.template)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(opened(*fakes))
        client = await stack.enter_async_context(DirectClient())
        job = make_worker_job(settings, model, template, engine, PATIENCE_S)
        assert job.is_direct
        own, theirs = [LineChannel(stream) for stream in await connect(stack)]
        stack.push_async_callback(own.close)
        stack.push_async_callback(theirs.close)
        running = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(running.cancel_scope.cancel)
        link = WorkerLink(own, "w", engine, job, lambda: None, is_local=is_local)
        remote = RemoteEngine(theirs, 0, Blobs(theirs.send, 0), engine.capabilities, EventBuffer())
        remote.direct = Direct(client, running.start_soon)
        here = Joined(engine, remote)
        running.start_soon(link.serve, PATIENCE_S)
        running.start_soon(theirs.run_sender)
        running.start_soon(here.read_messages, theirs)
        theirs.send({"t": "ready"})
        await wait_until(lambda: link.state == "up")
        running.start_soon(play, link, folder, engine)
        await wait_until(lambda: here.messages)
        yield here


async def connect(stack: AsyncExitStack) -> tuple[Any, Any]:
    """Both ends of a connection."""
    listener = await stack.enter_async_context(await anyio.create_tcp_listener(local_host="127.0.0.1"))
    accepted: list[Any] = []

    async def accept() -> None:
        accepted.append(await listener.listeners[0].accept())

    async with anyio.create_task_group() as accepting:
        accepting.start_soon(accept)
        other = await anyio.connect_tcp("127.0.0.1", listener.extra(SocketAttribute.local_port))
    return accepted[0], other


async def play(link: WorkerLink, folder: Path, engine: SGLangEngine) -> None:
    """A rollout that does not end."""
    (task,) = tasks("safe-1")
    runner = make_runner(folder, engine)  # type: ignore[arg-type]
    with pytest.raises(WorkerLostError):
        await link.play(Assignment(runner, task, "g", 0, 0, nullcontext()))


async def test_no_token_passes_through_the_training_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, received = Fake(), list[dict[str, Any]]()
    parse = line_channel.parse_message

    def note(line: bytes) -> dict[str, Any]:
        received.append(parse(line))
        return received[-1]

    monkeypatch.setattr(line_channel, "parse_message", note)
    async with joined(folder, fake) as here:
        expected = await here.engine.generate(IDS, GREEDY, key="other")
        generation = await here.generate()
        assert here.is_direct and len(here.remote.queued_s) == 1
    assert (generation.ids, generation.finish_reason) == (expected.ids, "length")
    assert generation.logprobs == pytest.approx(expected.logprobs)
    assert fake.bodies("/generate")[-1]["input_ids"] == list(IDS)
    (*_, sent) = [message for message in received if message["t"] == "sent"]
    assert sent["ids"] == 6 and "output_ids" not in sent["content"]
    told = [message.get("ids", "plain:") for message in received if message["t"] in ("generate", "send", "generated")]
    assert len(told) >= 3 and {*told} == {"plain:"}  # Empty.


async def test_server_that_only_the_training_process_reaches_is_asked_by_it(folder: Path) -> None:
    async with joined(folder, Fake(), is_local=False) as here:  # The fake is on the loopback interface.
        expected = await here.engine.generate(IDS, GREEDY, key="other")
        for _ in range(2):
            assert (await here.generate()).ids == expected.ids and not here.is_direct
        assert "send" not in [message["t"] for message in here.messages]


async def test_turn_moves_to_another_server_when_one_fails(folder: Path) -> None:
    fakes = Fake(), Fake()
    async with joined(folder, *fakes) as here:
        expected = (await here.generate()).ids
        first = next(
            fake for fake in fakes if any(body.get("rid", "").startswith("g/") for body in fake.bodies("/generate"))
        )
        first.break_down()
        assert (await here.generate()).ids == expected
        assert here.engine.counters["servers_lost"] == 1 and here.is_direct
        first.start_anew()


async def test_aborted_turn_returns_the_part_that_it_has(folder: Path) -> None:
    fake = Fake()
    async with joined(folder, fake) as here:
        await here.generate()
        fake.hold_at = 3
        parts: list[Generation] = []

        async def run() -> None:
            parts.append(await here.generate())

        async with anyio.create_task_group() as running:
            running.start_soon(run)
            await wait_until(lambda: fake.writing)
            await here.engine.abort()
    assert parts[0].finish_reason == "abort" and len(parts[0].ids) == len(parts[0].logprobs) == 3


async def test_cancelled_turn_ends_its_request_at_the_server(folder: Path) -> None:
    fake = Fake()
    async with joined(folder, fake) as here:
        await here.generate()
        fake.hold_at = 3
        async with anyio.create_task_group() as running:
            running.start_soon(here.generate)
            await wait_until(lambda: fake.writing)
            running.cancel_scope.cancel()
        await wait_until(lambda: fake.aborted)
        await wait_until(lambda: "unsend" in [message["t"] for message in here.messages])


async def test_banned_ids_are_never_sampled(folder: Path) -> None:
    barred = tuple(range(0, 40, 2))
    async with joined(folder, Fake()) as here:
        written = await here.generate(Sampling(max_tokens=20, banned_ids=barred))
        assert len(here.remote.queued_s) == 1
    assert len(written.ids) == 20 and not {*written.ids} & {*barred}
    assert written.logprobs == pytest.approx(reads(weights(0))((IDS[-1], *written.ids)), abs=1e-6)


def test_loopback_addresses_are_known() -> None:
    urls = ("http://127.0.0.1:1/x", "http://localhost:1", "http://[::1]:1", "http://10.0.0.1:1", "http://host:1")
    assert [is_loopback(url) for url in urls] == [True, True, True, False, False]
