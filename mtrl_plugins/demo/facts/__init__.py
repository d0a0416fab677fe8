"""The default demo: questions about people and cities whose facts are drawn for each task, and known to a tool only."""
