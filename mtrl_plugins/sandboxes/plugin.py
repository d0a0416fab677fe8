"""What the plug-in `sandboxes` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="sandboxes",
    sandboxes={
        "container": "mtrl_plugins.sandboxes.settings:ContainerSettings",
        "remote": "mtrl_plugins.sandboxes.settings:RemoteSettings",
    },
    gateway_commands=("mtrl_plugins.sandboxes.sandboxes_command",),
)
