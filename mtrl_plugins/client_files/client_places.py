"""Where other MCP clients keep their servers files, by system: in the home folder and in a project."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
