"""Trains agents that exist already: an HTTP endpoint for the policy, and the exact token ids behind their chats."""
