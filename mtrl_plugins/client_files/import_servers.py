"""`mtrl-gateway import`: collects the servers of other MCP clients on this machine into one servers file of ours.

Values that look like secrets are not copied: the file has `${NAME}` in their place, and the operator is told what to
export.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.config.base import file_keys
from gateway.config.entries import display_path
from gateway.config.file_forms import ServerSection
from gateway.config.reader import read_file
from gateway.config.server_paths import project_folder
from gateway.errors import ConfigError, GatewayError
from mtrl_plugins.client_files.client_files import input_variable, translate_file

HOME_FILES: tuple[tuple[str, str], ...] = (
    ("Claude Code", ".claude.json"),
    ("Cursor", ".cursor/mcp.json"),
    ("Windsurf", ".codeium/windsurf/mcp_config.json"),
    ("Gemini CLI", ".gemini/settings.json"),
    ("Codex", ".codex/config.toml"),
    ("Copilot CLI", ".copilot/mcp-config.json"),
    ("Kiro", ".kiro/settings/mcp.json"),
    ("Amazon Q", ".aws/amazonq/mcp.json"),
    ("LM Studio", ".lmstudio/mcp.json"),
    ("Zed", ".config/zed/settings.json"),
    ("opencode", ".config/opencode/opencode.json"),
    ("Junie", ".junie/mcp/mcp.json"),
)
"""Files in the home folder, the same on each system."""

SETTINGS_FILES: tuple[tuple[str, str], ...] = (
    ("Claude Desktop", "Claude/claude_desktop_config.json"),
    ("VS Code", "Code/User/mcp.json"),
    ("VS Code settings", "Code/User/settings.json"),
    ("VS Code Insiders", "Code - Insiders/User/mcp.json"),
    ("Cline", "Code/User/globalStorage/saoudrizwan.claude-dev/settings/cline_mcp_settings.json"),
    ("Roo Code", "Code/User/globalStorage/rooveterinaryinc.roo-cline/settings/mcp_settings.json"),
)
"""Files in the folder for settings of programs, which depends on the system."""

PROJECT_FILES: tuple[tuple[str, str], ...] = (
    ("Claude Code, project", ".mcp.json"),
    ("VS Code, project", ".vscode/mcp.json"),
    ("Visual Studio, project", ".vs/mcp.json"),
    ("Cursor, project", ".cursor/mcp.json"),
    ("Gemini CLI, project", ".gemini/settings.json"),
    ("Codex, project", ".codex/config.toml"),
    ("Zed, project", ".zed/settings.json"),
    ("Roo Code, project", ".roo/mcp.json"),
    ("Kiro, project", ".kiro/settings/mcp.json"),
    ("Amazon Q, project", ".amazonq/mcp.json"),
    ("Junie, project", ".junie/mcp/mcp.json"),
    ("opencode, project", "opencode.json"),
)
"""Files in the folder of a project."""


@dataclass(frozen=True, slots=True)
class Place:
    """A servers file of a client, or a section of one."""

    client: str
    file: Path
    section: tuple[str, ...] | None = None
    """Where its servers are; by default where clients have them."""


def settings_folder(home: Path, platform: str = sys.platform, env: Mapping[str, str] = os.environ) -> Path:
    """The folder in which programs keep their settings."""
    if platform == "darwin":
        return home / "Library" / "Application Support"
    if platform == "win32":
        return Path(env.get("APPDATA") or home / "AppData" / "Roaming")
    return Path(env.get("XDG_CONFIG_HOME") or home / ".config")


def known_places(home: Path, project: Path) -> Iterator[Place]:
    """The files that exist, of the project first: its servers are the nearest."""
    settings = settings_folder(home)
    places = [
        *(Place(client, project / name) for client, name in PROJECT_FILES),
        Place("Claude Code, local", home / ".claude.json", ("projects", str(project), "mcpServers")),
        *(Place(client, home / name) for client, name in HOME_FILES),
        *(Place(client, settings / name) for client, name in SETTINGS_FILES),
    ]
    seen = set()
    for place in places:
        if (place.file, place.section) not in seen and place.file.is_file():
            seen.add((place.file, place.section))
            yield place


SECRET_NAME = re.compile(
    r"key|token|secret|passw|credential|auth|cookie|session|pat$|pwd|dsn|connection", re.IGNORECASE
)
"""Names of values that are probably secrets."""
URL_PASSWORD = re.compile(r"(?<=://)(?P<user>[^/@:\s]*):(?P<password>[^/@\s]+)(?=@)")
QUERY_VALUE = re.compile(r"(?<=[?&])(?P<name>[^=&#]+)=(?P<value>[^&#]+)")
OPTION = re.compile(r"(?P<name>--?[\w-]+)(?:=(?P<value>.+))?", re.DOTALL)
HEADER_OPTION = re.compile(r"(?P<name>[\w-]+):\s*(?P<value>\S.*)", re.DOTALL)
VARIABLE = re.compile(r"\$\{[^}]*\}")


@dataclass
class Found:
    """One server of a client, in our form."""

    name: str
    place: Place
    section: dict[str, Any]
    exports: dict[str, str] = field(default_factory=dict)
    """Variables in place of secrets, each with where its value is now."""


@dataclass
class ServerImport:
    """What was found on this machine."""

    servers: list[Found] = field(default_factory=list)
    """The servers under names that are unique."""
    places: list[tuple[Place, int]] = field(default_factory=list)
    """The files that were read, each with its number of servers."""
    notes: list[str] = field(default_factory=list)
    """What was ignored, interpreted, left out or could not be read."""

    def to_text(self) -> str:
        """The servers file."""
        servers = {found.name: found.section for found in self.servers}
        return json.dumps({"mcpServers": servers}, indent=2, ensure_ascii=False) + "\n"

    def exports(self) -> dict[str, str]:
        """Variables to export, each with where its value is now."""
        return {name: where for found in self.servers for name, where in found.exports.items()}


def find_servers(home: Path, project: Path) -> ServerImport:
    """Reads the files of all clients; files that cannot be read are told and left out."""
    result = ServerImport()
    secrets: dict[str, str] = {}
    known: dict[str, Found] = {}
    for place in known_places(home, project):
        try:
            servers = list(_read_place(place, result.notes, secrets))
        except ConfigError as error:
            result.notes.append(" ".join(str(error).split()))
            continue
        result.places.append((place, len(servers)))
        for found in servers:
            _add_server(found, known, result.notes)
    result.servers = list(known.values())
    return result


def _read_place(place: Place, notes: list[str], secrets: dict[str, str]) -> Iterator[Found]:
    raw = read_file(place.file)
    if place.section is not None:
        for step in place.section:
            raw = raw.get(step) if isinstance(raw, dict) else None
        raw = {"mcpServers": raw} if isinstance(raw, dict) else {}
    translated = translate_file(raw, place.file)
    # Other top-level keys are of no interest here: only servers are asked for.
    notes += [" ".join(str(note).split()) for note in translated.notes if "another program:" not in note.problem]
    servers = translated.tree.get("mcpServers") if isinstance(translated.tree, dict) else None
    for name, section in servers.items() if isinstance(servers, dict) else ():
        if isinstance(section, dict):
            where = f"{display_path(place.file)}, server {name!r}"
            found = Found(name, place, _absolute_paths(section, place.file))
            _Secrets(name, where, secrets).take_out(found)
            text = json.dumps(found.section)
            asked = {name: question for name, question in translated.inputs.items() if f"${{{name}" in text}
            found.exports |= asked
            yield found


def _add_server(found: Found, known: dict[str, Found], notes: list[str]) -> None:
    """Adds a server once; another one of the same name gets its client's name."""
    same = next((other for other in known.values() if other.section == found.section), None)
    if same is not None:
        return
    if found.name in known:
        other = known[found.name]
        base = f"{found.name}-{re.sub(r'[^a-z0-9]+', '-', found.place.client.lower()).strip('-')}"
        name = next(name for name in _numbered(base) if name not in known)
        notes.append(
            f"two servers are named {found.name!r}: the one of {found.place.client} becomes {name!r}, "
            f"that of {other.place.client} keeps the name"
        )
        found.name = name
    known[found.name] = found


