"""Interpreters for frameworks of environments: virtual environments with pinned releases, in the user's data folder.

Their pins fight with ours and with each other's, so that each framework has a Python of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any, cast

from gateway.errors import ConfigError
from gateway.process.spawn import CommandError, kill_group, run_command, spawn

RELEASES: Mapping[str, tuple[str, ...]] = {
    "gymnasium": ("gymnasium==1.4.0",),
    "textarena": ("textarena==0.7.4",),
    "openenv": ("openenv==0.10.0",),
    "verifiers": ("verifiers==0.4.0",),
}
"""The releases that were tested, by framework."""
DONE_FILE = "mtrl.json"
"""In each folder, once it is whole: what was installed."""
INSTALL_S = 1800.0
"""How long an installation may take."""
PYTHON_S = 60
"""How long a Python may take to say which release it is."""
LOG_LINES = 12
RETRYING = "WARNING: Retrying"
NETWORK_ERRORS = re.compile(
    r"name resolution|network is unreachable|connection (refused|reset|timed out)|max retries|newconnectionerror"
    r"|could not fetch url|proxyerror|ssl|timed? ?out",
    re.IGNORECASE,
)
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter that `mtrl-train env install` made."""

    framework: str
    folder: Path
    packages: tuple[str, ...]
    """What was installed, as it was asked for."""

    @property
    def python(self) -> Path:
        """The Python of its virtual environment."""
        return python_in(self.folder)

    @property
    def version(self) -> str:
        """The release of its Python, such as 3.12.1; empty if that is not known."""
        try:
            text = (self.folder / "pyvenv.cfg").read_text("utf-8")
        except OSError:
            return ""
        match = re.search(r"^version\s*=\s*(\S+)", text, re.MULTILINE)
        return match[1] if match else ""

    @property
    def outdated(self) -> bool:
        """Whether it has another release than the one that is tested now."""
        return not {*RELEASES[self.framework]} <= {*self.packages}

    @property
    def megabytes(self) -> int:
        """The size of its files."""
        sizes = (os.lstat(Path(folder, name)).st_size for folder, _, names in os.walk(self.folder) for name in names)
        return round(sum(sizes) / 2**20)


def python_in(folder: Path) -> Path:
    """The Python of a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def interpreters_folder() -> Path:
    """The folder of all interpreters: `mtrl/environments` in `$XDG_DATA_HOME`, by default `~/.local/share`."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(base) / "mtrl/environments"


def check_framework(framework: str) -> None:
    """Raises ConfigError for a framework that has no interpreter."""
    if framework not in RELEASES:
        remedy = f"write one of {', '.join(RELEASES)}"
        raise ConfigError(f"{framework!r} is no framework of environments", field="FRAMEWORK", remedy=remedy)


