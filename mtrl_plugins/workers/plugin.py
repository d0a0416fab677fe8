"""What the plug-in `workers` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="workers",
    train_sections={"rollout": "mtrl_plugins.workers.settings:WorkerSettings"},
    train_commands=("mtrl_plugins.workers.worker_command",),
)
