"""What the plug-in `verifiers` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="verifiers",
    run_sections={"verifiers": "mtrl_plugins.verifiers.settings:VerifiersSettings"},
    environments={"verifiers": "mtrl_plugins.verifiers.settings:VerifiersSettings"},
)
