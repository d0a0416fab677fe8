"""Reads the training commands of shell scripts: with a confined bash, or without bash where the script is simple.

`script_reader.py` is the entry point, `confine.py` and `namespaces.py` confine bash, `stubs.py` stands in for
programs, `launches.py` reads what the stubs recorded, and `simple_script.py` reads scripts without bash.
"""
