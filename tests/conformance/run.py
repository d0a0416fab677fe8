"""Runs both halves of the official MCP conformance suite with the gateway: as a server, and as a client.

    python tests/conformance/run.py            # a gateway in front of the upstream server, over stdio; then as a client
    python tests/conformance/run.py --client   # as a client only: the suite's servers, many of them authorised
    python tests/conformance/run.py --http     # the same, over HTTP
    python tests/conformance/run.py --direct   # the upstream server alone: the baseline

Prints a table and writes the scores. The exit status is 1 if a required scenario fails that is not in
`EXPECTED_FAILURES`, or if one that is in it passes.
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

from gateway.version import installed_version
from tests.conformance.suite import VERSION, Score, Side, Suite

REQUIREMENTS = ("2025-11-25", "2026-07-28")
EXPECTED_FAILURES: dict[tuple[Side, str, str], str] = {}
"""Required scenarios that are known to fail, as (half, requirement set, scenario), each with its cause."""

TARGETS = {
    "direct": "the upstream alone",
    "stdio": "gateway, stdio upstream",
    "http": "gateway, HTTP upstream",
    "client": "gateway as a client",
}

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".conformance"
CLIENT = [sys.executable, str(HERE / "start_client.py")]
UPSTREAM = [sys.executable, str(HERE / "everything_server.py")]
START_TIMEOUT_S, END_TIMEOUT_S = 60.0, 15.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve_command(command: list[str], port: int) -> Iterator[str]:
    """A server as a child process; yields its URL once it listens, and stops it at the end."""
    process = subprocess.Popen([*command, "--port", str(port)], cwd=ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_listening(port):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode} before it listened.")
            if time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} did not listen within {START_TIMEOUT_S:.0f} s.")
            time.sleep(0.1)
        # The suite tests forged hosts only if the URL says `localhost`.
        yield f"http://localhost:{port}/mcp"
    finally:
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_TIMEOUT_S)


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def serve_gateway(server: dict[str, Any], folder: Path) -> Iterator[str]:
    """A gateway with no tools of its own in front of one server."""
    tools, servers = folder / "tools", folder / "mcp_servers.json"
    tools.mkdir()
    servers.write_text(json.dumps({"mcpServers": {"everything": server}}))
    command = [
        sys.executable,
        "-m",
        "gateway.cli",
        "serve",
        "--wait",
        "all",
        "--tools",
        str(tools),
        "--mcp",
        str(servers),
    ]
    with serve_command(command, free_port()) as url:
        yield url


@contextmanager
def open_target(target_name: str, folder: Path) -> Iterator[str]:
    """Starts the target and yields the URL for the suite."""
    with ExitStack() as stack:
        if target_name == "stdio":
            server: dict[str, Any] = {"command": UPSTREAM[0], "args": UPSTREAM[1:]}
            yield stack.enter_context(serve_gateway(server, folder))
            return
        url = stack.enter_context(serve_command(UPSTREAM, free_port()))
        yield url if target_name == "direct" else stack.enter_context(serve_gateway({"url": url}, folder))


def run_suite(target_name: str) -> list[Score]:
    suite = Suite(CACHE)
    suite.fetch()
    scores = []
    for requirements in REQUIREMENTS:
        results = CACHE / "results" / target_name / requirements
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir(parents=True)
        # A new target for each set, so that state left by one cannot affect the other.
        if target_name == "client":
            scores.append(suite.run_clients(CLIENT, requirements, results))
            continue
        with tempfile.TemporaryDirectory() as folder, open_target(target_name, Path(folder)) as url:
            scores.append(suite.run(url, requirements, results))
    return scores


def format_table(scores: list[Score]) -> str:
    lines = ["half    requirement set  required scenarios  checks passed  checks failed"]
    for score in scores:
        passed = f"{len(score.required) - len(score.required_failed)}/{len(score.required)}"
        checks = f"{score.checks_passed:>13}  {score.checks_failed:>13}"
        lines.append(f"{score.side:<6}  {score.requirements:<15}  {passed:>18}  {checks}")
    for score in scores:
        lines += [f"{score.side} {score.requirements} {line}" for line in _format_failures(score)]
    return "\n".join(lines) + "\n"


def _format_failures(score: Score) -> Iterator[str]:
    """Lines for each failed check of a required scenario, and one for each other scenario."""
    unscored: dict[str, list[str]] = {}
    for failure in score.failures:
        if failure.required:
            yield f"{failure.scenario} {failure.check}: {failure.message}"
        else:
            unscored.setdefault(failure.scenario, []).append(failure.message)
    for scenario, messages in unscored.items():
        yield f"({scenario}, not scored: {len(messages)} failed, first: {messages[0]})"


def to_json(target_name: str, scores: list[Score]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "target": TARGETS[target_name],
        "versions": {"suite": VERSION, "mcp": version("mcp"), "mtrl": installed_version()},
        "expected_failures": {" ".join(key): cause for key, cause in EXPECTED_FAILURES.items()},
        "scores": [
            {
                "half": score.side,
                "requirements": score.requirements,
                "required": {"passed": len(score.required) - len(score.required_failed), "total": len(score.required)},
                "checks": {"passed": score.checks_passed, "failed": score.checks_failed},
                "failures": [asdict(failure) for failure in score.failures],
            }
            for score in scores
        ],
    }


def find_surprises(scores: list[Score]) -> list[str]:
    """The required scenarios whose result differs from `EXPECTED_FAILURES`."""
    failed = {(score.side, score.requirements, scenario) for score in scores for scenario in score.required_failed}
    unexpected = [f"{' '.join(key)} is required and failed" for key in sorted(failed - EXPECTED_FAILURES.keys())]
    return unexpected + [
        f"{' '.join(key)} passes now: remove it from EXPECTED_FAILURES" for key in EXPECTED_FAILURES.keys() - failed
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the MCP conformance suite through the gateway.")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--direct", dest="target", action="store_const", const="direct", help="the upstream alone")
    group.add_argument("--client", dest="target", action="store_const", const="client", help="as a client only")
    group.add_argument("--http", dest="target", action="store_const", const="http", help="reach the upstream over HTTP")
    parser.add_argument("--output", type=Path, default=None, help="where the scores are written")
    args = parser.parse_args()
    target_name = args.target or "stdio"
    # Only the run through the gateway is a result that the project publishes.
    output = args.output or (
        ROOT / "bench/results/conformance.json" if target_name == "stdio" else CACHE / f"{target_name}.json"
    )
    scores = run_suite(target_name) + (run_suite("client") if target_name == "stdio" else [])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(to_json(target_name, scores), indent=2) + "\n")
    sys.stdout.write(format_table(scores))
    for problem in (problems := find_surprises(scores)):
        sys.stdout.write(f"\n{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
