"""The gateway's web UI, and the style sheet and DOM helpers that it shares with the trainer's."""
