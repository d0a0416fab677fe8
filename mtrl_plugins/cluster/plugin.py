"""What the plug-in `cluster` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="cluster",
    train_commands=("mtrl_plugins.cluster.render_command", "mtrl_plugins.cluster.ray_job"),
)
