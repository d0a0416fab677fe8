"""The vision demo: the answer is visible in images only, which tools return."""
