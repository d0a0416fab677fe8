"""Starts, frames and ends every child process of ours.

`spawn` starts a program in a session of its own; `SupervisedProcess` ends it with all that it started, also when this
process is killed. `PipeProcess` exchanges messages with a child from the event loop, `RequestProcess` from any thread.
`child_entry.py` is the child's end: it runs a Python function, and has the framing of messages. `Reaper` removes what
is no process once this one is gone: folders, control groups, containers.
"""
