"""Rollouts on SGLang: real servers, spoken to over HTTP, in an environment of their own."""
