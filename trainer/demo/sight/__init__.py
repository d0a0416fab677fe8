"""The demo for a model that sees: what it is asked stands in pictures alone, and only tools show them."""
