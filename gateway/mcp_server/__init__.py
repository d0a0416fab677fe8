"""The server half of MCP: offers the gateway's tools, and its servers' resources and prompts, to any MCP client."""