def find_interpreter(framework: str) -> Interpreter | None:
    """The interpreter of a framework, if it is installed and whole."""
    folder = interpreters_folder() / framework
    try:
        packages = json.loads((folder / DONE_FILE).read_text("utf-8"))["packages"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    interpreter = Interpreter(framework, folder, tuple(map(str, packages)))
    return interpreter if interpreter.python.exists() else None


def require_interpreter(framework: str) -> Path:
    """The Python of a framework. Raises ConfigError if it is not installed."""
    interpreter = find_interpreter(framework)
    if interpreter is None:
        remedy = f"run `mtrl-train env install {framework}`, or name a Python that has it as `environment.python`"
        raise ConfigError(f"{framework} is not installed", field="environment.python", remedy=remedy)
    return interpreter.python


def install_interpreter(framework: str, added: Sequence[str], show: Show, python: str | None = None) -> Interpreter:
    """Makes a framework's interpreter, adds packages to it, or brings it to the tested release.

    `python` is the Python to make it with, by default this one; an existing interpreter of another release of Python is
    made anew. What fails half-way leaves no new interpreter behind, and an existing one as it was.
    """
    check_framework(framework)
    base, version = _find_python(python) if python else (sys.executable, "")
    folder, existing = interpreters_folder() / framework, find_interpreter(framework)
    earlier = [package for package in existing.packages if not _is_release(package, framework)] if existing else []
    added = [_full_path(package) for package in added]  # They are installed again from any folder.
    packages = list(dict.fromkeys([*RELEASES[framework], *earlier, *added]))
    with _folder_errors(folder), _replaced(folder, keep=existing is not None and version in ("", existing.version)):
        if not python_in(folder).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            show(f"making a virtual environment in {folder}")
            _run([base, "-m", "venv", str(folder)], framework, show)
            existing = None
        show(f"installing {', '.join(added if existing and added and not existing.outdated else packages)}")
        pip = [str(python_in(folder)), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
        _run([*pip, *packages], framework, show)
        (folder / DONE_FILE).write_text(json.dumps({"packages": packages}) + "\n", "utf-8")
    return Interpreter(framework, folder, tuple(packages))


@contextmanager
def _folder_errors(folder: Path) -> Iterator[None]:
    """Turns what the file system refuses into a ConfigError."""
    try:
        yield
    except OSError as error:
        problem = f"{folder} cannot be written ({error.strerror})"
        raise ConfigError(problem, remedy="make room, or set XDG_DATA_HOME to a folder of yours") from error


@contextmanager
def _replaced(folder: Path, *, keep: bool) -> Iterator[None]:
    """Moves a folder aside while a new one is made in its place, and back if that fails; or keeps it."""
    if keep:
        yield
        return
    aside = folder.with_name(f"{folder.name}.earlier")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if (aside / DONE_FILE).exists():
            aside.rename(folder)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _find_python(python: str) -> tuple[str, str]:
    """The path of a Python, and its release. Raises ConfigError if there is none."""
    path = shutil.which(os.path.expanduser(python)) or ""
    code = "import platform, venv; print(platform.python_version())"
    try:
        done = run_command([path, "-I", "-c", code], PYTHON_S)
        if done.status:
            raise CommandError(done.error_text or f"it ended with status {done.status}")
    except OSError as error:
        reason = str(error) if path else "there is none"
        remedy = "name one with its venv module, such as python3.12 or /usr/bin/python3.12"
        problem = f"{python!r} is no Python to be used ({reason.strip()[-200:]})"
        raise ConfigError(problem, field="--python", remedy=remedy) from error
    return os.path.abspath(path), done.text.strip()


def remove_interpreter(framework: str) -> bool:
    """Deletes a framework's interpreter; False if there is none."""
    check_framework(framework)
    folder = interpreters_folder() / framework
    if not folder.exists():
        return False
    try:
        shutil.rmtree(folder)
    except OSError as error:
        problem = f"{folder} cannot be deleted ({error.strerror})"
        raise ConfigError(problem, remedy="end what uses it, and try again") from error
    return True


def _full_path(package: str) -> str:
    """The full path of a package that is a local folder or file; any other as it is."""
    is_local = os.sep in package and Path(package).expanduser().exists()
    return str(Path(package).expanduser().resolve()) if is_local else package


def _is_release(package: str, framework: str) -> bool:
    """Whether a package is a release of the framework itself, such as an earlier one."""
    return package.partition("==")[0] in {release.partition("==")[0] for release in RELEASES[framework]} | {framework}


def _run(command: Sequence[str], framework: str, show: Show) -> None:
    """Runs a command, shows its lines, and raises ConfigError with the last ones if it fails."""
    lines: list[str] = []
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    variables |= {"PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}
    process = spawn(command, stdout=PIPE, stderr=STDOUT, env=variables)
    with process, TextIOWrapper(BufferedReader(cast("Any", process.stdout)), errors="replace") as printed:
        deadline = threading.Timer(INSTALL_S, kill_group, [process.pid])
        deadline.start()
        try:
            for line in printed:
                lines.append(line.rstrip())
                if line.startswith(RETRYING):
                    show("the package index does not answer; pip tries again")
                elif line.startswith(("Collecting", "Downloading", "Installing", "Successfully")):
                    show(line.strip())
            code = process.wait()
        except BaseException:
            kill_group(process.pid)
            raise
        finally:
            deadline.cancel()
    if code:
        raise _failure(command, framework, code, lines)


def _failure(command: Sequence[str], framework: str, code: int, lines: Sequence[str]) -> ConfigError:
    text = "\n".join(lines)
    retried = [line for line in lines if line.startswith(RETRYING)]
    kept = [line for line in lines if line.strip() and line not in retried[:-1]]
    tail = "\n  ".join(kept[-LOG_LINES:])
    if "venv" in command and "ensurepip" in text:
        remedy = "install Python's venv module, such as the package python3-venv, and try again"
    elif NETWORK_ERRORS.search(text):
        remedy = (
            "the package index cannot be reached: check the network and pip's settings (`pip config list`), or install "
            f"{' '.join(RELEASES[framework])} into a virtual environment elsewhere and name its Python as "
            f"`environment.python`"
        )
    else:
        remedy = "read pip's last lines above; `mtrl-train env remove` and `install` begin again"
    command_name = "python -m venv" if "venv" in command else "pip install"
    return ConfigError(f"{command_name} ended with exit code {code}:\n  {tail}", field=framework, remedy=remedy)
