"""Makes verifiable tasks from an MCP server whose state can be reset: `mtrl-train make-tasks`.

`explore.py` tries a server's tools, `chain.py` builds chains of calls, `execute.py` runs each twice, and `questions.py`
writes the question that a chain answers.
"""
