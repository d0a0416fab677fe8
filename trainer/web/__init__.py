"""The web UI for runs: reads their folders while they may be written, and treats all their text as untrusted."""
