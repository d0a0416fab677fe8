"""Shows runs: tables in the terminal, and progress panels."""
