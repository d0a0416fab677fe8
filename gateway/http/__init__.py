"""The gateway over HTTP: OpenAI function schemas in, `role: tool` messages out."""
