"""The engine behind `sglang-router`: weights go to every server, requests go through the router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any

import anyio
import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.trainer.engine_sglang.engine_harness import hosting, serving
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, Fake, reads, weights
from trainer.engine.base import EngineError, Sampling
from trainer.engine.sglang import sglang_engine as engines
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.sglang.weight_sync.verify import TrainerReference


class Turns:
    """A router that gives each server one request after the other, and refuses whatever else it is asked."""

    def __init__(self, *urls: str, **more: Any) -> None:
        self.urls, self.more, self.turn = urls, more, cycle(urls)
        self.asked = 0

    def app(self) -> Starlette:
        routes = [Route("/workers", self.workers), Route("/health", lambda _: Response("OK"))]
        return Starlette(routes=[*routes, Route("/generate", self.generate, methods=["POST"])])

    def workers(self, _: Request) -> Response:
        return JSONResponse({"workers": [{"url": url, "worker_type": "regular"} | self.more for url in self.urls]})

    async def generate(self, request: Request) -> Response:
        self.asked += 1
        async with httpx2.AsyncClient(trust_env=False, timeout=30) as http:
            answer = await http.post(f"{next(self.turn)}/generate", content=await request.body())
        return Response(answer.content, answer.status_code, media_type="application/json")


@asynccontextmanager
async def routed(*fakes: Fake) -> AsyncIterator[tuple[SGLangEngine, Turns]]:
    async with serving(*fakes) as urls:
        router = Turns(*urls)
        async with (
            hosting(router.app()) as url,
            SGLangEngine([url], TensorSync(), reference=TrainerReference(reads(weights(1)))) as engine,
        ):
            with anyio.fail_after(60):
                await engine.publish(weights(1), 1)
                yield engine, router


async def test_router_publishes_to_and_verifies_every_server() -> None:
    fakes = [Fake(), Fake()]
    async with routed(*fakes) as (engine, router):
        assert engine.capabilities.name == "sglang 0.5.23 x 2 behind a router" and engine.capabilities.is_exact
        written = [await engine.generate(IDS, Sampling(max_tokens=3), key=str(place)) for place in range(4)]
    assert all(fake.version == "1" and fake.weights[NAME].equal(weights(1)[NAME]) for fake in fakes)
    assert all(one.version == 1 and len(one.ids) == 3 for one in written) and router.asked == 4


async def test_restarted_server_gets_the_weights_before_it_generates() -> None:
    fakes = [Fake(), Fake()]
    async with routed(*fakes) as (engine, _):
        fakes[1].start_anew()
        written = [await engine.generate(IDS, Sampling(max_tokens=3), key=str(place)) for place in range(4)]
        assert all(replica.up for replica in engine.replicas)
    assert {one.version for one in written} == {1}
    assert fakes[1].version == "1" and fakes[1].weights[NAME].equal(weights(1)[NAME])


async def test_turns_of_a_lost_server_are_requested_from_the_router_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ROUTER_SETTLE_S", 0.1)
    fakes = [Fake(), Fake()]
    async with routed(*fakes) as (engine, router):
        fakes[0].break_down()
        router.turn = cycle([router.urls[0], router.urls[1], router.urls[1]])
        written = [await engine.generate(IDS, Sampling(max_tokens=3), key=str(place)) for place in range(2)]
    assert [one.version for one in written] == [1, 1]


@pytest.mark.parametrize(
    ("urls", "more", "problem"),
    [
        ((), {}, "has no servers: start it with --worker-urls"),
        (("grpc://a:1",), {}, "served over gRPC, not HTTP"),
        (("http://a:1",), {"worker_type": "prefill"}, "only does prefill, and mixes .* use servers that do both"),
        (("http://a:1@0",), {}, "is a part of a server"),
    ],
)
async def test_unusable_router_is_reported_with_a_remedy(
    urls: tuple[str, ...], more: dict[str, str], problem: str
) -> None:
    async with hosting(Turns(*urls, **more).app()) as url:
        with pytest.raises(EngineError, match=problem):
            async with SGLangEngine([url], TensorSync()):
                pass
