"""The client half of MCP: connects to MCP servers over any transport and offers each one as a toolset."""
