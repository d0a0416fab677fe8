"""What the gateway proves itself with to MCP servers over HTTP: fixed headers, a command's output, OAuth tokens."""
