"""Servers files of other MCP clients (Claude, Cursor, VS Code, Gemini CLI, Codex, ...), read as they are."""
