"""What the plug-in `plan` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(name="plan", train_commands=("mtrl_plugins.plan.plan_command",))
