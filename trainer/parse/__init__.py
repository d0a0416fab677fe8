"""Parsers of tool calls and reasoning in the policy's text, one for each model family."""
