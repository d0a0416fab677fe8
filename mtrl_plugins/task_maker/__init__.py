"""Makes verifiable tasks from an MCP server whose state can be reset: `mtrl-train make-tasks`.

`explore.py` tries a server's tools and builds chains of calls, `chain.py` executes each again, and `questions.py`
writes the question that a chain answers.
"""
