"""Reads the training commands of shell scripts with a confined bash.

`script_reader.py` is the entry point, `confine.py` and `namespaces.py` confine bash, `stubs.py` stands in for
programs, and `launches.py` reads what the stubs recorded.
"""
