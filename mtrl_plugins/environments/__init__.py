"""Environments of other frameworks, each in a process of its own whose Python has that framework.

`settings.py` says what `environment:` means in a run file; `episodes.py` plays environments with `reset` and `step`,
and `conversations.py` those with a runner of their own. `host_process.py` starts and asks the process, which is
`host_server.py` with one of the `*_adapter.py`.
"""
