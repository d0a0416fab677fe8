"""Jobs for the first day: tasks made up on the spot, and models small enough to learn them in front of the user."""
