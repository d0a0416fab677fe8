"""Each peer lives in an environment of its own, made once; where it cannot be had, the reason is a result too.

FastMCP's newest release may ask for a dependency that a package index does not have yet. Such a bound is let go, and
said. TRL gets the torch and the transformers that are installed here, so that both trainers compute with the same.
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

HOMES = Path(__file__).parents[1] / ".bench"
OWN = ("fastmcp", "fastmcp-slim")
"""Its own distributions: installed without what they ask for, which follows with the bounds that can be kept."""
EXTRAS = ("", "client", "server")
INSTALL_S = 600
SHARED = ("torch", "transformers")
"""What both trainers compute with."""
MOST_RELAXED = 4
_MISSING = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)")


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    python: str = ""
    version: str = ""
    relaxed: tuple[str, ...] = ()
    problem: str = ""
    """Why there is none."""

    @property
    def title(self) -> str:
        bounds = f", without its bound on {', '.join(self.relaxed)}" if self.relaxed else ""
        return f"{self.name} {self.version}{bounds}" if self.version else self.name


def fastmcp(*, now: bool = True) -> Peer:
    """The newest release that installs; unless `now`, only one that is installed."""
    return _kept("FastMCP", _fastmcp, now)


def trl(*, now: bool = True) -> Peer:
    """The newest release; unless `now`, only one that is installed."""
    return _kept("TRL", _trl, now)


def _kept(name: str, install: Callable[[Path], Peer], now: bool) -> Peer:
    home = HOMES / name.lower()
    note = home / "peer.json"
    if note.exists():
        told = {"name": name} | json.loads(note.read_text())
        return Peer(**{**told, "relaxed": tuple(told["relaxed"])})
    if not now:
        return Peer(name, problem="not installed here yet")
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", home], check=True, capture_output=True, timeout=INSTALL_S
        )
        peer = install(home)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(home, ignore_errors=True)
        return Peer(name, problem=_reason(error))
    note.write_text(json.dumps(asdict(peer)))
    return peer


def _trl(home: Path) -> Peer:
    pinned = [f"{name}=={version(name).partition('+')[0]}" for name in SHARED]
    _pip(home, "install", "trl", *pinned)
    return Peer("TRL", str(_python(home)), _asked(home, "version", "trl").strip())


def _fastmcp(home: Path) -> Peer:
    newest = ""
    for name in OWN:
        _pip(home, "install", "--no-deps", f"{name}=={newest}" if newest else name)
        newest = newest or _asked(home, "version", name).strip()
    wanted = {one.name: one for name in OWN for one in _requirements(home, name) if one.name not in OWN}
    relaxed: list[str] = []
    while True:
        try:
            _pip(home, "install", *(_written(one, relaxed) for one in wanted.values()))
            return Peer("FastMCP", str(_python(home)), newest, tuple(relaxed))
        except subprocess.CalledProcessError as error:
            missing = _MISSING.search(error.stderr)
            if missing is None or missing[1] not in wanted or missing[1] in relaxed or len(relaxed) == MOST_RELAXED:
                raise
            relaxed.append(missing[1])


def _requirements(home: Path, name: str) -> list[Requirement]:
    asked = [Requirement(line) for line in _asked(home, "requires", name).splitlines()]
    return [one for one in asked if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in EXTRAS)]


def _written(one: Requirement, relaxed: list[str]) -> str:
    extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
    return f"{one.name}{extras}{'' if one.name in relaxed else one.specifier}"


def _asked(home: Path, what: str, name: str) -> str:
    code = f"import importlib.metadata as m; x = m.{what}({name!r}); print(x if isinstance(x, str) else '\\n'.join(x))"
    return subprocess.run([_python(home), "-c", code], check=True, capture_output=True, text=True).stdout


def _pip(home: Path, *words: str) -> None:
    command = [str(_python(home)), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def _reason(error: Exception) -> str:
    """pip's last words, without the addresses that they may hold."""
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        lines = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR")]
        return re.sub(r"\S+://\S+", "...", lines[-1] if lines else "pip failed")[:200]
    return f"{type(error).__name__}: it could not be installed"
