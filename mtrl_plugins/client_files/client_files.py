"""Translates servers files of other MCP clients (Claude, Cursor, VS Code, Gemini CLI, Codex, ...) into ours.

A key of theirs is translated, or ignored with a note. A key that is close to a known one stays, so that it is refused
as misspelt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from gateway.config.base import file_keys
from gateway.config.entries import display_path
from gateway.config.environment import Loc, format_loc
from gateway.config.file_forms import ServerSection
from gateway.config.server_paths import project_folder
from gateway.config.translated_file import TranslatedFile
from gateway.errors import ConfigError

SECTIONS: tuple[tuple[str, ...], ...] = (
    ("mcpServers",),  # Claude, Cursor, Windsurf, Gemini CLI, Cline, Kiro, LM Studio, ...
    ("servers",),  # VS Code and Visual Studio
    ("mcp_servers",),  # Codex
    ("context_servers",),  # Zed
    ("mcp", "servers"),  # VS Code's settings.json
    ("amp.mcpServers",),  # Amp
    ("mcp",),  # opencode and Crush
)
"""Where a file has its servers; the first section that it has counts."""

RENAMED: Mapping[str, str] = {
    "serverUrl": "url",  # Windsurf
    "baseUrl": "url",
    "httpUrl": "url",  # Gemini CLI
    "transportType": "transport",  # older Cline
    "environment": "env",  # opencode
    "working_directory": "cwd",  # Warp
    "workingDirectory": "cwd",
    "env_file": "envFile",
    "disabledTools": "excludeTools",  # Cline, Windsurf, Kiro
    "disabled_tools": "excludeTools",  # Codex
    "enabledTools": "includeTools",
    "enabled_tools": "includeTools",  # Codex
    "tools": "includeTools",  # Copilot CLI
    "http_headers": "headers",  # Codex
    "tool_timeout_sec": "timeout_s",  # Codex
    "startup_timeout_sec": "connect_timeout_s",  # Codex
}
"""Keys of other clients that mean the same as ours."""

COMPUTED = frozenset(
    {
        "timeout",  # seconds or milliseconds
        "enabled",
        "isActive",
        "bearer_token_env_var",
        "env_http_headers",
        "env_vars",
        "startup_timeout_ms",
        "oauth",
    }
)
"""Keys of other clients that are translated by a function."""

NO_CONFIRMATION = "nothing asks for confirmation here"
OTHER_SETTING = "it is a setting of another program"
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(("trust", "alwaysAllow", "autoApprove", "default_tools_approval_mode"), NO_CONFIRMATION),
    **dict.fromkeys(
        (
            *("name", "title", "label", "id", "icon", "logo", "logoUrl", "tags", "version", "provider", "metadata"),
            *("source", "settings", "gallery", "registryType", "extensionName", "remoteConfigured", "isDefault"),
            *("dev", "sandbox", "sandboxEnabled", "watchPaths", "alwaysLoad", "headersHelper", "lazy", "required"),
            *("auth", "authProviderType", "authorization", "clientId", "scopes", "oauth_resource"),
            *("targetAudience", "targetServiceAccount", "requestInit", "eventSourceInit", "reconnect", "tcp"),
            *("experimental_environment", "supports_parallel_tool_calls", "longRunning", "installedFrom"),
            *("start_on_launch", "startOnLaunch", "autoStart", "autostart", "restart", "priority", "category"),
        ),
        OTHER_SETTING,
    ),
}
"""Keys of other clients that change nothing here, each with the reason."""

OAUTH_RENAMED: Mapping[str, str] = {
    "clientId": "client_id",
    "clientSecret": "client_secret",
    "redirectUri": "redirect_uri",
}
"""Keys of Gemini CLI within `oauth`, by our own,"""
OAUTH_IGNORED = frozenset({"enabled", "authorizationUrl", "tokenUrl", "registrationUrl", "audiences", "tokenParamName"})
"""and those that change nothing here, because the servers name their authorization servers themselves."""

MILLISECOND_KEYS = frozenset({"httpUrl", "trust", "includeTools", "excludeTools", "environment", "enabled"})
"""Beside these keys (of Gemini CLI and opencode), `timeout` is in milliseconds;"""
SECOND_KEYS = frozenset({"autoApprove", "alwaysAllow", "disabledTools", "transportType"})
"""beside these (of Cline and Roo Code) in seconds,"""
MAX_TIMEOUT_S = 3600
"""of which they allow this many, so that a larger number is in milliseconds,"""
MIN_TIMEOUT_MS = 1000
"""as is this number or a larger one without any of the keys."""

UNREACHABLE_TYPES = frozenset({"ws", "websocket", "sdk", "inMemory", "in-memory", "extension", "builtin", "platform"})
"""Values of `type` for servers that only their client can reach; such servers are left out."""
PLAIN_TYPES: Mapping[str, str | None] = {"local": "stdio", "remote": None, "": None}
"""Values of `type` with another name here, or with none."""

MISSPELT = 0.75
"""Similarity from which an unknown key counts as a misspelt known one,"""
MISSPELT_SHORT = 0.65
"""and the one for keys of up to four letters, of which one letter is more."""


def suggest_key(key: str) -> str | None:
    """The known key of a server that was probably meant; None if the key is not close to any."""
    folded = _fold(key)
    known = [*file_keys(ServerSection), *RENAMED, *COMPUTED]
    rated = [(SequenceMatcher(None, folded, _fold(name)).ratio(), name) for name in known]
    similarity, name = max(rated, key=lambda pair: pair[0])
    return name if similarity >= (MISSPELT_SHORT if len(folded) <= 4 else MISSPELT) else None


def _fold(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "")


def find_section(raw: Any) -> Loc | None:
    """Where a file has its servers; None if it has none."""
    for path in SECTIONS:
        value = raw
        for step in path:
            value = value.get(step) if isinstance(value, dict) else None
        if isinstance(value, dict) and (path != ("mcp",) or _are_servers(value)):
            return path
    return None


def _are_servers(value: dict[str, Any]) -> bool:
    return bool(value) and all(isinstance(item, dict) and item.keys() & {"command", "url"} for item in value.values())


def translate_file(raw: Any, file: Path, section: Loc | None = None) -> TranslatedFile:
    """Translates a file; `section` is where its servers are, by default where clients have them."""
    section = section or find_section(raw)
    if section is None:
        return TranslatedFile(raw, suggest_key=suggest_key)
    return _Translator(raw, file, section).translate()


class _Translator:
    """Translates one file."""

    def __init__(self, raw: dict[str, Any], file: Path, section: Loc) -> None:
        self.raw, self.file, self.section = raw, file, section
        self.translated = TranslatedFile({}, suggest_key=suggest_key)
        self.noted: set[str] = set()
        self.servers: dict[str, Any] = raw
        for step in section:
            self.servers = self.servers[step]  # type: ignore[index]
        self.variables = _ClientVariables(raw.get("inputs"), file, self.translated.inputs)
        gemini_keys = any(isinstance(item, dict) and "httpUrl" in item for item in self.servers.values())
        self.has_bare_variables = gemini_keys or file.parent.name == ".gemini"

    def translate(self) -> TranslatedFile:
        others = [key for key in self.raw if key not in (self.section[0], "$schema", "inputs")]
        if others:
            names = ", ".join(f"`{key}`" for key in others[:8]) + (", ..." if len(others) > 8 else "")
            self._note((others[0],), f"ignored, as keys of another program: {names}")
        servers = {}
        for name, raw in self.servers.items():
            self.translated.origins["mcpServers", name] = (*self.section, name)
            if (server := self._translate_server(name, raw)) is not None:
                servers[name] = server
        schema = {"$schema": self.raw["$schema"]} if isinstance(self.raw.get("$schema"), str) else {}
        self.translated.tree = {**schema, "mcpServers": servers}
        return self.translated

    def _note(self, loc: Loc, problem: str, remedy: str = "") -> None:
        note = ConfigError(problem, file=display_path(self.file), field=format_loc(loc), remedy=remedy)
        self.translated.notes.append(note)

    def _note_once(self, loc: Loc, problem: str) -> None:
        if problem not in self.noted:
            self.noted.add(problem)
            self._note(loc, problem)

    def _translate_server(self, name: str, raw: Any) -> Any:
        """The server in our form; None if it is left out."""
        if not isinstance(raw, dict):
            return raw
        loc = (*self.section, name)
        if (kind := _unreachable_type(raw)) is not None:
            self._note(loc, f"the server is left out, since only its own client can reach {kind!r}")
            return None
        server: dict[str, Any] = {}
        ours = file_keys(ServerSection)
        for key, value in raw.items():
            origin = (*loc, key)
            if key in RENAMED:
                self._put(server, name, RENAMED[key], value, origin)
            elif key in COMPUTED:
                for target, computed in self._compute(key, value, raw, origin):
                    self._put(server, name, target, computed, origin)
            elif (key in IGNORED and not (key == "sandbox" and raw.get("isolation") == "sandbox")) or (
                key not in ours and suggest_key(key) is None
            ):  # `sandbox` is a key of ours, too.
                self._note_once(origin, f"`{key}` is ignored: {IGNORED.get(key, 'it is not a key of ours')}")
            else:
                self._put(server, name, key, value, origin, replaces=True)
        if "httpUrl" in raw and not server.keys() & {"type", "transport"}:
            server["transport"] = "streamable-http"
        if server.get("includeTools") == ["*"]:
            del server["includeTools"]
        _normalize_values(server)
        return self.variables.translate(server, bare=self.has_bare_variables)

    def _put(
        self, server: dict[str, Any], name: str, key: str, value: Any, origin: Loc, *, replaces: bool = False
    ) -> None:
        """Sets a key; of two that mean the same, our own name counts, and mappings and lists are merged."""
        old = server.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            server[key] = {**old, **value}
        elif isinstance(old, list) and isinstance(value, list):
            server[key] = [*old, *value]
        elif old is None or replaces:
            server[key] = value
            self.translated.origins["mcpServers", name, key] = origin
        else:
            self._note(origin, f"`{origin[-1]}` is ignored: `{key}` is given too")

    def _compute(self, key: str, value: Any, raw: dict[str, Any], loc: Loc) -> Iterator[tuple[str, Any]]:
        """Our keys for one of another client that needs more than another name."""
        match key, value:
            case (("enabled" | "isActive"), bool()):
                yield "disabled", not value
            case "bearer_token_env_var", str():
                yield "auth_token", f"${{{value}}}"
            case "env_http_headers", dict():
                yield "headers", {header: f"${{{variable}}}" for header, variable in value.items()}
            case "env_vars", list():
                yield "env", {variable: f"${{{variable}:-}}" for variable in value if isinstance(variable, str)}
            case "startup_timeout_ms", int() | float():
                yield "connect_timeout_s", value / 1000
            case "timeout", int() | float() if not isinstance(value, bool):
                is_ms = is_milliseconds(value, raw.keys())
                seconds = value / 1000 if is_ms else value
                unit = f"milliseconds ({seconds:g} s)" if is_ms else "seconds"
                self._note(loc, f"`timeout: {value}` is read as {unit}", "write `timeout_s` to be certain")
                yield "timeout_s", seconds
            case "timeout", _:
                yield "timeout_s", value
            case "oauth", _:
                yield "oauth", self._translate_oauth(value, loc)
            case _:
                self._note(loc, f"`{key}` is ignored: its value has another form than its client's")

    def _translate_oauth(self, value: Any, loc: Loc) -> Any:
        """Our form of the settings of OAuth."""
        if not isinstance(value, dict):
            return value
        for name in OAUTH_IGNORED & value.keys():
            self._note_once((*loc, name), f"`{name}` is ignored: the server names its authorization server")
        kept = {name: item for name, item in value.items() if name not in OAUTH_IGNORED}
        return {OAUTH_RENAMED.get(name, name): item for name, item in kept.items()}


def is_milliseconds(value: float, keys: Any) -> bool:
    """Whether a client means milliseconds by `timeout`, judged by the other keys and the size of the number."""
    if value > MAX_TIMEOUT_S or MILLISECOND_KEYS & keys:
        return True
    return value >= MIN_TIMEOUT_MS and not SECOND_KEYS & keys


def _unreachable_type(raw: dict[str, Any]) -> str | None:
    """The type of a server that only its client can reach; Zed writes it as `source` of one without a program."""
    kind = raw.get("type") if raw.keys() & {"type", "command", "url"} else raw.get("source")
    return kind if isinstance(kind, str) and kind in UNREACHABLE_TYPES else None


def _normalize_values(server: dict[str, Any]) -> None:
    """Other clients' forms of our values: `command` with arguments or as a mapping, types, numbers in `env`."""
    command = server.get("command")
    if isinstance(command, dict):  # older Zed
        server |= {key: value for key, value in command.items() if key in ("args", "env")}
        server["command"] = command.get("path")
    elif isinstance(command, list) and command:  # opencode
        server["command"], server["args"] = command[0], [*command[1:], *server.get("args", ())]
    kind = server.get("type")
    if isinstance(kind, str) and kind in PLAIN_TYPES:
        server["type"] = PLAIN_TYPES[kind]
    if isinstance(env := server.get("env"), dict):
        server["env"] = {name: _env_text(value) for name, value in env.items() if value is not None}


