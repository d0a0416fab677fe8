"""What the plug-in `agents` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="agents",
    run_sections={"agent": "mtrl_plugins.agents.settings:AgentSettings"},
)
