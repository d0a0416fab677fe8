"""Translates configurations of verl 0.7 to run files, rejects what it cannot, and calls verl's reward functions.

`translate.py` is the entry point, `table.py` has all keys, `*_keys.py` convert values that depend on several keys.
"""
