"""What the plug-in `web` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(name="web", train_commands=("mtrl_plugins.web.view_command",))
