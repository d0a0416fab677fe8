"""Rollout workers: processes that play rollouts for the training process, which keeps the engine and admission.

`worker_pool.py` hands rollouts out, `worker_process.py` plays them, `worker_link.py` and `line_channel.py` are the wire
between them; the latter lets only those in that know the token.
"""
