"""Measures the endpoint for agents: CPU per turn beyond the engine, 1,000 sessions at once, the first streamed byte.

    .venv/bin/python bench/agents.py [--small] [--out FOLDER]

A scripted policy answers, so that everything that is measured is the endpoint's. The client is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.types import Image
from mtrl_plugins.agents.agent_host import AgentHost
from mtrl_plugins.agents.agent_runner import AgentRunner
from mtrl_plugins.agents.agent_session import AgentSession, RolloutIdentity
from mtrl_plugins.agents.settings import AgentSettings
from tests.plugins.agents.agent_harness import TEMPLATE, call_text
from tests.trainer.policy_scripts import encode_turns, make_gateway
from trainer.engine.base import Generation, OnIds, Sampling
from trainer.engine.scripted import ScriptedEngine
from trainer.rollout.settings import RolloutLimits

CLIENT = Path(__file__).parent / "servers" / "agent_client.py"
RESULTS = Path(__file__).parent / "results"
CALL = encode_turns(TEMPLATE, "I look further. " * 8 + call_text("look", '{"page":1,   "word": "gnu"}'))[0]
TIMEOUT_S = 900


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    turns: int = 200
    prompt_bytes: int = 40_000
    sessions: int = 1000
    session_turns: int = 5
    streams: int = 200


SMALL = Sizes(turns=20, prompt_bytes=4000, sessions=20, session_turns=2, streams=10)


@dataclass
class MeteredEngine:
    """A scripted engine that notes when it was asked, what it took, and when it gave its first id."""

    inner: ScriptedEngine
    barrier: int = 0
    """Answers wait until so many requests are under way."""
    asked: list[tuple[float, float]] = field(default_factory=list)
    """The process's CPU time at the beginning and the end of each request."""
    first_ids: list[float] = field(default_factory=list)
    most: int = 0
    _waiting: int = 0
    _all_here: anyio.Event = field(default_factory=anyio.Event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: str = "",
        group: str = "",
        images: Sequence[Image] = (),
        on_ids: OnIds | None = None,
    ) -> Generation:
        began = time.process_time()
        if self.barrier:
            await self._wait_for_all()
        sampled = CALL[: sampling.max_tokens]
        if on_ids:
            for index, token in enumerate(sampled):
                if index == 0:
                    self.first_ids.append(time.perf_counter())
                on_ids((token,))
                await anyio.sleep(0.001 if index < 20 else 0)
        self.asked.append((began, time.process_time()))
        return Generation(sampled, (-0.5,) * len(sampled), "stop", 0, 0)

    async def _wait_for_all(self) -> None:
        self._waiting += 1
        self.most = max(self.most, self._waiting)
        if self._waiting == self.barrier:
            self.barrier = 0
            self._all_here.set()
        await self._all_here.wait()


@asynccontextmanager
async def serve(count: int, barrier: int = 0) -> AsyncIterator[tuple[MeteredEngine, list[AgentSession], str]]:
    """The endpoint with so many open sessions."""
    engine = MeteredEngine(ScriptedEngine(lambda ids, sampling, key: CALL), barrier)
    limits = RolloutLimits(assistant_turns=10_000, rollout_tokens=10_000_000, turn_tokens=2000, timeout_s=TIMEOUT_S)
    async with make_gateway() as gateway, AgentHost(AgentSettings(external=True)) as host, AsyncExitStack() as stack:
        runner = AgentRunner(engine, TEMPLATE, gateway, limits, host=host)
        sessions = [AgentSession(runner, host.settings, RolloutIdentity(f"r{index}")) for index in range(count)]
        for session in sessions:
            stack.enter_context(host.open(session))
        yield engine, sessions, host.endpoint.url


async def play(sessions: Sequence[AgentSession], url: str, **order: Any) -> dict[str, Any]:
    """What a client says that plays these sessions at once."""
    keys = [(f"{url}/sessions/{session.id}/v1/chat/completions", session.api_key) for session in sessions]
    text = json.dumps({"sessions": keys, **order}).encode()
    process = await anyio.run_process([sys.executable, str(CLIENT)], input=text, stderr=None)
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


async def measure_turns(turns: int, prompt_bytes: int) -> dict[str, Any]:
    """CPU per turn of one long chat, by turn."""
    async with serve(1) as (engine, sessions, url):
        await play(sessions, url, turns=turns, prompt_bytes=prompt_bytes)
        (ledger,) = sessions[0].tree.ledgers()
        ends, starts = [end for _, end in engine.asked], [start for start, _ in engine.asked[1:]]
        cpu_ms = [1000 * (start - end) for end, start in zip(ends, starts, strict=False)]
    return {
        "turns": turns,
        "prompt_bytes": prompt_bytes,
        "tokens": len(ledger.ids),
        "one_ledger": len(ledger.turns) == turns,
        "cpu_ms": median(cpu_ms),
        "cpu_ms_at": {
            str(at): median(cpu_ms[max(0, at - 10) : at + 5]) for at in (10, 50, 100, 150, 195) if at < turns
        },
    }


