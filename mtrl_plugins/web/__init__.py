"""The web UI for runs: reads their folders while they may be written, and treats all their text as untrusted.

`app.py` serves it for `mtrl-train view`, and the scripts beside them draw it.
"""
