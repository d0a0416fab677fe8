"""Rollout workers: processes that play rollouts for the training process, which keeps the engine and admission."""
