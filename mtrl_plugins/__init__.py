"""The plug-ins that come with mtrl, a folder each. `plugin.py` in a folder says what it adds; the core imports none."""
