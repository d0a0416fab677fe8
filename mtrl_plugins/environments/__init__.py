"""Environments of other frameworks, each in a process of its own whose Python has that framework.

`frameworks.py` says what `environment: FRAMEWORK:NAME` means, `host_*.py` are the process and what is said to it,
`episode_*.py` play environments with `reset` and `step`, and `environment_*.py` those with a runner of their own.
`*_adapter.py` run inside the process. `interpreters.py` installs frameworks for `mtrl-train env`.
"""
