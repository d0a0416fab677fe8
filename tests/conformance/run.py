"""A gateway is transparent when the official suite passes through it as it passes without it.

    python tests/conformance/run.py            # through a gateway, in front of one upstream over stdio
    python tests/conformance/run.py --http     # the same, and the upstream is reached over HTTP
    python tests/conformance/run.py --direct   # the upstream alone: the baseline

Prints a table and writes the scores; the exit status is 1 when a required scenario fails that `EXPECTED` does not
name, or when one that it names passes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.conformance.suite import VERSION, Score, Suite

REQUIREMENTS = ("2025-11-25", "2026-07-28")
EXPECTED: dict[tuple[str, str], str] = {}
"""Required scenarios that are known to fail, as (requirement set, scenario), each with its cause."""

WAYS = {"direct": "the upstream alone", "stdio": "gateway, stdio upstream", "http": "gateway, HTTP upstream"}

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".conformance"
UPSTREAM = [sys.executable, str(HERE / "upstream.py")]
START_S, END_S = 60.0, 15.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(command: list[str], port: int) -> Iterator[str]:
    """A server as a child process, from when it listens; asked to end, and then made to."""
    process = subprocess.Popen([*command, "--port", str(port)], cwd=ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not _listens(port):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode} before it listened.")
            if time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} did not listen within {START_S:.0f} s.")
            time.sleep(0.1)
        # The suite sends a forged host only next to the name `localhost`.
        yield f"http://localhost:{port}/mcp"
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def gateway(server: dict[str, Any], folder: Path) -> Iterator[str]:
    """A gateway with no tools of its own in front of one server."""
    tools, servers = folder / "tools", folder / "mcp_servers.json"
    tools.mkdir()
    servers.write_text(json.dumps({"mcpServers": {"everything": server}}))
    command = [sys.executable, "-m", "gateway.cli", "serve", "--tools", str(tools), "--mcp", str(servers)]
    with served(command, free_port()) as url:
        yield url


@contextmanager
def target(way: str, folder: Path) -> Iterator[str]:
    """The URL which the suite is pointed at."""
    with ExitStack() as stack:
        if way == "stdio":
            server: dict[str, Any] = {"command": UPSTREAM[0], "args": UPSTREAM[1:]}
            yield stack.enter_context(gateway(server, folder))
            return
        url = stack.enter_context(served(UPSTREAM, free_port()))
        yield url if way == "direct" else stack.enter_context(gateway({"url": url}, folder))


def measure(way: str) -> list[Score]:
    suite = Suite(CACHE)
    suite.fetch()
    scores = []
    for requirements in REQUIREMENTS:
        results = CACHE / "results" / way / requirements
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir(parents=True)
        # A new target for each set: what one leaves behind must not decide the other.
        with tempfile.TemporaryDirectory() as folder, target(way, Path(folder)) as url:
            scores.append(suite.run(url, requirements, results))
    return scores


def table(scores: list[Score]) -> str:
    lines = ["requirement set  required scenarios  checks passed  checks failed"]
    for score in scores:
        done = f"{len(score.required) - len(score.required_failed)}/{len(score.required)}"
        lines.append(f"{score.requirements:<15}  {done:>18}  {score.checks_passed:>13}  {score.checks_failed:>13}")
    for score in scores:
        lines += [f"{score.requirements} {line}" for line in _told(score)]
    return "\n".join(lines) + "\n"


def _told(score: Score) -> Iterator[str]:
    """Each failed check of what is required; of the rest, one for each scenario."""
    rest: dict[str, list[str]] = {}
    for failure in score.failures:
        if failure.required:
            yield f"{failure.scenario} {failure.check}: {failure.message}"
        else:
            rest.setdefault(failure.scenario, []).append(failure.message)
    for scenario, messages in rest.items():
        yield f"({scenario}, not scored: {len(messages)} failed, first: {messages[0]})"


def record(way: str, scores: list[Score]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "target": WAYS[way],
        "versions": {"suite": VERSION, "mcp": version("mcp"), "mtrl": version("mtrl")},
        "expected_failures": {" ".join(key): cause for key, cause in EXPECTED.items()},
        "scores": [
            {
                "requirements": score.requirements,
                "required": {"passed": len(score.required) - len(score.required_failed), "total": len(score.required)},
                "checks": {"passed": score.checks_passed, "failed": score.checks_failed},
                "failures": [asdict(failure) for failure in score.failures],
            }
            for score in scores
        ],
    }


def surprises(scores: list[Score]) -> list[str]:
    """What the list of expected failures does not say, or says wrongly."""
    failed = {(score.requirements, scenario) for score in scores for scenario in score.required_failed}
    unexpected = [f"{' '.join(key)} is required and failed" for key in sorted(failed - EXPECTED.keys())]
    return unexpected + [f"{' '.join(key)} passes now: take it off EXPECTED" for key in EXPECTED.keys() - failed]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the MCP conformance suite through the gateway.")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--direct", dest="way", action="store_const", const="direct", help="the upstream alone")
    ways.add_argument("--http", dest="way", action="store_const", const="http", help="reach the upstream over HTTP")
    parser.add_argument("--output", type=Path, default=None, help="where the scores are written")
    args = parser.parse_args()
    way = args.way or "stdio"
    # Only the run through the gateway is a result that the project publishes.
    output = args.output or (ROOT / "bench/results/conformance.json" if way == "stdio" else CACHE / f"{way}.json")
    scores = measure(way)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record(way, scores), indent=2) + "\n")
    sys.stdout.write(table(scores))
    for surprise in (found := surprises(scores)):
        sys.stdout.write(f"\n{surprise}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
