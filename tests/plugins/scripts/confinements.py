"""The ways to confine bash that work on this machine."""

from __future__ import annotations

from mtrl_plugins.scripts import confine

WORKING = [start for start in (confine.run_in_bubblewrap, confine.run_in_namespaces) if confine._works(start)]
