"""What the plug-in `trl` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(name="trl")
