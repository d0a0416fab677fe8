"""Rollouts on SGLang servers over HTTP: generation, routing, health checks, weight sync. SGLang has its own Python."""
