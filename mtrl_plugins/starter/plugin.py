"""What the plug-in `starter` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(name="starter", train_commands=("mtrl_plugins.starter.init_command",))
