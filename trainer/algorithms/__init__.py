"""Algorithms: credit, advantages, losses and packing. Imports nothing itself, so that settings load without torch."""
