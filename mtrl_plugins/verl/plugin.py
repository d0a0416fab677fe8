"""What the plug-in `verl` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(name="verl", stand_ins=("mtrl_plugins.verl.compat_names:FINDER",))
