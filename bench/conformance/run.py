"""Runs both halves of the official MCP conformance suite with the gateway: as a server, and as a client.

    python bench/conformance/run.py            # a gateway in front of the upstream server, over stdio; then as a client
    python bench/conformance/run.py --client   # as a client only: the suite's servers, many of them authorised

Prints a table and writes the scores. The exit status is 1 if a required scenario fails that is not in
`EXPECTED_FAILURES`, or if one that is in it passes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT)]

from suite import VERSION, Score, Side, Suite  # noqa: E402

from gateway.version import installed_version  # noqa: E402
from tests.docs.servers import Server  # noqa: E402

REQUIREMENTS = ("2025-11-25", "2026-07-28")
EXPECTED_FAILURES: dict[tuple[Side, str, str], str] = {}
"""Required scenarios that are known to fail, as (half, requirement set, scenario), each with its cause."""

TARGETS = {
    "stdio": "gateway, stdio upstream",
    "client": "gateway as a client",
}

CACHE = ROOT / ".conformance"
CLIENT = [sys.executable, str(HERE / "start_client.py")]


@contextmanager
def serve_gateway(folder: Path) -> Iterator[str]:
    """A gateway with no tools of its own in front of the upstream server."""
    tools, servers = folder / "tools", folder / "mcp_servers.json"
    tools.mkdir()
    server = {"command": sys.executable, "args": [str(HERE / "everything_server.py")]}
    servers.write_text(json.dumps({"mcpServers": {"everything": server}}))
    with Server(["mtrl-gateway", "serve", "--tools", str(tools), "--mcp", str(servers)], ROOT) as gateway:
        # The suite tests forged hosts only if the URL says `localhost`.
        yield f"{gateway.url.replace('127.0.0.1', 'localhost')}/mcp"


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
        with tempfile.TemporaryDirectory() as folder, serve_gateway(Path(folder)) as url:
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
    parser.add_argument("--client", action="store_true", help="as a client only")
    parser.add_argument("--output", type=Path, default=None, help="where the scores are written")
    args = parser.parse_args()
    target_name = "client" if args.client else "stdio"
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
