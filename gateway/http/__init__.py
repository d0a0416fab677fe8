"""The gateway's HTTP server: OpenAI function schemas and `role: tool` messages over JSON."""