def _numbered(base: str, separator: str = "-") -> Iterator[str]:
    """The name, and then the name with the numbers from 2 to 1000."""
    yield base
    yield from (f"{base}{separator}{number}" for number in range(2, 1001))


def _absolute_paths(section: dict[str, Any], file: Path) -> dict[str, Any]:
    """The section with paths that hold from any folder, and without keys that change nothing."""
    section = {key: value for key, value in section.items() if value not in (None, [], {}, "", False)}
    folder = project_folder(file)
    for key in ("cwd", "envFile"):
        if isinstance(section.get(key), str) and not section[key].startswith("${"):
            section[key] = str(folder / Path(section[key]).expanduser())
    command = section.get("command")
    if isinstance(command, str) and command.startswith(("./", "../", "~/")):
        section["command"] = str(folder / Path(command).expanduser())
    order = [*file_keys(ServerSection)]
    return dict(sorted(section.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


class _Secrets:
    """Replaces values that look like secrets by variables."""

    def __init__(self, server: str, where: str, values: dict[str, str]) -> None:
        self.server, self.where, self.values = server, where, values
        self.exports: dict[str, str] = {}

    def take_out(self, found: Found) -> None:
        """Replaces the secrets of one server."""
        section = found.section
        for key in ("env", "headers"):
            if isinstance(values := section.get(key), dict):
                section[key] = {name: self._value(key, name, value) for name, value in values.items()}
        if "auth_token" in section:
            section["auth_token"] = self._replace(section["auth_token"], "TOKEN", "auth_token")
        if isinstance(url := section.get("url"), str):
            section["url"] = self._url(url)
        if isinstance(args := section.get("args"), list):
            section["args"] = list(self._args(args))
        found.exports = self.exports

    def _value(self, key: str, name: str, value: Any) -> Any:
        """A value of `env` or `headers`."""
        if not isinstance(value, str):
            return value
        if key == "headers":  # Any header may be a key; a scheme such as `Bearer` stays readable.
            scheme, space, rest = value.partition(" ")
            if space and scheme.lower() in ("bearer", "basic", "token"):
                return f"{scheme} {self._replace(rest, name, f'headers.{name}')}"
            return self._replace(value, name, f"headers.{name}")
        if SECRET_NAME.search(name):
            return self._replace(value, name, f"env.{name}", plain=True)
        return self._url(value) if "://" in value else value

    def _url(self, url: str) -> str:
        url = URL_PASSWORD.sub(
            lambda match: f"{match['user']}:{self._replace(match['password'], 'PASSWORD', 'url')}", url
        )
        return QUERY_VALUE.sub(self._query_value, url)

    def _query_value(self, match: re.Match[str]) -> str:
        if not SECRET_NAME.search(match["name"]):
            return match[0]
        return f"{match['name']}={self._replace(match['value'], match['name'], 'url')}"

    def _args(self, args: Iterable[Any]) -> Iterator[Any]:
        """The arguments without the values of `--api-key X`, `--token=X`, `--header 'A: X'` and the like."""
        option = ""
        for arg in args:
            if not isinstance(arg, str):
                yield arg
                continue
            match = OPTION.fullmatch(arg)
            if match is not None:
                option = match["name"]
                yield f"{option}={self._option_value(option, match['value'])}" if match["value"] else arg
            else:
                yield self._option_value(option, arg)
                option = ""

    def _option_value(self, option: str, value: str) -> str:
        header = HEADER_OPTION.fullmatch(value)
        if header and SECRET_NAME.search(header["name"]) and "://" not in value:
            return f"{header['name']}: {self._value('headers', header['name'], header['value'])}"
        if SECRET_NAME.search(option) and not urlsplit(value).scheme:
            return str(self._replace(value, option, "args"))
        name, equals, rest = value.partition("=")  # docker's `-e NAME=value`
        if equals and re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) and SECRET_NAME.search(name):
            return f"{name}={self._replace(rest, name, 'args', plain=True)}"
        return self._url(value) if "://" in value else value

    def _replace(self, value: Any, name: str, where: str, *, plain: bool = False) -> Any:
        """`${NAME}` for a secret; a value that is a variable already, or empty, stays."""
        if not isinstance(value, str) or not value or VARIABLE.search(value):
            return value
        label = name.strip("-")
        own_name = input_variable(f"{self.server}_{label}")
        names = [*([input_variable(label)] if plain else []), *_numbered(own_name, "_")]
        variable = next(name for name in names if self.values.setdefault(name, value) == value)
        self.exports[variable] = f"{self.where}, {where}"
        return f"${{{variable}}}"


def write_servers_file(text: str, file: Path) -> None:
    """Writes a new file that only this user can read; an existing one is never replaced."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise GatewayError(
            f"{display_path(file)} exists, and is not overwritten\n"
            "  remedy: name another file with --out, or remove this one"
        ) from None
    except OSError as error:
        raise GatewayError(
            f"{display_path(file)} cannot be written: {error.strerror}\n  remedy: name another file with --out"
        ) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
