"""Servers files of other MCP clients (Claude, Cursor, VS Code, Gemini CLI, Codex, ...), read as they are.

`client_files.py` translates a file, `client_keys.py` has the keys of all clients, `client_places.py` where each has its
files, and `import_servers.py` collects the servers of this machine for `mtrl-gateway import`.
"""
