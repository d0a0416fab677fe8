"""Sandboxes: confined, limited processes for what a policy writes, for tools and MCP servers, and for bash scripts."""
