"""What the plug-in `verifiers` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="verifiers",
    environments={"verifiers": "mtrl_plugins.verifiers.settings:VerifiersSettings"},
)
