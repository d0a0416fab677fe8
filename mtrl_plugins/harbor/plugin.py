"""What the plug-in `harbor` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(name="harbor", environments={"harbor": "mtrl_plugins.harbor.settings:HarborSettings"})
