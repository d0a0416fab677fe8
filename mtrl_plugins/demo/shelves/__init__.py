"""The demo of tasks that were made from an MCP server: items in boxes, boxes on shelves."""
