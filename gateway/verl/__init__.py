"""verl 0.7's modules for tools and interactions, importable by users' files where verl itself is not installed.

compat_names.py  which names are offered, and the import hook (`gateway.import_hook`) that resolves them
base.py          the two base classes, `agent_data`, and the tracing decorator
schemas.py       tool schemas as models with fields
registry.py      interactions and tools of a YAML file, and the score by data source
"""
