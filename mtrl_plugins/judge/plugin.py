"""What the plug-in `judge` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(name="judge", rewards={"judge": "mtrl_plugins.judge.judge:Judge"})
