"""Translates ms-swift's command-line flags to run files, and rejects what cannot be translated."""
