"""A reward component that asks a language model behind an OpenAI-compatible endpoint: an LLM as a judge."""
