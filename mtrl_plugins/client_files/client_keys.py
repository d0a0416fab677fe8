"""Tables of what other MCP clients write in their files: where the servers are, and what each key means to us."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher

from gateway.config.base import file_keys
from gateway.config.file_forms import ServerSection

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
