"""The gateway as an MCP server: whatever it offers, any MCP client of either era can use."""
