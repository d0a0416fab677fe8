"""Prefix-cache hits on two SGLang servers with three kinds of routing: ours, round-robin, and sglang-router.

python bench/routing.py            # starts both (`make sglang` first); writes bench/results/routing.json
python bench/routing.py --small    # smoke test; writes nothing without --out

The rollouts are those of a training step: groups of siblings that share a prompt, several turns each, with a tool's
reply after a while. `ours` keeps rollouts and groups on the server that has their ids; `in turn` gives each server one
request after the other; `router` is sglang-router with its cache-aware policy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402

from mtrl_plugins.demo.facts.facts_demo import build_model  # noqa: E402
from trainer.engine.base import EngineError, Sampling  # noqa: E402
from trainer.engine.sglang.http_client import SGLangClient  # noqa: E402
from trainer.engine.sglang.launch import TESTED  # noqa: E402
from trainer.engine.sglang.routing import Routing, router_backends  # noqa: E402
from trainer.engine.sglang.server_process import ServerOptions, ServerProcess, find_python, server_environment  # noqa: E402  # noqa: E402
from trainer.engine.sglang.sglang_engine import SGLangEngine  # noqa: E402
from trainer.engine.sglang.weight_sync.tensors import TensorSync  # noqa: E402

RESULTS = ROOT / "bench" / "results"
ROUTER = ROOT / "tests" / "sglang" / "router.py"
OPTIONS = ServerOptions(context=512, cache_tokens=32768, device="cpu")
EOS = 1
MAX_TOOL_S = 0.05
"""The longest time a tool takes."""
ROUTER_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured; lengths are in ids."""

    groups: int = 24
    siblings: int = 8
    turns: int = 4
    opening: int = 160
    written: int = 12
    answered: int = 40
    """Ids of a tool's reply."""


SMALL = Size(groups=4, siblings=4, turns=3)


@dataclass(frozen=True, slots=True)
class RoutingResult:
    """One kind of routing; ids and requests of all rollouts."""

    asked: int
    """Prompt ids of all requests."""
    possible: int
    """Prompt ids that a single server would have cached: ids of an earlier request of the rollout or a sibling, but for
    the last of them."""
    cached: int
    share: float
    """Cached of possible."""
    wall_s: float
    moved: int
    """Requests that went to another server than the one before, because that one was overloaded."""
    lost: int
    """Requests moved because a server was lost; more than none means that the machine was too busy to measure."""
    busier: float | None
    """The busier server's share of the requests; unknown for a router."""


class RoundRobin(Routing):
    """Gives each server one request after the other."""

    def choose(self, key: str, group: str, loads: Sequence[int], up: Sequence[int]) -> int:
        self.chosen[super().choose(key, group, loads, up)] -= 1
        chosen = up[self.counts.total() % len(up)]
        self.chosen[chosen] += 1
        return chosen


async def measure(engine: SGLangEngine, size: Size, seed: int = 0) -> RoutingResult:
    """Runs all rollouts on an engine."""
    requests: list[tuple[int, int, int]] = []
    rng = random.Random(seed)
    openings = [[rng.randrange(40, 400) for _ in range(size.opening)] for _ in range(size.groups)]
    started_groups: set[int] = set()

    async def run_rollout(group: int, index: int) -> None:
        ids, known = list(openings[group]), 0
        for turn in range(size.turns):
            possible = known if turn else (size.opening - 1) * (group in started_groups)
            started_groups.add(group)
            sampling = Sampling(max_tokens=size.written, banned_ids=(EOS,))
            generation = await engine.generate(ids, sampling, key=f"{seed}-{group}/t/{index}", group=f"{seed}-{group}")
            requests.append((len(ids), max(possible, generation.cached_tokens), generation.cached_tokens))
            known = len(ids) + len(generation.ids) - 1
            ids += [*generation.ids, *(rng.randrange(40, 400) for _ in range(size.answered))]
            await anyio.sleep(MAX_TOOL_S * rng.random())

    began, before = time.perf_counter(), engine.routing.counts.copy()
    async with anyio.create_task_group() as tasks:
        for group in range(size.groups):
            for index in range(size.siblings):
                tasks.start_soon(run_rollout, group, index)
    asked, possible, cached = (sum(column) for column in zip(*requests, strict=True))
    counts, chosen = engine.routing.counts - before, engine.routing.chosen
    return RoutingResult(
        asked=asked,
        possible=possible,
        cached=cached,
        share=round(cached / possible, 4),
        wall_s=round(time.perf_counter() - began, 2),
        moved=counts["crowded"],
        lost=counts["lost"],
        busier=None if engine.router else round(max(chosen.values()) / chosen.total(), 3),
    )


@asynccontextmanager
async def start_router(urls: Sequence[str], log: Path) -> AsyncIterator[str]:
    """Starts sglang-router in front of servers, and waits until it knows them."""
    port = _find_free_port()
    options = ["--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    options += ["--log-level", "warn", "--prometheus-port", str(_find_free_port())]
    command = [str(find_python()), "-P", str(ROUTER), *options]
    with log.open("wb") as out:
        process = await anyio.open_process(command, stdin=None, stdout=out, stderr=out, env=server_environment())
    try:
        with anyio.fail_after(ROUTER_START_S):
            while not await _knows_servers(f"http://127.0.0.1:{port}", len(urls)):
                if process.returncode is not None:
                    raise RuntimeError(f"the router ended with {process.returncode}; its log is {log}")
                await anyio.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await process.wait()


async def _knows_servers(url: str, count: int) -> bool:
    async with SGLangClient(url) as client:
        try:
            return len(await router_backends(client)) == count
        except EngineError:
            return False


async def compare(urls: Sequence[str], router_url: str, size: Size) -> dict[str, RoutingResult]:
    """Measures each kind of routing with an empty cache; `router_url` is a router in front of the same servers."""
    results: dict[str, RoutingResult] = {}
    kinds = (("ours", urls, Routing), ("in turn", urls, RoundRobin), ("router", [router_url], Routing))
    for name, addresses, routing in (*kinds, ("one server", urls[:1], Routing)):
        async with SGLangEngine(addresses, TensorSync()) as engine:
            engine.routing = routing()
            results[name] = await measure(engine, size)
    return results


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--small", action="store_true")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    args = options.parse_args()
    size, load = SMALL if args.small else Size(), os.getloadavg()[0]
    with TemporaryDirectory() as folder:
        results = anyio.run(_start_and_compare, size, Path(folder))
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}; load {load:.1f} before the run",
        "versions": f"Python {platform.python_version()}, SGLang {TESTED[0]} on CPU, sglang-router 0.3.2",
    }
    found = {name: asdict(result) for name, result in results.items()}
    content = {"about": about, "size": asdict(size), "found": found}
    print(json.dumps(content, indent=1))
    out = args.out or (None if args.small else RESULTS)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "routing.json").write_text(json.dumps(content, indent=1) + "\n")


async def _start_and_compare(size: Size, folder: Path) -> dict[str, RoutingResult]:
    model = build_model(folder / "model")
    logs = [folder / f"sglang-{index}.log" for index in range(2)]
    async with AsyncExitStack() as stack:
        servers = [ServerProcess(model, OPTIONS, log=log, notify=_log) for log in logs]
        urls = [(await stack.enter_async_context(server)).url for server in servers]
        router_url = await stack.enter_async_context(start_router(urls, folder / "router.log"))
        return await compare(urls, router_url, size)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _find_free_port() -> int:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        return int(port.getsockname()[1])


if __name__ == "__main__":
    main()
