"""Trains agents that exist already: an HTTP endpoint for the policy, and the exact token ids behind their chats.

`settings.py` is `agent:` of run files. `endpoint.py` speaks the protocols (`*_dialect.py`), `agent_session.py` is one
rollout, and `turn_tree.py` finds which sampled ids stand behind a chat that comes back. `agent_runner.py` plays
rollouts with agents.
"""