def _env_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


class _ClientVariables:
    """Rewrites the variables of other clients to ours: `${env:NAME}`, `${input:id}`, `${workspaceFolder}`, `$NAME`."""

    PATTERN = re.compile(r"\$\{(?P<kind>env|input|workspaceFolder)(?::(?P<name>[^}]*))?\}|\$\{(?P<plain>[\w/]+)\}")
    BARE_PATTERN = re.compile(r"\$([A-Za-z_]\w*)")

    def __init__(self, inputs: Any, file: Path, asked: dict[str, str]) -> None:
        folder = project_folder(file)
        self.inputs: Mapping[str, Any] = {
            str(item.get("id")): item for item in (inputs if isinstance(inputs, list) else ()) if isinstance(item, dict)
        }
        self.asked = asked
        self.places: Mapping[str, str] = {
            "workspaceFolder": str(folder),
            "workspaceRoot": str(folder),
            "workspaceFolderBasename": folder.name,
            "userHome": str(Path.home()),
            "pathSeparator": "/",
            "/": "/",
        }

    def translate(self, value: Any, *, bare: bool) -> Any:
        """The value with every text rewritten; `bare` if a text that is only `$NAME` is a variable."""
        if isinstance(value, dict):
            return {key: self.translate(item, bare=bare) for key, item in value.items()}
        if isinstance(value, list):
            return [self.translate(item, bare=bare) for item in value]
        if not isinstance(value, str):
            return value
        if bare and (match := self.BARE_PATTERN.fullmatch(value)):
            return f"${{{match[1]}}}"
        return self.PATTERN.sub(self._rewrite, value)

    def _rewrite(self, match: re.Match[str]) -> str:
        match match["kind"]:
            case "env" if match["name"]:
                return f"${{{match['name']}}}"
            case "input" if match["name"]:
                return self._input(match["name"])
            case "workspaceFolder":
                return self.places["workspaceFolder"]
        return self.places.get(match["plain"] or "", match[0])

    def _input(self, name: str) -> str:
        """The environment variable for a question of VS Code: `API_KEY` for `${input:api-key}`."""
        variable = input_variable(name)
        asked = self.inputs.get(name, {})
        self.asked[variable] = f"`${{input:{name}}}`: {asked.get('description') or 'no description'}"
        default = asked.get("default")
        return f"${{{variable}:-{default}}}" if isinstance(default, str) and "}" not in default else f"${{{variable}}}"


def input_variable(name: str) -> str:
    """The environment variable that stands for an input of VS Code."""
    variable = re.sub(r"\W", "_", name, flags=re.ASCII).upper()
    return variable if re.match(r"[A-Z_]", variable) else f"INPUT_{variable}"
