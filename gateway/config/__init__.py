"""Reading and validating the configuration: tool_configs/*.yaml and mcp_servers.json."""
