"""What the plug-in `scripts` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(name="scripts", train_commands=("mtrl_plugins.scripts.translate_command",))
