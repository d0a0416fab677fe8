"""What the plug-in `verifiers` adds."""

from pathlib import Path

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="verifiers",
    environments={"verifiers": "mtrl_plugins.verifiers.settings:VerifiersSettings"},
    jobs=Path(__file__).with_name("jobs"),
)