async def measure_sessions(count: int, turns: int) -> dict[str, Any]:
    """Many sessions whose first requests are all under way at once."""
    async with serve(count, barrier=count) as (engine, sessions, url):
        cpu_s, began = time.process_time(), time.perf_counter()
        answers = await play(sessions, url, turns=turns, prompt_bytes=1000)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began
        whole = sum(len(session.tree.ledgers()[0].turns) == turns for session in sessions)
    return {
        "sessions": count,
        "turns": turns,
        "at_once": engine.most,
        "lost": count - whole,
        "errors": answers["errors"],
        "cpu_ms_per_turn": 1000 * cpu_s / (count * turns),
        "wall_s": wall_s,
    }


async def measure_first_byte(count: int, prompt_bytes: int) -> dict[str, Any]:
    """From the engine's first id to the client's first byte, one stream after the other."""
    async with serve(1) as (engine, sessions, url):
        answers = await play(sessions, url, turns=count, prompt_bytes=prompt_bytes, stream=True, grows=False)
    late_ms = [1000 * (byte - id) for id, byte in zip(engine.first_ids, answers["first_bytes"], strict=True)]
    return {
        "streams": count,
        "median_ms": median(late_ms),
        "p95_ms": quantiles(late_ms, n=20)[-1],
        "most_ms": max(late_ms),
    }


def list_promises(results: dict[str, Any], sizes: Sizes) -> list[tuple[str, str, bool]]:
    """Each promise with its figure, and whether it is kept."""
    turns, many, stream = results["turns"], results["sessions"], results["first_byte"]
    at = turns["cpu_ms_at"].get("100", turns["cpu_ms"])
    by_turn = {int(turn): value for turn, value in turns["cpu_ms_at"].items()}
    middle, last = by_turn.get(100, at), by_turn[max(by_turn)]
    growth = last / max(middle, 1e-9)
    return [
        (f"at most 5 ms of CPU per turn at {sizes.prompt_bytes // 1000} KB and 100 turns", f"{at:.1f} ms", at <= 5),
        (
            f"a turn after {max(by_turn)} costs at most twice one after 100: linear, as the JSON comes again",
            f"{growth:.1f} times",
            growth <= 2,
        ),
        ("one ledger, no history encoded again", str(turns["one_ledger"]), turns["one_ledger"]),
        (f"{many['sessions']} sessions at once, none lost", str(many["lost"]), many["lost"] == many["errors"] == 0),
        (
            "first streamed byte within 5 ms of the first token",
            f"{stream['median_ms']:.1f} ms",
            stream["median_ms"] <= 5,
        ),
    ]


def format_report(results: dict[str, Any], sizes: Sizes) -> str:
    """The page with the results."""
    turns, many, stream = results["turns"], results["sessions"], results["first_byte"]
    rows = [
        f"| {text} | {value} | {'met' if kept else '**missed**'} |"
        for text, value, kept in list_promises(results, sizes)
    ]
    at = [f"| {turn} | {value:.2f} |" for turn, value in turns["cpu_ms_at"].items()]
    return "\n".join(
        [
            "# The endpoint for agents",
            "",
            "`make bench-agents`: a scripted policy answers at once; the client is another process. "
            f"Measured on {results['machine']}.",
            "",
            "| Promise | Measured | |",
            "|---|---|---|",
            *rows,
            "",
            "CPU of the endpoint beyond the engine, by turn, in one chat that begins with "
            f"{turns['prompt_bytes']:,} bytes and has {turns['tokens']:,} tokens after {turns['turns']} turns. "
            "Each request carries the whole chat:",
            "",
            "| Turn | ms of CPU |",
            "|---|---|",
            *at,
            "",
            f"{many['sessions']:,} sessions with {many['turns']} turns each, all first requests under way at once: "
            f"{many['lost']} lost, {many['cpu_ms_per_turn']:.1f} ms of CPU per turn.",
            "",
            f"First streamed byte after the engine's first token: median {stream['median_ms']:.2f} ms, "
            f"95th percentile {stream['p95_ms']:.2f} ms, most {stream['most_ms']:.2f} ms "
            f"({stream['streams']} streams).",
            "",
        ]
    )


async def measure(sizes: Sizes) -> dict[str, Any]:
    """All measurements."""
    with anyio.fail_after(TIMEOUT_S):
        return {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "turns": await measure_turns(sizes.turns, sizes.prompt_bytes),
            "sessions": await measure_sessions(sizes.sessions, sizes.session_turns),
            "first_byte": await measure_first_byte(sizes.streams, sizes.prompt_bytes),
        }


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a quick run, whose times mean little")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where agents.json and agents.md go")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))
    sizes = SMALL if options.small else Sizes()
    results = anyio.run(measure, sizes)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "agents.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "agents.md").write_text(format_report(results, sizes))
    print(format_report(results, sizes))


if __name__ == "__main__":
    main()
