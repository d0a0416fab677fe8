"""Installs the frameworks that mtrl is compared with, FastMCP and TRL, each in a virtual environment of its own.

A dependency bound of FastMCP's newest release that a package index cannot satisfy is dropped, and the title says so.
TRL gets the versions of torch and transformers that are installed here, so that both trainers compute with the same.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ENVIRONMENTS = Path(__file__).parents[1] / ".bench"
FASTMCP_PACKAGES = ("fastmcp", "fastmcp-slim")
"""Installed without dependencies; these follow, with the bounds that can be satisfied."""
EXTRAS = ("", "client", "server")
FAST_SERVING = ("uvloop", "httptools")
"""uvicorn's fast event loop and HTTP parser, which FastMCP does not ask for by itself."""
INSTALL_TIMEOUT_S = 600
SHARED_PACKAGES = ("torch", "transformers")
"""What both trainers compute with."""
MAX_RELAXED = 4
_MISSING = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)")


@dataclass(frozen=True, slots=True)
class Peer:
    """A framework to compare with, and its Python."""

    name: str
    python: str = ""
    version: str = ""
    relaxed: tuple[str, ...] = ()
    """Dependencies whose version bound was dropped."""
    problem: str = ""
    """Why it is not installed."""

    @property
    def title(self) -> str:
        """Name, version and dropped bounds, for tables."""
        bounds = f", without its bound on {', '.join(self.relaxed)}" if self.relaxed else ""
        return f"{self.name} {self.version}{bounds}" if self.version else self.name


def fastmcp(*, install: bool = True) -> Peer:
    """FastMCP's newest release that installs; with `install=False` only if it is installed already."""
    return _find_or_install("FastMCP", _install_fastmcp, install)


def trl(*, install: bool = True) -> Peer:
    """TRL's newest release; with `install=False` only if it is installed already."""
    return _find_or_install("TRL", _install_trl, install)


def newest_release(package: str) -> str | None:
    """The newest release that the package index serves; None if none can be reached."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--retries", "1", "--timeout", "15", package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    found = re.match(r"\S+ \(([^)]+)\)", done.stdout)
    return found[1] if found else None


def _find_or_install(name: str, installer: Callable[[Path], Peer], install: bool) -> Peer:
    """What is installed, unless the index serves a newer release."""
    home = ENVIRONMENTS / name.lower()
    record = home / "peer.json"
    if record.exists():
        values = {"name": name} | json.loads(record.read_text())
        if not install or newest_release(name.lower()) in (None, values["version"]):
            return Peer(**{**values, "relaxed": tuple(values["relaxed"])})
    if not install:
        return Peer(name, problem="not installed here yet")
    try:
        command = [sys.executable, "-m", "venv", "--clear", home]
        subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_TIMEOUT_S)
        peer = installer(home)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(home, ignore_errors=True)
        return Peer(name, problem=_describe_failure(error))
    record.write_text(json.dumps(asdict(peer)))
    return peer


def _install_trl(home: Path) -> Peer:
    pinned = [f"{name}=={version(name).partition('+')[0]}" for name in SHARED_PACKAGES]
    _pip(home, "install", "trl", *pinned)
    return Peer("TRL", str(_python(home)), _read_metadata(home, "version", "trl").strip())


def _install_fastmcp(home: Path) -> Peer:
    newest = ""
    for name in FASTMCP_PACKAGES:
        _pip(home, "install", "--no-deps", f"{name}=={newest}" if newest else name)
        newest = newest or _read_metadata(home, "version", name).strip()
    requirements = [requirement for name in FASTMCP_PACKAGES for requirement in _requirements(home, name)]
    needed = {requirement.name: requirement for requirement in requirements if requirement.name not in FASTMCP_PACKAGES}
    relaxed: list[str] = []
    while True:
        try:
            wanted = (_format_requirement(requirement, relaxed) for requirement in needed.values())
            _pip(home, "install", *FAST_SERVING, *wanted)
            return Peer("FastMCP", str(_python(home)), newest, tuple(relaxed))
        except subprocess.CalledProcessError as error:
            missing = _MISSING.search(error.stderr)
            if missing is None or missing[1] not in needed or missing[1] in relaxed or len(relaxed) == MAX_RELAXED:
                raise
            relaxed.append(missing[1])


def _requirements(home: Path, name: str) -> list[Requirement]:
    requirements = [Requirement(line) for line in _read_metadata(home, "requires", name).splitlines()]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in EXTRAS)
    ]


def _format_requirement(requirement: Requirement, relaxed: list[str]) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{'' if requirement.name in relaxed else requirement.specifier}"


def _read_metadata(home: Path, function: str, name: str) -> str:
    """Calls `importlib.metadata.FUNCTION(NAME)` in an environment; lists have one item a line."""
    code = f"import importlib.metadata as m; x = m.{function}({name!r}); "
    code += "print(x if isinstance(x, str) else '\\n'.join(x))"
    return subprocess.run([_python(home), "-c", code], check=True, capture_output=True, text=True).stdout


def _pip(home: Path, *args: str) -> None:
    command = [str(_python(home)), "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def _describe_failure(error: Exception) -> str:
    """pip's last error line, without URLs, which may hold secrets."""
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        lines = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR")]
        return re.sub(r"\S+://\S+", "...", lines[-1] if lines else "pip failed")[:200]
    return f"{type(error).__name__}: it could not be installed"
