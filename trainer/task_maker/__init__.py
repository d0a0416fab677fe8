"""Makes verifiable tasks from an MCP server whose state can be reset: `mtrl-train make-tasks`."""
