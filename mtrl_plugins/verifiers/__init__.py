"""Environments of PrimeIntellect's `verifiers`, in a process of their own; the plug-in `environments` runs it.

`adapter.py` is loaded by that process; `v0_environment.py` and `v1_environment.py` know the two interfaces, and
`chat_harness.py` is the harness of the newer one.
"""
