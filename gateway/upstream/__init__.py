"""An MCP server is a toolset: whichever transport, era or mood it comes in."""
