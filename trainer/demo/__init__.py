"""The default job: a task made up on the spot, and a model small enough to learn it in front of the user."""
