"""FastMCP lives in an environment of its own, made once; where it cannot be had, the reason is a result too.

Its newest release may ask for a dependency that a package index does not have yet. Such a bound is let go, and said.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement

HOME = Path(__file__).parents[1] / ".bench" / "fastmcp"
OWN = ("fastmcp", "fastmcp-slim")
"""Its own distributions: installed without what they ask for, which follows with the bounds that can be kept."""
EXTRAS = ("", "client", "server")
INSTALL_S = 240
MOST_RELAXED = 4
_MISSING = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)")


@dataclass(frozen=True, slots=True)
class Peer:
    python: str = ""
    version: str = ""
    relaxed: tuple[str, ...] = ()
    problem: str = ""
    """Why there is none."""

    @property
    def title(self) -> str:
        bounds = f", without its bound on {', '.join(self.relaxed)}" if self.relaxed else ""
        return f"FastMCP {self.version}{bounds}" if self.version else "FastMCP"


def fastmcp() -> Peer:
    """The newest release that installs: from the environment made before, or from one made now."""
    note = HOME / "peer.json"
    if note.exists():
        told = json.loads(note.read_text())
        return Peer(**{**told, "relaxed": tuple(told["relaxed"])})
    try:
        peer = _install()
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(HOME, ignore_errors=True)
        return Peer(problem=_reason(error))
    note.write_text(json.dumps(asdict(peer)))
    return peer


def _install() -> Peer:
    subprocess.run([sys.executable, "-m", "venv", "--clear", HOME], check=True, capture_output=True, timeout=INSTALL_S)
    version = ""
    for name in OWN:
        _pip("install", "--no-deps", f"{name}=={version}" if version else name)
        version = version or _asked("version", name).strip()
    wanted = {one.name: one for name in OWN for one in _requirements(name) if one.name not in OWN}
    relaxed: list[str] = []
    while True:
        try:
            _pip("install", *(_written(one, relaxed) for one in wanted.values()))
            return Peer(str(HOME / "bin" / "python"), version, tuple(relaxed))
        except subprocess.CalledProcessError as error:
            missing = _MISSING.search(error.stderr)
            if missing is None or missing[1] not in wanted or missing[1] in relaxed or len(relaxed) == MOST_RELAXED:
                raise
            relaxed.append(missing[1])


def _requirements(name: str) -> list[Requirement]:
    asked = [Requirement(line) for line in _asked("requires", name).splitlines()]
    return [one for one in asked if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in EXTRAS)]


def _written(one: Requirement, relaxed: list[str]) -> str:
    extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
    return f"{one.name}{extras}{'' if one.name in relaxed else one.specifier}"


def _asked(what: str, name: str) -> str:
    code = f"import importlib.metadata as m; x = m.{what}({name!r}); print(x if isinstance(x, str) else '\\n'.join(x))"
    return subprocess.run([HOME / "bin" / "python", "-c", code], check=True, capture_output=True, text=True).stdout


def _pip(*words: str) -> None:
    command = [str(HOME / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)


def _reason(error: Exception) -> str:
    """pip's last words, without the addresses that they may hold."""
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        lines = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR")]
        return re.sub(r"\S+://\S+", "...", lines[-1] if lines else "pip failed")[:200]
    return f"{type(error).__name__}: it could not be installed"
