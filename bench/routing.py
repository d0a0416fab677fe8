"""Where requests go, on two real SGLang servers: how much of what could be cached is, by three ways of choosing.

python bench/routing.py            # starts both (`make sglang` first); writes bench/results/routing.json
python bench/routing.py --small    # whether it still runs; nothing is written without --out

Rollouts as a step of training has them: groups of siblings that share an opening, each of several turns that a tool
answers after a while. `ours` keeps rollouts and groups where their ids are; `in turn` gives each server one request
after the other; `router` is sglang-router with its cache-aware policy.
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

from trainer.demo.facts.model import build  # noqa: E402
from trainer.engine.base import EngineError, Sampling  # noqa: E402
from trainer.engine.sglang.engine import SGLangEngine  # noqa: E402
from trainer.engine.sglang.environment import environment, python  # noqa: E402
from trainer.engine.sglang.launch import TESTED  # noqa: E402
from trainer.engine.sglang.publish.tensors import ByTensors  # noqa: E402
from trainer.engine.sglang.router import behind  # noqa: E402
from trainer.engine.sglang.routes import Routes  # noqa: E402
from trainer.engine.sglang.server import Options, Server  # noqa: E402
from trainer.engine.sglang.wire import Wire  # noqa: E402

RESULTS = ROOT / "bench" / "results"
ROUTER = ROOT / "tests" / "sglang" / "router.py"
OPTIONS = Options(context=512, tokens=32768, device="cpu")
EOS = 1
TOOL_S = 0.05
"""At the most, for a tool to answer."""
JOIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Size:
    groups: int = 24
    siblings: int = 8
    turns: int = 4
    opening: int = 160
    written: int = 12
    answered: int = 40
    """Ids that a tool's answer has."""


SMALL = Size(groups=4, siblings=4, turns=3)


@dataclass(frozen=True, slots=True)
class Found:
    asked: int
    possible: int
    """Of these ids, how many an engine of one server would have had at hand: all that the rollout or a sibling was
    asked to continue before, but for the last of them."""
    cached: int
    share: float
    """Cached of possible."""
    wall_s: float
    moved: int
    """Requests that went elsewhere than the one before, because a server was crowded."""
    lost: int
    """Because it was lost: where there are any, the machine was too busy for this to be measured on."""
    busier: float | None
    """Of all requests, the share that the busier server had; a router does not say."""


class InTurn(Routes):
    """Each server has one request after the other, whoever it is of."""

    def choose(self, key: str, group: str, loads: Sequence[int], up: Sequence[int]) -> int:
        self.chosen[super().choose(key, group, loads, up)] -= 1
        chosen = up[self.counts.total() % len(up)]
        self.chosen[chosen] += 1
        return chosen


async def measured(engine: SGLangEngine, size: Size, seed: int = 0) -> Found:
    told: list[tuple[int, int, int]] = []
    draw = random.Random(seed)
    openings = [[draw.randrange(40, 400) for _ in range(size.opening)] for _ in range(size.groups)]
    begun: set[int] = set()

    async def play(group: int, index: int) -> None:
        ids, known = list(openings[group]), 0
        for turn in range(size.turns):
            possible = known if turn else (size.opening - 1) * (group in begun)
            begun.add(group)
            sampling = Sampling(max_tokens=size.written, barred=(EOS,))
            written = await engine.generate(ids, sampling, key=f"{seed}-{group}/t/{index}", group=f"{seed}-{group}")
            told.append((len(ids), max(possible, written.cached), written.cached))
            known = len(ids) + len(written.ids) - 1
            ids += [*written.ids, *(draw.randrange(40, 400) for _ in range(size.answered))]
            await anyio.sleep(TOOL_S * draw.random())

    began, before = time.perf_counter(), engine.routes.counts.copy()
    async with anyio.create_task_group() as tasks:
        for group in range(size.groups):
            for index in range(size.siblings):
                tasks.start_soon(play, group, index)
    asked, possible, cached = (sum(each) for each in zip(*told, strict=True))
    counts, chosen = engine.routes.counts - before, engine.routes.chosen
    return Found(
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
async def router(urls: Sequence[str], log: Path) -> AsyncIterator[str]:
    """sglang-router before these servers, once it knows them."""
    number = _free()
    words = ["--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(number), "--policy", "cache_aware"]
    command = [str(python()), "-P", str(ROUTER), *words, "--log-level", "warn", "--prometheus-port", str(_free())]
    with log.open("wb") as out:
        process = await anyio.open_process(command, stdin=None, stdout=out, stderr=out, env=environment())
    try:
        with anyio.fail_after(JOIN_S):
            while not await _knows(f"http://127.0.0.1:{number}", len(urls)):
                if process.returncode is not None:
                    raise RuntimeError(f"the router ended with {process.returncode}; its log is {log}")
                await anyio.sleep(0.2)
        yield f"http://127.0.0.1:{number}"
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await process.wait()


async def _knows(url: str, servers: int) -> bool:
    async with Wire(url) as wire:
        try:
            return len(await behind(wire)) == servers
        except EngineError:
            return False


async def compared(urls: Sequence[str], front: str, size: Size) -> dict[str, Found]:
    """`front` is the address of a router before these servers. Each way finds an empty cache."""
    found: dict[str, Found] = {}
    ways = (("ours", urls, Routes), ("in turn", urls, InTurn), ("router", [front], Routes))
    for name, at, routes in (*ways, ("one server", urls[:1], Routes)):
        async with SGLangEngine(at, ByTensors()) as engine:
            engine.routes = routes()
            found[name] = await measured(engine, size)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--small", action="store_true")
    options.add_argument("--out", type=Path, metavar="DIR", help="where the results go; of a full run, bench/results")
    asked = options.parse_args()
    size, load = SMALL if asked.small else Size(), os.getloadavg()[0]
    with TemporaryDirectory() as folder:
        found = anyio.run(_served, size, Path(folder))
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}; load {load:.1f} before the run",
        "versions": f"Python {platform.python_version()}, SGLang {TESTED[0]} on CPU, sglang-router 0.3.2",
    }
    whole = {"about": about, "size": asdict(size), "found": {name: asdict(one) for name, one in found.items()}}
    print(json.dumps(whole, indent=1))
    out = asked.out or (None if asked.small else RESULTS)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "routing.json").write_text(json.dumps(whole, indent=1) + "\n")


async def _served(size: Size, folder: Path) -> dict[str, Found]:
    model = build(folder / "model")
    async with AsyncExitStack() as stack:
        servers = [Server(model, OPTIONS, log=folder / f"sglang-{place}.log", told=_told) for place in range(2)]
        urls = [(await stack.enter_async_context(server)).url for server in servers]
        front = await stack.enter_async_context(router(urls, folder / "router.log"))
        return await compared(urls, front, size)


def _told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _free() -> int:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        return int(port.getsockname()[1])


if __name__ == "__main__":
    main()
